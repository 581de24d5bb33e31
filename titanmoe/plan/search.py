"""The fastest of all legal mappings of a recipe on a number of devices.

Mappings are taken by a bound on their time: what blocks cost one after the other under their schedule, without weights'
messages, the optimizer and the ends of the model. When no bound is below the slowest that would be shown, the search is
over: nothing that was left out can be faster. Of each pp, tp, ep and etp only the fastest cp, microbatch, schedule,
recomputation and dispatcher are shown. Of replicas of the experts only the default is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import product
from math import inf
from operator import itemgetter
from typing import NamedTuple

from titanmoe.config.blocks import moe_layers
from titanmoe.config.divisors import divisors
from titanmoe.config.laws import WIDTHS
from titanmoe.config.schema import ActivationCheckpoint, Config
from titanmoe.fold.degrees import Fold, default_edp_replicate, derive
from titanmoe.fold.legality import divided_fields, violations
from titanmoe.fold.pipeline_schedules import SCHEDULES
from titanmoe.models.count import parameters
from titanmoe.plan.block_costs import MODES
from titanmoe.plan.communicators import room
from titanmoe.plan.devices import Device
from titanmoe.plan.links import Factors
from titanmoe.plan.memory import RankMemory, Widths, kept, ranks
from titanmoe.plan.price import Price, Pricer
from titanmoe.plan.schedule_cost import played

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
    memory: list[RankMemory]

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
    """Experts on attention's own axes: split by tp like it, and ep within its data ranks."""
    return fold.etp == fold.tp and fold.dp % fold.ep == 0


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


Mapping = tuple[int, int, int, int]
"""pp, tp, ep, etp."""


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

    @property
    def mapping(self) -> Mapping:
        return self.fold.pp, self.fold.tp, self.fold.ep, self.fold.etp


def search(
    config: Config,
    world: int,
    device: Device,
    factors: Factors,
    count: int = 10,
    imbalance: float = 1.0,
    prices: type[Pricer] = Pricer,
) -> Search:
    """config: with a global batch. Considered are the mappings that divide everything evenly and may fit."""
    pricer = prices(config, device, factors, imbalance=imbalance)
    every = list(_candidates(config, world, pricer, device.memory - device.reserved))
    best: dict[Mapping, Found] = {}
    best_unfolded = None
    priced, last = 0, inf  # steps that are longer than the last one shown are of no use
    for candidate in sorted(every, key=itemgetter(0)):
        plain = unfolded(candidate.fold) and (best_unfolded is None or candidate.bound < best_unfolded.price.step)
        if candidate.bound >= last and best_unfolded is not None and candidate.bound >= best_unfolded.price.step:
            break
        same = best.get(candidate.mapping)
        if candidate.bound >= (last if same is None else same.price.step) and not plain:
            continue
        for found in _found(config, candidate, pricer):
            priced += 1
            same = best.get(candidate.mapping)
            wanted = found.price.step < (last if same is None else same.price.step)
            first = plain and (best_unfolded is None or found.price.step < best_unfolded.price.step)
            if not (wanted or first) or violations(found.config, world):
                continue
            left = room(found.config, found.fold, device)
            if max(rank.peak for rank in ranks(found.config, found.fold, imbalance, only_ends=True)) > left:
                continue
            found.memory = ranks(found.config, found.fold, imbalance)
            if found.peak > left:
                continue
            if first:
                best_unfolded = found
            if wanted:
                best[candidate.mapping] = found
                best = dict(sorted(best.items(), key=lambda one: one[1].price.step)[:count])
                last = [*best.values()][-1].price.step if len(best) == count else inf
    nearest = None
    if not best:
        smallest = nsmallest(SMALLEST, _candidates(config, world, pricer, inf), key=lambda one: one.held)
        tried = [found for one in smallest for found in _found(config, one, pricer)]
        tried = [found for found in tried if not violations(found.config, world)]
        for found in tried:
            found.memory = ranks(found.config, found.fold, imbalance)
        nearest = min(tried, key=lambda one: one.peak - room(one.config, one.fold, device), default=None)
    return Search(list(best.values()), best_unfolded, nearest, len(every), priced)


def _found(config: Config, one: Candidate, pricer: Pricer) -> Iterator[Found]:
    """With one replica, and with as many as put each within one domain of the fast link. Memory and laws are not yet
    checked."""
    fold = one.fold
    inside = pricer.device.domain // (fold.cp * fold.tp)
    replicas = {1, fold.dp // inside if inside and fold.dp % inside == 0 else 1}
    for n in sorted(replicas):
        left = fold.edp
        same = default_edp_replicate(n, left)
        this = replace(fold, dp_replicate=n, dp_shard=fold.dp // n, edp_replicate=same, edp=left // same)
        mapped = written(config, this, one)
        yield Found(mapped, this, pricer.price(mapped, this), [])


def _candidates(config: Config, world: int, pricer: Pricer, room: float) -> Iterator[Candidate]:
    model, training = config.model, config.training
    batch, fields, layers = training.global_batch_size, divided_fields(model), model.num_layers
    moe, deep = moe_layers(model) > 0, model.num_layers - 1
    stored, count = WIDTHS[training.dtype], parameters(model)
    state = 4 * stored * count.total / world

    def fits(name: str, degree: int) -> bool:
        return all(value % degree == 0 for value in fields.get(name, {}).values() if value > 0)

    local = bool(model.shared_hidden)  # tp matters to experts only through the shared one
    attention, experts, ffns = {}, {}, {}  # of one block, by what they depend on: bytes kept, seconds
    for pp in divisors(world):
        stage = world // pp
        grids = list(product(divisors(stage), divisors(stage)))
        inner = [
            (ep, etp, _dispatchers(config, ep * etp, pricer.device))
            for ep, etp in grids
            if stage % (ep * etp) == 0
            and etp <= MOST_SPLIT
            and (ep * etp == 1 or (moe and fits("ep", ep) and fits("etp", etp)))
        ]
        outer = [
            (tp, cp)
            for tp, cp in grids
            if stage % (tp * cp) == 0
            and tp <= MOST_SPLIT
            and fits("tp", tp)
            and training.seq_len % (tp * cp * (2 if cp > 1 else 1)) == 0
        ]
        for (tp, cp), samples in product(outer if pp <= layers else [], MICROBATCHES):
            dp = stage // (tp * cp)
            if batch % (samples * dp):
                continue
            m = batch // (samples * dp)
            hop = 2 * m * pricer.hop(pp, stage, samples, tp * cp)
            schedules = [(name, v, *played(name, pp, v, m)) for name, v in _schedules(config, pp, m)]
            at = replace(config, training=replace(training, local_batch_size=samples))
            for ep, etp, dispatchers in inner:
                fold = Fold(world, pp, 1, dp, cp, tp, 1, stage // (ep * etp), ep, etp)
                whole = (count.total - count.experts) / tp + count.experts / (ep * etp)
                least = state + (6 * whole / pp if pp > 1 else 0.0)
                if (tp, cp, samples) not in attention:
                    widths = Widths(at, fold)
                    kept_ = [kept(widths, deep, mode).attention for mode in MODES]
                    attention[tp, cp, samples] = kept_, pricer.outer(tp, cp, samples)
                key = tp * cp, samples, tp if local else 1, ep, etp
                if key not in experts:
                    like = *key[:3], ep * etp > 1, etp
                    if like not in ffns:
                        widths = Widths(at, fold)
                        ffns[like] = [kept(widths, deep, mode).ffn for mode in MODES]
                    experts[key] = ffns[like], [(name, pricer.inner(*key, name)) for name in dispatchers]
                (around, seconds), (ffn, by_dispatcher) = attention[tp, cp, samples], experts[key]
                for i, mode in enumerate(MODES):
                    block = (around[i] + ffn[i]) * layers / pp
                    for name, v, idle, flights in schedules:
                        if mode != "none" and SCHEDULES[name].zero_bubble:
                            continue  # what recomputation keeps between both halves of backward is not in the memory
                        held = least + block * flights[0] / v
                        if held > room:
                            continue
                        for dispatcher, more in by_dispatcher:
                            bound = (seconds[i] + more[i]) / pp * (m + idle) + hop * v
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
