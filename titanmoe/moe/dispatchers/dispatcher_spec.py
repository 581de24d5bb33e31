"""The specs of dispatchers, without torch, and the table of their names. Read by config, planner and training.

`ep` and `etp` are the degrees of a dispatch group, `tokens` the number of tokens that a rank owns in a microbatch, and
`costs` the planner's model and network. A new dispatcher is a file that has its spec too, and a line in DISPATCHERS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from titanmoe.config.blocks import has_expert_adapters, moe_layers
from titanmoe.config.component_kinds import ComponentKind, Spec
from titanmoe.config.ranges import Violation, choices_text
from titanmoe.config.schema import Config, Model
from titanmoe.fold.degrees import Fold, nodes_of_a_group

ALIGN = 8  # routed tokens: 16 bytes of bfloat16, which the grouped product needs where it sums over an expert's tokens


class Network(Protocol):
    """The planner's estimates of communication: seconds of a collective, from the bytes that it sends."""

    def gather(self, group: Any, size: float) -> float:
        """Return the seconds of an all-gather, after which each rank has `size` bytes."""

    def exchange(self, group: Any, size: float) -> float:
        """Return the seconds of an all-to-all in which each rank sends `size` bytes, including those for itself."""

    def relay(self, group: Any, across: float, inside: float) -> float:
        """Return the seconds of one-sided kernels that pass tokens on from rank to rank.

        Args:
            group: the ranks.
            across: the bytes that each rank sends out of its NVLink domain.
            inside: the bytes that each rank sends within its NVLink domain.
        """


class ExchangeCosts(Protocol):
    """Interface through which a dispatcher's spec asks the planner for the costs of messages in the planned mapping."""

    model: Model
    routed_token_bytes: int
    """The bytes of one routed token's activations."""

    @property
    def links(self) -> Network:
        """The planner's estimates of the messages' seconds."""

    def expert_group(self, ep: int, etp: int) -> Any:
        """Return the dispatch group (ep x etp ranks), as the methods of `links` take a group."""

    def domains(self, ep: int, etp: int) -> int:
        """Return the number of NVLink domains over which the ranks of a dispatch group are spread."""

    def groups_by_domain(self, ep: int, etp: int) -> tuple[Any, Any]:
        """Return two groups: a dispatch group's ranks within one NVLink domain, and one rank of each of its domains."""

    def visits(self, destinations: int) -> float:
        """Return the mean number of destinations of a token (1 to top_k), if experts are divided equally among them.

        `destinations` is the number of ranks or of NVLink domains.
        """


class StaticSizes(NamedTuple):
    """The slots for routed tokens on a rank, where their number does not depend on the routing; else 0."""

    receive_slots: int = 0
    """Slots, used or not, that go through the rank's experts."""
    buffer_slots: int = 0
    """Slots of the receive buffer."""


def symm_mem_sizes(model: Model, factor: float, tokens: int, ep: int, etp: int) -> StaticSizes:
    """Return the numbers of slots that the dispatcher symm_mem allocates on a rank.

    Receive slots are `factor` (moe.symm_mem_factor) times the routed tokens that arrive with even routing, but no more
    than can arrive, plus alignment. The buffer has as many, or as many as the rank sends, as outputs return in it too.
    """
    local_experts, sent = model.num_experts // ep, tokens * model.top_k * etp  # with even routing, as many arrive
    arriving = min(math.ceil(factor * sent), ep * etp * tokens * min(model.top_k, local_experts))
    slots = arriving + -arriving % ALIGN + local_experts * ALIGN
    return StaticSizes(slots, max(sent, slots))


class DispatcherSpec(Spec):
    """The spec of a dispatcher: help, constraints and costs, without torch. The values here are the defaults."""

    host_syncs = 1
    """The number of times that the host waits in a layer's forward, to learn sizes.

    With padded expert buffers it is 0.
    """
    cannot_overlap = ""
    """Reason why nothing is computed between sending routed tokens and waiting; "" if exchanges are `SplitExchange`s.

    It is the end of the message "moe.overlap = "halves" computes between the two, and this dispatcher ...".
    """
    works_by_node = False
    """Whether the dispatcher needs to know which ranks of its group share a node."""
    has_unused_slots = False
    """Whether experts get unused slots after their last routed token, for which they may compute NaN."""
    traceable = False
    """Whether torch.compile can trace the exchanges, as part of a MoE layer in one graph."""
    asks_machine = False
    """Whether the dispatcher needs more than torch.distributed; then its `missing` says what this machine lacks."""
    cannot_pad = ""
    """Reason why pad_to_capacity is refused; "" if it is not.

    It is the end of the message "moe.pad_to_capacity = true makes every size static, ...".
    """
    model_width_only = False
    """Whether the tokens that it sends must be as wide as the model, so that none can have its index behind it."""
    own_buffers = False
    """Whether the dispatcher has buffers that the planner does not count."""
    search_tries = False
    """Whether the planner's search may replace the dispatcher, or choose it in place of another that says so too."""

    def contradictions(self, config: Config) -> Iterator[Violation]:
        """Yield a violation for each option of the recipe that the dispatcher cannot run with, whatever the mapping.

        Looks at moe.overlap = "halves", moe.pad_to_capacity and lora.dropout of experts.
        """
        moe = config.moe
        if moe.overlap == "halves":
            yield from halves_violations(config, self)
        if moe.pad_to_capacity and self.cannot_pad:
            yield Violation(
                ("moe.pad_to_capacity", "moe.dispatcher"),
                f"moe.pad_to_capacity = true makes every size static, {self.cannot_pad}",
            )
        if self.model_width_only and config.lora.dropout and has_expert_adapters(config):
            yield Violation(
                ("moe.dispatcher", "lora.dropout"),
                f"lora.dropout = {config.lora.dropout:g} sends each token's index to its experts, and moe.dispatcher = "
                f'"{moe.dispatcher}" sends tokens alone: use dispatcher = "alltoall", or leave experts out of '
                'lora.targets, such as targets = ["*.attention.*"]',
            )

    def violations(self, config: Config, degrees: Mapping[str, int]) -> Iterator[str]:
        """Yield a message for each reason why the dispatcher cannot run with these parallel degrees.

        Reasons are moe.overlap = "pairs" with pp, nodes that groups do not fit (`works_by_node`), and `limits`.
        `degrees` has the ranks on each axis by name ("pp", "ep", "etp") and of a pipeline stage ("stage"); some may be
        missing, which are then not checked.
        """
        if config.moe.overlap == "pairs" and self.cannot_overlap and degrees.get("pp", 1) > 1:
            yield (
                'moe.overlap = "pairs" computes where the host would wait for routed tokens, and moe.dispatcher = '
                f'"{config.moe.dispatcher}" has no such place: use dispatcher = {overlapping_quoted()}, or '
                'overlap = "none"'
            )
        if self.works_by_node and {"pp", "stage", "ep", "etp"} <= degrees.keys():
            yield from self._nodes(config, degrees)
        ep, etp = degrees.get("ep", 1), degrees.get("etp", 1)
        if {"ep", "etp"} <= degrees.keys() and ep * etp > 1:  # a group of one sends nothing
            yield from self.limits(config, ep, etp)

    def limits(self, config: Config, ep: int, etp: int) -> Iterator[str]:
        """Yield a message for each reason why the dispatcher cannot serve a dispatch group of these degrees.

        Called only if the group has more than one rank. Yields nothing by default; subclasses override it.
        """
        yield from ()

    def _nodes(self, config: Config, degrees: Mapping[str, int]) -> Iterator[str]:
        """Yield a message if a node holds neither full dispatch groups nor an equal fraction of one, with full experts.

        Checked for dispatchers that work node by node (`works_by_node`). parallelism.node is the number of ranks of a
        node; `degrees` has "ep", "etp", "pp" and "stage", the ranks of a pipeline stage.
        """
        node, stage, ep, etp = config.parallelism.node, degrees["stage"], degrees["ep"], degrees["etp"]
        world, size = degrees["pp"] * stage, ep * etp
        if node < 1 or stage % size or nodes_of_a_group(world, ep, etp, node) is not None:
            return
        fits = [n for n in range(1, world + 1) if nodes_of_a_group(world, ep, etp, n) is not None]
        yield (
            f'moe.dispatcher = "{config.moe.dispatcher}" needs nodes that hold full groups of ep * etp = {ep} * {etp} '
            f"= {size} ranks, or equal parts of one with full experts, and parallelism.node = {node} is neither "
            f"({node} % {size} = {node % size}; {size} % {node} = {size % node}, {node} % etp = {node % etp}): use "
            f'{choices_text("parallelism.node", fits, node)}, another ep or etp, or dispatcher = "alltoall"'
        )

    def static_sizes(self, config: Config, tokens: int, ep: int, etp: int) -> StaticSizes:
        """Return the slots for routed tokens that the dispatcher allocates on a rank whatever the routing is.

        For the planner's memory estimate. All 0 by default.
        """
        return StaticSizes()

    def seconds(self, costs: ExchangeCosts, tokens: float, ep: int, etp: int) -> float:
        """Estimate the seconds of a layer's dispatch and combine in one forward, without overlap, for the planner.

        By default those of two all-to-alls of routed tokens.
        """
        row, K = costs.routed_token_bytes, costs.model.top_k
        return 2 * costs.links.exchange(costs.expert_group(ep, etp), tokens * K * etp * row)

    def unhidden_seconds(self, costs: ExchangeCosts, tokens: float, ep: int, etp: int) -> float:
        """Return how many of the seconds that `seconds` estimates no overlap with computation can hide.

        For the planner; 0 by default.
        """
        return 0.0


class AllToAllSpec(DispatcherSpec):
    help = "alltoall moves each token only to its experts' ranks."
    implementation = "titanmoe.moe.dispatchers.alltoall:AllToAll"
    traceable = True
    search_tries = True


class AllGatherSpec(DispatcherSpec):
    help = "allgather moves every token to every rank of ep x etp: for tiny ep, or top_k near ep."
    implementation = "titanmoe.moe.dispatchers.allgather:AllGather"
    traceable = True
    cannot_overlap = "sends and waits at once"
    own_buffers = True

    def seconds(self, costs: ExchangeCosts, tokens: float, ep: int, etp: int) -> float:
        return 2 * costs.links.gather(costs.expert_group(ep, etp), tokens * ep * etp * costs.routed_token_bytes)


class HierarchicalSpec(DispatcherSpec):
    help = (
        "hierarchical is an all-to-all in which a token is sent to each node once, and copied inside it: for "
        "ep x etp that spans nodes, if a token has several experts on one."
    )
    implementation = "titanmoe.moe.dispatchers.hierarchical:Hierarchical"
    traceable = True
    host_syncs = 2
    works_by_node = True
    search_tries = True

    def seconds(self, costs: ExchangeCosts, tokens: float, ep: int, etp: int) -> float:
        """Estimate the seconds of a layer's dispatch and combine in one forward, without overlap.

        Each token goes once to each NVLink domain of its experts, then within the domain as one copy for each expert
        and etp rank.
        """
        if costs.domains(ep, etp) == 1:
            return super().seconds(costs, tokens, ep, etp)
        within, _ = costs.groups_by_domain(ep, etp)
        inside = costs.links.exchange(within, tokens * costs.model.top_k * etp * costs.routed_token_bytes)
        return self.unhidden_seconds(costs, tokens, ep, etp) + 2 * inside

    def unhidden_seconds(self, costs: ExchangeCosts, tokens: float, ep: int, etp: int) -> float:
        """Return the seconds of the messages between NVLink domains, in both directions; 0 in a single domain."""
        if (domains := costs.domains(ep, etp)) == 1:
            return 0.0
        _, across = costs.groups_by_domain(ep, etp)
        return 2 * costs.links.exchange(across, tokens * costs.routed_token_bytes * costs.visits(domains))


class SymmetricMemorySpec(DispatcherSpec):
    help = (
        "symm_mem (run on one GPU, not on several) is alltoall by writing to the memory of other GPUs of the node, in "
        "which the host never waits for sizes: for GPUs that often idle waiting for the host. On CPUs it shows that "
        "this is right, through memory in /dev/shm, and is slower."
    )
    implementation = "titanmoe.moe.dispatchers.symm_mem:Symmetric"
    traceable = True
    host_syncs = 0
    cannot_overlap = "leaves its counts on the device"
    has_unused_slots = True
    asks_machine = True
    model_width_only = True
    cannot_pad = (
        'so that moe.dispatcher = "symm_mem" saves the host nothing: use dispatcher = "alltoall", which then does not '
        "wait either, or pad_to_capacity = false"
    )

    def limits(self, config: Config, ep: int, etp: int) -> Iterator[str]:
        """Yield a message if a dispatch group is not within one node: ranks map each other's memory only there.

        Not if parallelism.node is 1, as it is without a launcher.
        """
        ranks, node = ep * etp, config.parallelism.node  # 1 also where no launcher says
        if node > 1 and node % ranks:
            yield (
                f'moe.dispatcher = "symm_mem" needs its group within a node, and ep * etp = {ep} * {etp} ranks are on '
                f'nodes of {node}: use another ep or etp, or dispatcher = "alltoall"'
            )

    def static_sizes(self, config: Config, tokens: int, ep: int, etp: int) -> StaticSizes:
        if ep * etp == 1:
            return StaticSizes()
        return symm_mem_sizes(config.model, config.moe.symm_mem_factor, tokens, ep, etp)


class AutoSpec(AllToAllSpec):
    """The spec of "auto": the facts of alltoall, so that it is legal wherever alltoall is.

    A run replaces "auto" by symm_mem or alltoall at its start; a model outside a run uses alltoall.
    """

    help = (
        "auto is symm_mem on GPUs whose ep x etp lies within a node, if they can map each other's memory and the check "
        "at the start passes, else alltoall; the header says which and why."
    )
    search_tries = False


def why_not_symm_mem(config: Config, fold: Fold, node: int, gpus: bool) -> str:
    """Return why the dispatcher "auto" becomes alltoall under this recipe and mapping; "" if it becomes symm_mem.

    It is the first of the reasons. After "", a run may still fall back to alltoall, as its GPUs cannot share memory.

    Args:
        node: the number of ranks on a node, which share NVLink.
        gpus: whether ranks run on GPUs.
    """
    ranks, spec = fold.ep * fold.etp, DISPATCHERS.look_up("symm_mem")
    if ranks == 1:
        return "with ep * etp = 1 no routed token leaves its rank"
    if not gpus:
        return "symm_mem is slower on CPUs"
    if node % ranks:
        return f"ep * etp = {fold.ep} * {fold.etp} ranks are on nodes of {node}"
    symmetric = with_dispatcher(config, "symm_mem")
    problems = [violation.text for violation in spec.contradictions(symmetric)]
    problems += spec.violations(symmetric, {"pp": fold.pp})
    return problems[0].partition(": use ")[0] if problems else ""


def with_dispatcher(config: Config, name: str) -> Config:
    """Return a copy of the config with this moe.dispatcher."""
    return replace(config, moe=replace(config.moe, dispatcher=name))


def with_planned_dispatcher(config: Config, fold: Fold, node: int, gpus: bool) -> Config:
    """Replace the dispatcher "auto" by the one that a run would choose on a machine whose GPUs can share memory.

    Returns a copy, or the config itself if it names another dispatcher.

    Args:
        node: the number of ranks on a node, which share NVLink.
        gpus: whether ranks run on GPUs.
    """
    if config.moe.dispatcher != "auto":
        return config
    return with_dispatcher(config, "alltoall" if why_not_symm_mem(config, fold, node, gpus) else "symm_mem")


def halves_violations(config: Config, spec: DispatcherSpec) -> Iterator[Violation]:
    """Yield a violation for each reason why moe.overlap = "halves" is impossible, whatever the config's moe.overlap is.

    Reasons are no MoE layer, one sample per microbatch, a dispatcher that cannot overlap, and moe.capacity_factor.
    `spec` is that of the recipe's dispatcher.
    """
    moe, samples = config.moe, config.training.local_batch_size
    halves, off = 'moe.overlap = "halves"', 'or overlap = "none"'
    if moe_layers(config.model) == 0:
        yield Violation(
            ("moe.overlap", "model.num_dense_layers"),
            f"{halves} computes while routed tokens are in flight, and no block of this model has experts: set "
            'overlap = "none"',
        )
    if samples == 1:
        yield Violation(
            ("moe.overlap", "training.local_batch_size"),
            f"{halves} halves the samples of a microbatch, and training.local_batch_size = 1: use 2 or more, {off}",
        )
    if spec.cannot_overlap:
        yield Violation(
            ("moe.overlap", "moe.dispatcher"),
            f"{halves} computes between sending tokens and waiting for them, and moe.dispatcher = "
            f'"{moe.dispatcher}" {spec.cannot_overlap}: use dispatcher = {overlapping_quoted()}, {off}',
        )
    if moe.capacity_factor:
        yield Violation(
            ("moe.overlap", "moe.capacity_factor"),
            f"{halves} sends tokens of one half before the choices of the other are known, and moe.capacity_factor = "
            f"{moe.capacity_factor} drops by both: use capacity_factor = 0, {off}",
        )


DISPATCHERS = ComponentKind(
    "moe.dispatcher",
    {
        "alltoall": AllToAllSpec(),
        "allgather": AllGatherSpec(),
        "hierarchical": HierarchicalSpec(),
        "symm_mem": SymmetricMemorySpec(),
        "auto": AutoSpec(),
        "deepep": "titanmoe.experiments.deepep_spec:SPEC",
    },
    DispatcherSpec,
    ("place", "dispatch", "missing", "reserve"),
)


def overlapping() -> list[str]:
    """Return the names of the dispatchers whose routed tokens can be in flight while something else is computed."""
    return [name for name in DISPATCHERS.table if not DISPATCHERS.look_up(name).cannot_overlap]


def overlapping_quoted() -> str:
    """Return the names of dispatchers that can overlap with computation, quoted and joined by "or", for messages."""
    return " or ".join(f'"{name}"' for name in overlapping())
