"""The fastest of all legal mappings of a recipe on a number of devices.

Mappings are taken by a bound on their time: what blocks cost one after the other under their schedule, without weights'
messages, the optimizer and the ends of the model. When no bound is below the slowest that would be shown, the search is
over: nothing that was left out can be faster. Of replicas of the experts only the default is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import product
from math import inf
from typing import NamedTuple

from titanmoe.config.blocks import moe_layers
from titanmoe.config.divisors import divisors
from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import ActivationCheckpoint, Config
from titanmoe.fold.degrees import Fold, default_edp_replicate, derive
from titanmoe.fold.legality import divided_fields, violations
from titanmoe.fold.schedules import SCHEDULES
from titanmoe.models.count import parameters
from titanmoe.plan.devices import Device
from titanmoe.plan.links import Factors
from titanmoe.plan.memory import Rank, Widths, kept, ranks
from titanmoe.plan.price import Price, Pricer
from titanmoe.plan.schedule import played

MODES = ("none", "selective", "moe", "full")
MICROBATCHES = (1, 2, 4, 8)
MOST_SPLIT, MOST_STAGES = 16, 10
"""Of tp and etp, and of stages per rank."""
SMALLEST = 40
"""If nothing fits: how many of those that hold least are looked at closely."""


@dataclass
class Found:
    config: Config
    fold: Fold
    price: Price
    memory: list[Rank]

    @property
    def peak(self) -> int:
        return max(rank.peak for rank in self.memory)

    @property
    def fullest(self) -> int:
        """The pipeline rank that needs most memory."""
        return max(range(len(self.memory)), key=lambda i: self.memory[i].peak)

    @property
    def unfolded(self) -> bool:
        return unfolded(self.fold)


def unfolded(fold: Fold) -> bool:
    """Experts on attention's own axes: split by tp like it, ep within its data ranks, and no cp between the two."""
    return fold.etp == fold.tp and fold.cp == 1 and fold.dp % fold.ep == 0


def evaluate(config: Config, world: int, device: Device, factors: Factors, imbalance: float = 1.0) -> Found:
    """One mapping, as the recipe has it."""
    fold = derive(world, config.parallelism)
    price = Pricer(config, device, factors, imbalance=imbalance).price(config, fold)
    return Found(config, fold, price, ranks(config, fold, imbalance))


@dataclass
class Search:
    best: list[Found]
    best_unfolded: Found | None
    nearest: Found | None
    """If nothing fits: the mapping that comes closest."""
    considered: int
    priced: int


class Candidate(NamedTuple):
    bound: float
    """Seconds: the step takes at least these."""
    held: float
    """Bytes: a rank holds at least these."""
    fold: Fold
    """With one replica."""
    samples: int
    mode: str
    schedule: str
    stages: int
    """Per rank."""
    dispatcher: str


def search(
    config: Config, world: int, device: Device, factors: Factors, count: int = 10, imbalance: float = 1.0
) -> Search:
    """config: with a global batch. Considered are the mappings that divide everything evenly and may fit."""
    pricer = Pricer(config, device, factors, imbalance=imbalance)
    room = device.memory - device.reserved
    every = list(_candidates(config, world, pricer, room))
    best: list[Found] = []
    best_unfolded = None
    priced = 0
    for candidate in sorted(every, key=lambda one: one.bound):
        plain, full = unfolded(candidate.fold), len(best) == count and candidate.bound >= best[-1].price.step
        if full and (best_unfolded is not None and candidate.bound >= best_unfolded.price.step):
            break
        if full and (not plain or (best_unfolded is not None and candidate.bound >= best_unfolded.price.step)):
            continue
        for found in _found(config, candidate, pricer, imbalance, room):
            priced += 1
            wanted = len(best) < count or found.price.step < best[-1].price.step
            first = plain and (best_unfolded is None or found.price.step < best_unfolded.price.step)
            if not (wanted or first):
                continue
            found.memory = ranks(found.config, found.fold, imbalance)
            if found.peak > room:
                continue
            best = sorted([*best, found], key=lambda one: one.price.step)[:count]
            if first:
                best_unfolded = found
    nearest = None
    if not best:
        smallest = nsmallest(SMALLEST, _candidates(config, world, pricer, inf), key=lambda one: one.held)
        tried = [found for one in smallest for found in _found(config, one, pricer, imbalance)]
        nearest = min(tried, key=lambda one: one.peak, default=None)
    if nearest is not None:
        nearest.memory = ranks(nearest.config, nearest.fold, imbalance)
    return Search(best, best_unfolded, nearest, len(every), priced)


def _found(config: Config, one: Candidate, pricer: Pricer, imbalance: float, room: float = inf) -> Iterator[Found]:
    """With one replica, and with so many that each lies within one domain of the fast link."""
    fold = one.fold
    inside = pricer.device.domain // (fold.cp * fold.tp)
    replicas = {1, fold.dp // inside if inside and fold.dp % inside == 0 else 1}
    for n in sorted(replicas):
        left = fold.edp
        same = default_edp_replicate(n, left)
        this = replace(fold, dp_replicate=n, dp_shard=fold.dp // n, edp_replicate=same, edp=left // same)
        mapped = written(config, this, one)
        ends = ranks(mapped, this, imbalance, only_ends=True)
        if max(rank.peak for rank in ends) <= room and not violations(mapped, fold.world):
            yield Found(mapped, this, pricer.price(mapped, this), ends)


def _candidates(config: Config, world: int, pricer: Pricer, room: float) -> Iterator[Candidate]:
    model, training = config.model, config.training
    batch, fields, layers = training.global_batch_size, divided_fields(model), model.num_layers
    moe, deep = moe_layers(model) > 0, model.num_layers - 1
    stored, count = WIDTHS[training.dtype], parameters(model)
    state = 4 * stored * count.total / world

    def fits(name: str, degree: int) -> bool:
        return all(value % degree == 0 for value in fields.get(name, {}).values() if value > 0)

    for pp in divisors(world):
        stage = world // pp
        grids = list(product(divisors(stage), divisors(stage)))
        experts = [
            (ep, etp)
            for ep, etp in grids
            if stage % (ep * etp) == 0
            and etp <= MOST_SPLIT
            and (ep * etp == 1 or (moe and fits("ep", ep) and fits("etp", etp)))
        ]
        attention = [
            (tp, cp)
            for tp, cp in grids
            if stage % (tp * cp) == 0
            and tp <= MOST_SPLIT
            and fits("tp", tp)
            and training.seq_len % (tp * cp * (2 if cp > 1 else 1)) == 0
        ]
        for (tp, cp), samples in product(attention if pp <= layers else [], MICROBATCHES):
            dp = stage // (tp * cp)
            if batch % (samples * dp):
                continue
            m = batch // (samples * dp)
            hop = 2 * m * pricer.hop(pp, stage, samples, tp * cp)
            schedules = [(name, v, played(name, pp, v, m)) for name, v in _schedules(config, pp, m)]
            at = replace(config, training=replace(training, local_batch_size=samples))
            for ep, etp in experts:
                fold = Fold(world, pp, 1, dp, cp, tp, 1, stage // (ep * etp), ep, etp)
                whole = (count.total - count.experts) / tp + count.experts / (ep * etp)
                piped = 6 * whole / pp if pp > 1 else 0.0
                widths = Widths(at, fold)
                by_dispatcher = {
                    name: pricer.seconds(fold, samples, name) for name in _dispatchers(config, ep * etp, pricer.device)
                }
                for mode in MODES:
                    one = kept(widths, deep, mode)
                    block = (one.attention + one.ffn) * layers / pp
                    for name, v, (idle, flights) in schedules:
                        held = state + piped + block * flights[0] / v
                        if held > room:
                            continue
                        for dispatcher, seconds in by_dispatcher.items():
                            bound = seconds[mode] / pp * (m + idle) + hop * v
                            yield Candidate(bound, held, fold, samples, mode, name, v, dispatcher)


def _schedules(config: Config, pp: int, m: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [("1F1B", 1)]
    most = config.model.num_layers // pp
    found = [("1F1B" if m >= pp else "GPipe", 1)]
    if m % pp == 0:
        found += [("Interleaved1F1B", v) for v in sorted({2, 4, most}) if 1 < v <= min(most, MOST_STAGES)]
    if m >= 2 * pp and most >= 2:
        found += [("DualPipeV", 2)]
    return found


def _dispatchers(config: Config, group: int, device: Device) -> list[str]:
    asked = config.moe.dispatcher
    if asked not in ("alltoall", "hierarchical"):
        return [asked]
    return ["alltoall", "hierarchical"] if group > device.domain else ["alltoall"]


def written(config: Config, fold: Fold, one: Candidate) -> Config:
    """The recipe with that mapping in it."""
    table, single = config.parallelism, SCHEDULES[one.schedule].stages_per_rank == 1
    experts = replace(table.experts, ep=fold.ep, etp=fold.etp, edp=-1, edp_replicate=-1)
    axes = dict(pp=fold.pp, dp_replicate=fold.dp_replicate, dp_shard=-1, cp=fold.cp, tp=fold.tp)
    pipeline = replace(
        config.pipeline,
        schedule=one.schedule,
        virtual_stages=-1 if single else one.stages,
        schedule_csv="",
        layers_per_stage=[],
        overlap_pairs=False,
    )
    return replace(
        config,
        training=replace(config.training, local_batch_size=one.samples),
        parallelism=replace(table, **axes, experts=experts),
        pipeline=pipeline,
        moe=replace(config.moe, dispatcher=one.dispatcher),
        activation_checkpoint=ActivationCheckpoint(one.mode),
    )
