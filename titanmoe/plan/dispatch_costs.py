"""Costs of a layer's dispatch and combine: seconds of the messages of routed tokens, less what is computed meanwhile.

BlockCosts (titanmoe.plan.block_costs) adds the work of a block to them.
"""

from __future__ import annotations

from functools import cache
from math import ceil, comb
from typing import NamedTuple

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
    def parts(self) -> int:
        """Number of parts in which a microbatch's routed tokens are sent: 2 with halves, else 1."""
        return 1 + self.halves

    @property
    def overlap(self) -> str:
        """The value of moe.overlap: "halves", "pairs" or "none"."""
        return "halves" if self.halves else "pairs" if self.hidden else "none"


def seconds_in_parts(
    there: float, products: float, back: float, parts: int, before: float = 0.0, between: float = 0.0
) -> float:
    """Return the seconds from the first dispatch message to the last combine message, of routed tokens sent in parts.

    Two workers each do one thing at a time: the wire and the experts. A part is sent `between` after the one before it,
    and outputs queue behind all dispatch messages. If one part takes `there` to arrive, `products` to be multiplied and
    `back` to return, part i = 1..n

        arrives     here(i) = max((i - 1) * between, here(i - 1)) + there
        is done     done(i) = max(here(i), done(i - 1)) + products          done(0) = before + (n - 1) * between
        is back     back(i) = max(done(i), back(i - 1), here(n)) + back     T(n) = back(n)

    Backward is the same with the products of backward and with `there` and `back` swapped: it starts by sending the
    gradients of the outputs that came back.

    Args:
        there, products, back: seconds of one part.
        parts: n, one or two.
        before: seconds of other work of the experts' device, such as the shared expert's.
        between: seconds computed before the next part can be sent, such as the attention of the next half. In backward
            they lie between the last two messages, which is the same sequence reversed in time.
    """
    here, done, returned = 0.0, before + (parts - 1) * between, 0.0
    arrivals = [here := max(i * between, here) + there for i in range(parts)]
    for arrival in arrivals:
        done = max(arrival, done) + products
        returned = max(done, returned, here) + back
    return returned


def hidden_by_pairs(pp: int, microbatches: int, layers: float) -> float:
    """Return the fraction of routed tokens' messages that another microbatch's computation hides (DualPipeV).

    It is the fraction on the first pipeline rank, which has the fewest pairs, and at most PROFILED. A layer sends four
    messages in a pair; the first and the last of the pair have no computation beside them (docs/moe.md#overlap has what
    was measured).

    Args:
        pp: pipeline ranks.
        microbatches: microbatches of a step.
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

    def move_seconds(self, count: float) -> float:
        """Return the seconds of memory-bound work.

        Args:
            count: bytes read and written, as if numbers had 16 bits; they are scaled to the width of the compute dtype.
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

        Forward and backward alike, with the products of that direction. 0 if ep * etp is 1.

        Args:
            choice: the dispatcher, and what overlaps with it.
            T: tokens of the rank, each of which is sent to top_k experts.
            products: seconds of the experts' products of one part.
            shared_seconds: seconds of the shared expert's products, which run while routed tokens are in flight.
            between: seconds that are computed before the second of two parts can be sent; in backward between the last
                two messages.
        """
        if ep * etp == 1:
            return 0.0
        parts = choice.parts
        one_piece = DISPATCHERS.look_up(choice.dispatcher).unhidden_seconds
        whole = one_piece(self, T, ep, etp) / 2
        part = (self.exchange(choice.dispatcher, T / parts, ep, etp) - one_piece(self, T / parts, ep, etp)) / 2
        all_messages = 2 * (whole + parts * part)
        hop = min(whole / 2, between) if choice.halves else 0.0  # of the first half, the only hop beside something
        between = 0.0 if whole else between
        end = seconds_in_parts(part, products, part, parts, max(0.0, shared_seconds - whole), between)
        exposed = 2 * whole - hop + end - shared_seconds - (parts - 1) * between - parts * products
        return exposed + self.links.message_share * (all_messages - exposed)

    def expert_weights(self, ep: int, etp: int) -> float:
        """Return the elements of one MoE layer's expert weights on a rank: divided by ep and etp, not yet by edp."""
        return 3 * self.model.num_experts / ep * self.model.dim * self.model.expert_hidden / etp

    def cost_of_halves(self, weights: float, T: float, direction: int, times: float) -> Cost:
        """Return the cost that splitting a microbatch into halves adds, without launches.

        Backward sums both halves' gradients of the weights. Both halves' outputs, or gradients of inputs, are joined.

        Args:
            weights: elements of the weights whose gradients are summed.
            T: tokens whose outputs are joined.
            direction: 0 forward, 1 backward.
            times: FLOPs relative to forward; up to 1 there are no gradients of weights.
        """
        return Cost(
            memory=self.move_seconds(T * self.model.dim * HALVES),
            copies=self.move_seconds(weights * HALVES_WEIGHTS) * direction * (times > 1),
        )

    def in_pairs(
        self, choice: DispatchChoice, seconds: float, message_seconds: float, hidden: float
    ) -> tuple[DispatchChoice, float]:
        """Return (choice, seconds of all experts) with overlap in pairs if that is faster, else both unchanged.

        Args:
            choice: the dispatcher without pairs.
            seconds: seconds of all experts without pairs.
            message_seconds: the seconds of messages in `seconds`.
            hidden: fraction of the messages that pairs would hide.
        """
        spec, saved = DISPATCHERS.look_up(choice.dispatcher), hidden * (1 - self.links.message_share) * message_seconds
        pays = not choice.halves and not spec.cannot_overlap and NEAR * (seconds - saved) < seconds
        return (choice._replace(hidden=hidden), seconds - saved) if pays else (choice, seconds)

    def seconds_beside_messages(self, products: float) -> float:
        """Return the seconds of the shared expert's products beside messages; 0 if the stack has no overlap.

        Args:
            products: seconds of the shared expert's products.
        """
        return products if self.stack.hides_behind_shared else 0.0

    def exchange(self, dispatcher: str, T: float, ep: int, etp: int) -> float:
        """Return the seconds to dispatch and combine T tokens in forward, not overlapped. Backward sends as much.

        Args:
            dispatcher: name of the dispatcher.
            T: tokens of the rank, each of which is sent to top_k experts.
            ep: ranks of expert parallel.
            etp: ranks of expert tensor parallel.
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
    def visits(self, parts: int) -> float:
        """Return the mean number of parts that a token's experts lie in, of `parts` equal parts of all experts.

        Args:
            parts: number of parts, such as expert ranks or nodes.
        """
        model = self.model
        K, groups = model.top_k, model.num_groups
        if groups <= 1:
            return parts * (1 - (1 - 1 / parts) ** K)
        top_groups = model.top_groups
        if parts > groups:
            reached = parts * top_groups / groups
            return reached * (1 - (1 - 1 / reached) ** K)
        groups_per_part = groups // parts  # groups of a part, of which a token may choose from `n`
        draws = {
            n: comb(groups_per_part, n) * comb(groups - groups_per_part, top_groups - n)
            for n in range(min(groups_per_part, top_groups) + 1)
        }
        missed = sum(count * (1 - n / top_groups) ** K for n, count in draws.items()) / comb(groups, top_groups)
        return parts * (1 - missed)
