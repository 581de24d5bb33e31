"""The fastest of all legal mappings of a recipe on a number of devices.

Mappings are taken by a bound on their time: what blocks cost one after the other under their schedule, without weights'
messages, the optimizer and the ends of the model. When no bound is below the slowest that would be shown, the search is
over: nothing that was left out can be faster. Of each pp, tp, ep and etp only the fastest cp, microbatch, schedule,
recomputation, dispatcher and reshard_after_forward are shown. Of replicas of the experts only the default is tried.
"""

from __future__ import annotations

from collections import Counter
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
from titanmoe.fold.unsharded import are_copied
from titanmoe.models.count import parameters
from titanmoe.moe.dispatchers.rules import DISPATCHERS
from titanmoe.plan.communicators import usable_bytes
from titanmoe.plan.devices import Device
from titanmoe.plan.links import Factors
from titanmoe.plan.memory import RankMemory, Widths, kept_bytes, rank_memories
from titanmoe.plan.planned_rows import planned_rows
from titanmoe.plan.price import Price, Pricer
from titanmoe.plan.rows_on_their_way import NEAR, RowsWay, hidden_by_pairs
from titanmoe.plan.schedule_cost import schedule_cost
from titanmoe.plan.totals_by_mode import MODES, best_ways, non_expert_seconds, row_seconds, seconds_in_halves

MICROBATCHES = (1, 2, 4, 8)
MOST_SPLIT, MOST_STAGES = 16, 10
"""Of tp and etp, and of stages per rank."""
SMALLEST = 40
"""If nothing fits: how many of the mappings that need least memory are priced."""


@dataclass
class PricedMapping:
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
        return is_unfolded(self.fold)


def is_unfolded(fold: Fold) -> bool:
    """Experts on attention's own axes: split by tp like it, and ep within its data ranks."""
    return fold.etp == fold.tp and fold.dp % fold.ep == 0


def evaluate(config: Config, world: int, device: Device, factors: Factors, imbalance: float = 1.0) -> PricedMapping:
    """The recipe's own mapping."""
    fold = derive(world, config.parallelism)
    if config.moe.overlap_chunks == -1:
        config = replace(config, moe=planned_rows(config, world, device))
    price = Pricer(config, device, factors, imbalance=imbalance).price(config, fold)
    return PricedMapping(config, fold, price, rank_memories(config, fold, imbalance))


@dataclass
class Search:
    best: list[PricedMapping]
    best_unfolded: PricedMapping | None
    nearest: PricedMapping | None
    """If nothing fits: the mapping that comes closest."""
    considered: int
    priced: int


MappingKey = tuple[int, int, int, int]
"""pp, tp, ep, etp."""


class Candidate(NamedTuple):
    bound: float
    """The least seconds that a step takes."""
    least_bytes: float
    """The least bytes that a rank needs."""
    fold: Fold
    """With one replica."""
    samples: int
    mode: str
    schedule: str
    stages: int
    """Per rank."""
    way: RowsWay

    @property
    def key(self) -> MappingKey:
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
    """Considers the mappings that divide everything evenly and may fit. config has a global batch size."""
    pricer = prices(config, device, factors, imbalance=imbalance)
    candidates = list(_candidates(config, world, pricer, device.memory - device.reserved))
    best: dict[MappingKey, PricedMapping] = {}
    best_unfolded, unfolded_step = None, inf
    priced, slowest_shown = 0, inf  # steps that are longer than the last one shown are of no use
    for candidate in sorted(candidates, key=itemgetter(0)):
        may_be_best_unfolded = is_unfolded(candidate.fold) and candidate.bound < unfolded_step
        if candidate.bound >= slowest_shown and candidate.bound >= unfolded_step:
            break
        previous = best.get(candidate.key)
        if candidate.bound >= (slowest_shown if previous is None else previous.price.step) and not may_be_best_unfolded:
            continue
        for mapping in _priced_mappings(config, candidate, pricer):
            priced += 1
            previous = best.get(candidate.key)
            improves = mapping.price.step < (slowest_shown if previous is None else previous.price.step)
            improves_unfolded = may_be_best_unfolded and mapping.price.step < unfolded_step
            if not (improves or improves_unfolded) or violations(mapping.config, world):
                continue
            usable = usable_bytes(mapping.config, mapping.fold, device)
            ends = rank_memories(mapping.config, mapping.fold, imbalance, only_ends=True)
            if max(rank.peak for rank in ends) > usable:
                continue
            mapping.memory = rank_memories(mapping.config, mapping.fold, imbalance)
            if mapping.peak > usable:
                continue
            if improves_unfolded:
                best_unfolded, unfolded_step = mapping, mapping.price.step
            if improves:
                best[candidate.key] = mapping
                best = dict(sorted(best.items(), key=lambda item: item[1].price.step)[:count])
                slowest_shown = [*best.values()][-1].price.step if len(best) == count else inf
    nearest = None
    if not best:
        smallest = nsmallest(
            SMALLEST, _candidates(config, world, pricer, inf), key=lambda candidate: candidate.least_bytes
        )
        mappings = [mapping for candidate in smallest for mapping in _priced_mappings(config, candidate, pricer)]
        mappings = [mapping for mapping in mappings if not violations(mapping.config, world)]
        for mapping in mappings:
            mapping.memory = rank_memories(mapping.config, mapping.fold, imbalance)
        nearest = min(
            mappings,
            key=lambda mapping: mapping.peak - usable_bytes(mapping.config, mapping.fold, device),
            default=None,
        )
    return Search(list(best.values()), best_unfolded, nearest, len(candidates), priced)


def _priced_mappings(config: Config, candidate: Candidate, pricer: Pricer) -> Iterator[PricedMapping]:
    """The candidate with one replica, and with enough replicas that each stays within one domain of the fast link; with
    each way to keep weights or free them. Neither memory nor laws are checked yet."""
    fold = candidate.fold
    data_ranks_per_domain = pricer.device.domain // (fold.cp * fold.tp)
    replicas = {1}
    if data_ranks_per_domain and fold.dp % data_ranks_per_domain == 0:
        replicas.add(fold.dp // data_ranks_per_domain)
    for n in sorted(replicas):
        edp = fold.edp
        edp_replicate = default_edp_replicate(n, edp)
        mapped_fold = replace(
            fold, dp_replicate=n, dp_shard=fold.dp // n, edp_replicate=edp_replicate, edp=edp // edp_replicate
        )
        for reshard in _reshards(config, candidate, mapped_fold.edp):
            mapped_config = with_mapping(config, mapped_fold, candidate, reshard)
            yield PricedMapping(mapped_config, mapped_fold, pricer.price(mapped_config, mapped_fold), [])


def _reshards(config: Config, candidate: Candidate, edp: int) -> list[str]:
    """Values of parallelism.reshard_after_forward that differ for the candidate; the recipe's own if it says which."""
    if config.parallelism.reshard_after_forward != "auto":
        return [config.parallelism.reshard_after_forward]
    if candidate.fold.pp == 1:  # "always" differs from "auto" for experts in no FSDP unit
        return ["auto", "never", *(["always"] if edp == 1 and are_copied(config.training) else [])]
    return ["auto"] if SCHEDULES[candidate.schedule].zero_bubble else ["auto", "always"]


def _candidates(config: Config, world: int, pricer: Pricer, limit: float) -> Iterator[Candidate]:
    model, training = config.model, config.training
    batch, fields, layers = training.global_batch_size, divided_fields(config), model.num_layers
    moe, deep, ways = moe_layers(model), model.num_layers - 1, Counter(pricer.like[:layers])
    stored, count = WIDTHS[training.dtype], parameters(model)
    state = 4 * stored * count.total / world

    def fits(name: str, degree: int) -> bool:
        return all(value % degree == 0 for value in fields.get(name, {}).values() if value > 0)

    local = bool(model.shared_hidden)  # tp matters to experts only through the shared one
    attention, experts, ffns = {}, {}, {}  # of one block, by what they depend on: bytes kept, seconds
    halves = {}  # seconds of all blocks
    for pp in divisors(world):
        stage = world // pp
        grids = list(product(divisors(stage), divisors(stage)))
        expert_grids = [
            (ep, etp, _dispatchers(config, ep * etp, pricer.device))
            for ep, etp in grids
            if stage % (ep * etp) == 0
            and etp <= MOST_SPLIT
            and (ep * etp == 1 or (moe > 0 and fits("ep", ep) and fits("etp", etp)))
        ]
        attention_grids = [
            (tp, cp)
            for tp, cp in grids
            if stage % (tp * cp) == 0
            and tp <= MOST_SPLIT
            and fits("tp", tp)
            and training.seq_len % (tp * cp * (2 if cp > 1 else 1)) == 0
        ]
        for (tp, cp), samples in product(attention_grids if pp <= layers else [], MICROBATCHES):
            dp = stage // (tp * cp)
            if batch % (samples * dp):
                continue
            m = batch // (samples * dp)
            hop = 2 * m * pricer.hop(pp, stage, samples, tp * cp)
            schedules = [(name, v, *schedule_cost(name, pp, v, m)) for name, v in _schedules(config, pp, m)]
            batch_config = replace(config, training=replace(training, local_batch_size=samples))
            for ep, etp, dispatchers in expert_grids:
                fold = Fold(world, pp, 1, dp, cp, tp, 1, stage // (ep * etp), ep, etp)
                whole = (count.total - count.experts) / tp + count.experts / (ep * etp)
                state_bytes = state + (4 * whole / pp if pp > 1 else 0.0)
                if (tp, cp, samples) not in attention:
                    widths = Widths(batch_config, fold)
                    attention_bytes = [
                        sum(count * kept_bytes(widths, like, mode).attention for like, count in ways.items()) / layers
                        for mode in MODES
                    ]
                    attention[tp, cp, samples] = attention_bytes, non_expert_seconds(pricer, tp, cp, samples)
                experts_key = tp * cp, samples, tp if local else 1, ep, etp
                if experts_key not in experts:
                    ffn_key = *experts_key[:3], ep * etp > 1, etp
                    if ffn_key not in ffns:
                        widths = Widths(batch_config, fold)
                        ffns[ffn_key] = [kept_bytes(widths, deep, mode).ffn for mode in MODES]
                    experts[experts_key] = (
                        ffns[ffn_key],
                        [
                            (
                                name,
                                best_ways(pricer, name, *experts_key),
                                row_seconds(pricer, *experts_key, RowsWay(name)),
                            )
                            for name in dispatchers
                        ],
                    )
                (attention_bytes, seconds), (ffn, by_dispatcher) = attention[tp, cp, samples], experts[experts_key]
                for i, mode in enumerate(MODES):
                    block = (attention_bytes[i] + ffn[i]) * layers / pp
                    for name, v, idle, in_flight in schedules:
                        if mode != "none" and SCHEDULES[name].zero_bubble:
                            continue  # what recomputation keeps between both halves of backward is not in the memory
                        least_bytes = state_bytes + block * in_flight[0] / v
                        if least_bytes > limit:
                            continue
                        for dispatcher, by_mode, travel in by_dispatcher:
                            way, more = by_mode[i]
                            if name == "DualPipeV":
                                way, more = pricer.in_pairs(way, more, travel, hidden_by_pairs(pp, m, moe / pp / v))
                            halves_key = tp, cp, samples, ep, etp, dispatcher
                            if halves_key not in halves:
                                halves[halves_key] = seconds_in_halves(batch_config, pricer, dispatcher, fold)
                            if NEAR * halves[halves_key][i] < seconds[i] + more:
                                way, more = RowsWay(dispatcher, halves=True), halves[halves_key][i] - seconds[i]
                            bound = (seconds[i] + more) / pp * (m + idle) + hop * v
                            yield Candidate(bound, least_bytes, fold, samples, mode, name, v, way)


def _schedules(config: Config, pp: int, m: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [("1F1B", 1)]
    most = config.model.num_layers // pp
    schedules = [("1F1B" if m >= pp else "GPipe", 1)]
    if m % pp == 0:
        schedules += [("Interleaved1F1B", v) for v in sorted({2, 4, most}) if 1 < v <= min(most, MOST_STAGES)]
    if m >= 2 * pp and most >= 2:
        schedules += [("DualPipeV", 2)]
    return schedules


def _dispatchers(config: Config, group: int, device: Device) -> list[str]:
    dispatcher = config.moe.dispatcher
    if not DISPATCHERS.look_up(dispatcher).search_tries:
        return [dispatcher]
    tried = {name: DISPATCHERS.look_up(name) for name in DISPATCHERS.table}
    return [name for name, rules in tried.items() if rules.search_tries and (group > device.domain or not rules.nodes)]


def with_mapping(config: Config, fold: Fold, candidate: Candidate, reshard: str) -> Config:
    """The recipe with the candidate's mapping. reshard: parallelism.reshard_after_forward."""
    table, single = config.parallelism, SCHEDULES[candidate.schedule].stages_per_rank == 1
    experts = replace(table.experts, ep=fold.ep, etp=fold.etp, edp=-1, edp_replicate=-1)
    axes = dict(pp=fold.pp, dp_replicate=fold.dp_replicate, dp_shard=-1, cp=fold.cp, tp=fold.tp)
    pipeline = replace(
        config.pipeline,
        schedule=candidate.schedule,
        virtual_stages=-1 if single else candidate.stages,
        schedule_csv="",
        layers_per_stage=[],
        overlap_pairs=candidate.way.hidden > 0,
    )
    return replace(
        config,
        training=replace(config.training, local_batch_size=candidate.samples),
        parallelism=replace(table, **axes, experts=experts, reshard_after_forward=reshard),
        pipeline=pipeline,
        moe=replace(
            config.moe,
            dispatcher=candidate.way.dispatcher,
            overlap_chunks=candidate.way.chunks,
            overlap_halves=candidate.way.halves,
        ),
        activation_checkpoint=ActivationCheckpoint(candidate.mode),
    )
