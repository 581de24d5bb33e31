"""Mappings that a search considers, each with lower bounds of its time and memory.

Iterated by titanmoe.plan.search, by rising bound: it ends where no other can be faster than those it shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, product
from typing import NamedTuple

from titanmoe.config.blocks import moe_layers
from titanmoe.config.ranges import divides, divisors
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.legality import divided_fields
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.plan.devices import Device
from titanmoe.plan.dispatch_costs import NEAR, DispatchChoice, hidden_by_pairs
from titanmoe.plan.least_memory import LeastMemory, TriedSchedule, Variant
from titanmoe.plan.price import Pricer
from titanmoe.plan.schedule_cost import backward_loads, schedule_idle
from titanmoe.plan.totals_by_mode import RECOMPUTE_MODES, TotalsByMode

MICROBATCHES = (1, 2, 4, 8)
MOST_SPLIT, MOST_STAGES = 16, 10
"""Largest tp and etp, and most stages per rank."""

MappingKey = tuple[int, int, int, int]
"""Degrees pp, tp, ep and etp of a mapping."""


class Candidate(NamedTuple):
    """Mapping, microbatch, recomputation, schedule and dispatcher that the search may price, with two lower bounds."""

    bound: float
    """Lower bound of the seconds of a step."""
    busy: float
    """Lower bound of the seconds of a microbatch on a pipeline rank."""
    least_bytes: float
    """Lower bound of the bytes that a rank needs."""
    fold: Fold
    """Degrees, with one replica."""
    samples: int
    """Samples of a microbatch."""
    mode: str
    """Mode of recomputation."""
    schedule: str
    stages: int
    """Stages per rank."""
    dispatch_choice: DispatchChoice

    @property
    def key(self) -> MappingKey:
        return self.fold.pp, self.fold.tp, self.fold.ep, self.fold.etp


class CandidateGroup(NamedTuple):
    """Candidates of the same degrees and microbatch, of which only memory is bounded yet."""

    floor: float
    """Lower bound of the seconds of a step of all of them."""
    fold: Fold
    """Degrees, with one replica."""
    samples: int
    """Samples of a microbatch."""
    microbatches: int
    """Microbatches of a step."""
    variants: list[Variant]
    dispatchers: list[str]
    """Dispatchers to try with each variant."""


class Candidates:
    """Mappings of a number of ranks that divide the model and batch evenly, by lower bounds of time and memory."""

    def __init__(self, config: Config, world: int, pricer: Pricer, limit: float):
        """Find the groups of candidates that may fit, each with a bound of time; candidates get theirs when iterated.

        Args:
            config: recipe with a global batch size.
            pricer: pricer of `config` on the device.
            limit: bytes of a device; mappings whose lower bound of memory is above it are left out.
        """
        self.config, self.world, self.pricer, self.limit = config, world, pricer, limit
        self.totals, self.memory = TotalsByMode(config, pricer), LeastMemory(config, world, pricer.first_alike)
        self.groups = [group for pp in divisors(world) if pp <= config.model.num_layers for group in self._groups(pp)]

    def __len__(self) -> int:
        return sum(len(group.variants) * len(group.dispatchers) for group in self.groups)

    def __iter__(self) -> Iterator[Candidate]:
        """Yield the candidates in no order, unlike `by_bound`."""
        return chain.from_iterable(map(self._bounded, self.groups))

    def by_bound(self) -> Iterator[Candidate]:
        """Yield the candidates by rising bound. Those of a group are bounded when no other has a lower floor."""
        queue: list[tuple] = [(group.floor, i, 0, group) for i, group in enumerate(self.groups)]
        heapify(queue)
        while queue:
            _, i, _, entry = heappop(queue)
            if isinstance(entry, Candidate):
                yield entry
            else:
                for j, candidate in enumerate(self._bounded(entry), 1):
                    heappush(queue, (candidate.bound, i, j, candidate))

    def _groups(self, pp: int) -> Iterator[CandidateGroup]:
        """Yield the groups of `pp` pipeline ranks whose candidates may fit into `limit`.

        They have microbatches of MICROBATCHES samples, tp and etp up to MOST_SPLIT, and degrees that divide evenly.
        """
        config, stage, fields = self.config, self.world // pp, divided_fields(self.config)
        batch, seq_len, moe = config.training.global_batch_size, config.training.seq_len, moe_layers(config.model)

        def splits(name: str, degree: int) -> bool:
            return all(divides(degree, value) for value in fields.get(name, {}).values() if value > 0)

        grids = list(product(divisors(stage), divisors(stage)))
        expert_grids = [
            (ep, etp, _dispatchers(config, ep * etp, self.pricer.device))
            for ep, etp in grids
            if stage % (ep * etp) == 0
            and etp <= MOST_SPLIT
            and (ep * etp == 1 or (moe > 0 and splits("ep", ep) and splits("etp", etp)))
        ]
        attention_grids = [
            (tp, cp)
            for tp, cp in grids
            if stage % (tp * cp) == 0
            and tp <= MOST_SPLIT
            and splits("tp", tp)
            and seq_len % (tp * cp * (2 if cp > 1 else 1)) == 0
        ]
        for (tp, cp), samples in product(attention_grids, MICROBATCHES):
            dp = stage // (tp * cp)
            if batch % (samples * dp):
                continue
            m = batch // (samples * dp)
            schedules = _schedules(config, pp, m)
            for ep, etp, dispatchers in expert_grids:
                fold = Fold(world=self.world, pp=pp, dp_shard=dp, cp=cp, tp=tp, edp=stage // (ep * etp), ep=ep, etp=etp)
                variants = self.memory.variants(fold, samples, m, schedules)
                if fitting := [variant for variant in variants if variant.least_bytes <= self.limit]:
                    floor = self._floor(fold, samples, m, schedules)
                    yield CandidateGroup(floor, fold, samples, m, fitting, dispatchers)

    def _floor(self, fold: Fold, samples: int, m: int, schedules: list[TriedSchedule]) -> float:
        """Return a lower bound of a step's seconds.

        It is the longer of two: attention, dense networks and experts' products on the device, or the host's
        launches. No recomputation is faster, nor are halves: two products of half the tokens take at least as long as
        one.

        Args:
            schedules: schedules to try, of which the least idle counts.
        """
        seconds = self.totals.non_experts(fold.tp, fold.cp, samples)[0]
        seconds += self.totals.expert_products(fold.tp * fold.cp, samples, fold.ep, fold.etp)
        launches = self.config.model.num_layers * self.pricer.launches(fold, "none")
        return max(seconds, launches) / fold.pp * (m + min(schedule.idle for schedule in schedules))

    def _bounded(self, group: CandidateGroup) -> Iterator[Candidate]:
        """Yield the candidates of a group: each variant with each dispatcher, in halves or pairs if that saves 2 %."""
        totals, pricer, fold, samples = self.totals, self.pricer, group.fold, group.samples
        tp, cp, ep, etp, m, model = fold.tp, fold.cp, fold.ep, fold.etp, group.microbatches, self.config.model
        seconds = totals.non_experts(tp, cp, samples)
        hop = 2 * pricer.hop(fold.pp, fold.stage, samples, tp * cp)
        shared = tp if model.shared_hidden else 1  # tp matters to experts only through the shared one
        experts = []
        for choice in map(DispatchChoice, group.dispatchers):
            halves = totals.in_halves(tp, cp, samples, ep, etp, choice.dispatcher)
            experts.append((choice, *totals.experts(tp * cp, samples, shared, ep, etp, choice), halves))
        for least_bytes, mode, schedule in group.variants:
            launches = model.num_layers * pricer.launches(fold, RECOMPUTE_MODES[mode])
            for plain, by_mode, message_seconds, halves in experts:
                choice, more = plain, by_mode[mode]
                if schedule.name == "DualPipeV":
                    hidden = hidden_by_pairs(fold.pp, m, moe_layers(model) / fold.pp / schedule.stages)
                    choice, more = pricer.in_pairs(choice, more, message_seconds, hidden)
                if NEAR * halves[mode] < seconds[mode] + more:
                    choice, more = plain._replace(halves=True), halves[mode] - seconds[mode]
                busy = max((seconds[mode] + more) / fold.pp + hop * schedule.stages, launches / fold.pp)
                bound = busy * (m + schedule.idle)
                yield Candidate(
                    bound=bound,
                    busy=busy,
                    least_bytes=least_bytes,
                    fold=fold,
                    samples=samples,
                    mode=RECOMPUTE_MODES[mode],
                    schedule=schedule.name,
                    stages=schedule.stages,
                    dispatch_choice=choice,
                )


def _schedules(config: Config, pp: int, m: int) -> list[TriedSchedule]:
    """Return the schedules to try with `m` microbatches on `pp` ranks: 1F1B, or GPipe if these are fewer than ranks.

    Where they are legal also Interleaved1F1B, with several numbers of stages per rank, and DualPipeV. Each comes with
    its idle time and microbatches in flight, on which the bounds rest.
    """
    names, most = [("1F1B" if m >= pp else "GPipe", 1)], config.model.num_layers // pp
    if pp > 1 and m % pp == 0:
        names += [("Interleaved1F1B", v) for v in sorted({2, 4, most}) if 1 < v <= min(most, MOST_STAGES)]
    if pp > 1 and m >= 2 * pp and most >= 2:
        names += [("DualPipeV", 2)]
    schedules = []
    for name, v in names:
        loads = [(sum(load.in_flight) / v, sum(load.begun) / v) for load in backward_loads(name, pp, v, m, 0)]
        schedules.append(TriedSchedule(name, v, schedule_idle(name, pp, v, m), loads))
    return schedules


def _dispatchers(config: Config, group: int, device: Device) -> list[str]:
    """Return the names of the dispatchers to try; the recipe's own if no other may replace it.

    Those that work by node are tried only if the group spans several domains.

    Args:
        group: number of ranks of a dispatch group, ep x etp.
        device: device, whose `domain` is the number of ranks on the fast link.
    """
    dispatcher = config.moe.dispatcher
    if not DISPATCHERS.look_up(dispatcher).search_tries:
        return [dispatcher]
    tried = {name: DISPATCHERS.look_up(name) for name in DISPATCHERS.table}
    return [
        name for name, spec in tried.items() if spec.search_tries and (group > device.domain or not spec.works_by_node)
    ]
