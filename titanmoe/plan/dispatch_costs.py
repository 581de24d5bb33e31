"""Costs of a layer's dispatch and combine: seconds of the messages of routed tokens, less what is computed meanwhile.

BlockCosts (titanmoe.plan.block_costs) adds the work of a block to them.
"""

from __future__ import annotations

from functools import cache
from math import ceil, comb
from typing import Literal, NamedTuple

from titanmoe.config.schema import Model
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.plan.cost import Cost
from titanmoe.plan.devices import Device
from titanmoe.plan.links import Factors, LinkGroup, Links
from titanmoe.plan.training_stacks import Stack

NEAR = 1.02
"""Gain below which a choice is not made: no formula is exact to 2 %."""
PROFILED = 0.37
"""Fraction of the messages of routed tokens that the overlap of two microbatches hides at most: 36.55 %, by a profile
of Megatron's with Qwen3-30B-A3B on 16 H100s (NVIDIA-NeMo/Megatron-Bridge,
skills/nemo-mbridge-perf-expert-parallel-overlap)."""

BLOCK_KERNELS = 96
"""Number of kernels of a block, forward and backward, by rehearsals (tests/plan/test_price.py)."""
HALVES, HALVES_WEIGHTS = 4, 6
"""Additional bytes that the halves of a microbatch move, in 16 bits: per element of a rank's owned tokens, to join the
outputs in forward and the inputs' gradients in backward; and per element of weights, to sum both gradients."""


class DispatchChoice(NamedTuple):
    """Dispatcher, and what is computed while its messages are in flight."""

    dispatcher: str
    halves: bool = False
    """Whether moe.overlap is "halves"."""
    hidden: float = 0.0
    """Fraction of the messages' time in which another microbatch is computed: above 0 if moe.overlap is "pairs"."""

    @property
    def chunks(self) -> int:
        """Number of chunks in which a microbatch's routed tokens are dispatched: 2 with halves, else 1."""
        return 1 + self.halves

    @property
    def overlap(self) -> Literal["none", "halves", "pairs"]:
        """The value of moe.overlap."""
        return "halves" if self.halves else "pairs" if self.hidden else "none"


def seconds_in_chunks(
    dispatch_s: float, products_s: float, combine_s: float, chunks: int, before: float = 0.0, between: float = 0.0
) -> float:
    """Return the seconds from the first dispatch message to the last combine message of tokens dispatched in chunks.

    Two workers each do one thing at a time: the wire and the experts. A chunk is dispatched `between` after the one
    before it, and combine messages queue behind all dispatch messages. Chunk i = 1..n

        arrives         dispatched(i) = max((i - 1) * between, dispatched(i - 1)) + dispatch_s
        is multiplied   multiplied(i) = max(dispatched(i), multiplied(i - 1)) + products_s
                        multiplied(0) = before + (n - 1) * between
        returns         combined(i) = max(multiplied(i), combined(i - 1), dispatched(n)) + combine_s

    and all end at combined(n). In backward, products are those of backward, and `dispatch_s` and `combine_s` change
    places: it starts by sending the gradients of the combined outputs.

    Args:
        dispatch_s, products_s, combine_s: seconds of one chunk's dispatch, expert products and combine.
        chunks: n, one or two.
        before: seconds of other work of the experts' device, such as the shared expert's.
        between: seconds computed before the next chunk can be sent, such as the attention of the next half. In backward
            they lie between the last two messages, which is the same sequence reversed in time.
    """
    dispatched, multiplied, combined = 0.0, before + (chunks - 1) * between, 0.0
    arrivals = [dispatched := max(i * between, dispatched) + dispatch_s for i in range(chunks)]
    for arrival in arrivals:
        multiplied = max(arrival, multiplied) + products_s
        combined = max(multiplied, combined, dispatched) + combine_s
    return combined


def hidden_by_pairs(pp: int, microbatches: int, layers: float) -> float:
    """Return the fraction of routed tokens' messages that another microbatch's computation hides (DualPipeV).

    It is the fraction on the first pipeline rank, which has the fewest pairs, and at most PROFILED. A layer sends four
    messages in a pair; the first and the last of the pair have no computation beside them (docs/moe.md#overlap has what
    was measured).

    Args:
        layers: MoE layers of a stage.
    """
    unpaired = min(1.0, (3 * pp - 1) / (2 * microbatches))
    return min(PROFILED, (1 - unpaired) * (1 - 1 / (2 * max(layers, 1.0))))


class DispatchCosts:
    """Seconds of the messages of routed tokens, and of what halves add, for one model on one device.

    Base class of `BlockCosts`, which sets the fields.
    """

    model: Model
    device: Device
    factors: Factors
    links: Links
    stack: Stack
    w: int
    """Bytes of a number in the compute dtype."""
    routed_token_bytes: int

    def move_seconds(self, count: float) -> float:
        """Return the seconds of memory-bound work.

        `count` is the bytes read and written as if numbers had 16 bits; they are scaled to the width of the compute
        dtype.
        """
        return count * self.stack.memory * self.w / 2 / (self.device.bandwidth * self.factors.memory)

    def routed_message_seconds(
        self,
        choice: DispatchChoice,
        T: float,
        *,
        ep: int,
        etp: int,
        products: float,
        shared_seconds: float,
        between: float = 0.0,
    ) -> float:
        """Return the seconds that dispatch and combine of T tokens add to the computation that hides them.

        They are what computation does not hide, and what the rest slows it down by (`Links.exposed`); of forward or of
        backward, as `products` are. 0 if ep * etp is 1.

        Args:
            choice: the dispatcher, and what overlaps with it.
            T: tokens of the rank, each of which is sent to top_k experts.
            products: seconds of the experts' products of one chunk.
            shared_seconds: seconds of the shared expert's products, which run while routed tokens are in flight.
            between: seconds that are computed before the second of two chunks can be sent; in backward between the last
                two messages.
        """
        if ep * etp == 1:
            return 0.0
        chunks = choice.chunks
        unhidden_seconds = DISPATCHERS.look_up(choice.dispatcher).unhidden_seconds
        unhidden = unhidden_seconds(self, T, ep, etp) / 2
        both = self.exchange(choice.dispatcher, T / chunks, ep, etp) - unhidden_seconds(self, T / chunks, ep, etp)
        chunk = both / 2  # dispatch takes as long as combine
        all_messages = 2 * (unhidden + chunks * chunk)
        hop = min(unhidden / 2, between) if choice.halves else 0.0  # of the first half, the only hop beside something
        between = 0.0 if unhidden else between
        end = seconds_in_chunks(chunk, products, chunk, chunks, max(0.0, shared_seconds - unhidden), between)
        exposed = 2 * unhidden - hop + end - shared_seconds - (chunks - 1) * between - chunks * products
        return exposed + self.links.message_fraction * (all_messages - exposed)

    def cost_of_halves(self, weights: float, T: float, direction: int, times: float) -> Cost:
        """Return the cost that splitting a microbatch into halves adds, without launches.

        Backward sums both halves' gradients of the weights. Both halves' outputs, or gradients of inputs, are joined.

        Args:
            weights: elements of the weights whose gradients are summed.
            T: tokens whose outputs are joined.
            direction: 0 forward, 1 backward.
            times: FLOPs relative to forward; in backward at most 1 if the weights are frozen, without gradients.
        """
        return Cost(
            memory=self.move_seconds(T * self.model.dim * HALVES),
            copies=self.move_seconds(weights * HALVES_WEIGHTS) * direction * (times > 1),
        )

    def in_pairs(
        self, choice: DispatchChoice, seconds: float, message_seconds: float, hidden: float
    ) -> tuple[DispatchChoice, float]:
        """Return (choice, seconds of all experts) with overlap in pairs if that saves over 2 %, else both unchanged.

        Unchanged too in halves, or with a dispatcher that cannot overlap.

        Args:
            choice: the dispatcher without pairs.
            seconds: seconds of all experts without pairs.
            message_seconds: the seconds of messages in `seconds`.
            hidden: fraction of the messages that pairs would hide.
        """
        spec = DISPATCHERS.look_up(choice.dispatcher)
        saved = hidden * (1 - self.links.message_fraction) * message_seconds
        pays = not choice.halves and not spec.cannot_overlap and NEAR * (seconds - saved) < seconds
        return (choice._replace(hidden=hidden), seconds - saved) if pays else (choice, seconds)

    def exchange(self, dispatcher: str, T: float, ep: int, etp: int) -> float:
        """Return the seconds to dispatch and combine T tokens in forward, not overlapped. Backward sends as much.

        0 if ep * etp is 1.

        Args:
            T: tokens of the rank, each of which is sent to top_k experts.
        """
        if self.stack.gathers_etp and dispatcher == "alltoall" and etp > 1:
            routed = T * self.model.top_k * self.model.dim * self.w
            gathered = self.links.gather(LinkGroup(etp, 1), routed * etp)
            return 2 * (self.links.exchange(LinkGroup(ep, etp), routed) + gathered)
        return 0.0 if ep * etp == 1 else DISPATCHERS.look_up(dispatcher).seconds(self, T, ep, etp)

    def expert_group(self, ep: int, etp: int) -> LinkGroup:
        """Return the group of ranks that a dispatcher's messages go to: ep x etp consecutive ranks."""
        return LinkGroup(ep * etp, 1)

    def domains(self, ep: int, etp: int) -> int:
        """Return the number of domains of fast links that a group of ep x etp ranks lies in."""
        return ceil(ep * etp / self.expert_group(ep, etp).ranks_per_domain(self.device.domain))

    def groups_by_domain(self, ep: int, etp: int) -> tuple[LinkGroup, LinkGroup]:
        """Return two groups: the ranks of ep x etp in one domain of fast links, and one of its ranks in each domain."""
        near = self.expert_group(ep, etp).ranks_per_domain(self.device.domain)
        return LinkGroup(near, 1), LinkGroup(self.domains(ep, etp), near)

    @cache  # noqa: B019  (few values, as long as the pricer)
    def visits(self, destinations: int) -> float:
        """Return the mean number of destinations of a token, if all experts are divided equally among them.

        `destinations` is the number of expert ranks or of nodes. The result is from 1 to top_k.
        """
        model = self.model
        K, groups = model.top_k, model.num_groups
        if groups <= 1:
            return destinations * (1 - (1 - 1 / destinations) ** K)
        top_groups = model.top_groups
        if destinations > groups:
            reached = destinations * top_groups / groups
            return reached * (1 - (1 - 1 / reached) ** K)
        groups_each = groups // destinations  # groups of a destination, of which a token may choose from `n`
        draws = {
            n: comb(groups_each, n) * comb(groups - groups_each, top_groups - n)
            for n in range(min(groups_each, top_groups) + 1)
        }
        missed = sum(count * (1 - n / top_groups) ** K for n, count in draws.items()) / comb(groups, top_groups)
        return destinations * (1 - missed)
