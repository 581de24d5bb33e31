"""Search for the fastest of all legal mappings of a recipe on a number of devices.

Mappings are taken by a bound on their time: what blocks cost one after the other under their schedule, without the
optimizer and weights' copies and messages. The last are added before a mapping is priced. When no bound is below the
slowest that would be shown, the search is over: nothing that was left out can be faster. Of each pp, tp, ep and etp
only the fastest cp, microbatch, schedule, recomputation, dispatcher and reshard_after_forward are shown. Of replicas of
the experts only the default is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from heapq import nsmallest
from math import inf
from operator import attrgetter
from typing import Any

from titanmoe.config.schema import ActivationCheckpoint, Config
from titanmoe.fold.degrees import Fold, default_edp_replicate, derive
from titanmoe.fold.legality import violations
from titanmoe.fold.pipeline_schedules import SCHEDULES
from titanmoe.fold.unsharded_experts import has_compute_copies
from titanmoe.fold.vocabulary_passes import SCHEDULES as PASSES_FIT
from titanmoe.fold.vocabulary_passes import vocabulary_violations
from titanmoe.models.count import layer_flops
from titanmoe.moe.dispatchers.dispatcher_spec import with_planned_dispatcher
from titanmoe.plan.candidates import Candidate, Candidates, MappingKey
from titanmoe.plan.communicators import usable_bytes
from titanmoe.plan.cost import Cost
from titanmoe.plan.devices import Device
from titanmoe.plan.generation_costs import GeneratorCosts, GeneratorPlan, TextLengths
from titanmoe.plan.links import Factors, Links
from titanmoe.plan.memory import RankMemory, rank_memories
from titanmoe.plan.planned_overlap import planned_overlap
from titanmoe.plan.price import Price, Pricer
from titanmoe.plan.training_stacks import TITANMOE, Stack
from titanmoe.train.find_teacher import teacher_problems

SMALLEST = 40
"""Number of mappings, those that need least memory, that are priced if nothing fits."""
ROUNDING = 1e-9
"""Relative error of floats by which the bound of a mapping may exceed its step, where the host takes all the time."""


GAIN = 1.15
"""Speedup of a step from which the search lets all pipeline stages share the vocabulary."""


@dataclass
class PricedMapping:
    """Mapping of a recipe, with the time of a step and its memory."""

    config: Config
    fold: Fold
    price: Price
    memory: list[RankMemory]
    """Memory of each pipeline rank; empty until it is computed."""
    generator: GeneratorPlan | None = None
    """Generator of completions for [rl], under `config.generation.parallelism`; None without [rl]."""

    @property
    def seconds(self) -> float:
        """Seconds of a step, with [rl] those of generating its completions included."""
        return self.price.step + (self.generator.seconds if self.generator else 0.0)

    def beside(self, generator: GeneratorPlan | None) -> PricedMapping:
        """Return a copy with a generator, its mapping in the config, and the ranks' memory with it; itself for None."""
        if generator is None:
            return self
        generation = replace(self.config.generation, parallelism=generator.parallelism)
        config, memory = replace(self.config, generation=generation), list(map(generator.beside, self.memory))
        return replace(self, config=config, memory=memory, generator=generator)

    @property
    def peak(self) -> int:
        """Bytes at the peak of the fullest pipeline rank."""
        return max(rank.peak for rank in self.memory)

    @property
    def fullest(self) -> int:
        """Pipeline rank that needs most memory."""
        return max(range(len(self.memory)), key=lambda i: self.memory[i].peak)


def is_unfolded(fold: Fold) -> bool:
    """Return whether experts could use attention's mesh dp x cp x tp: etp equals tp, and ep divides dp."""
    return fold.etp == fold.tp and fold.dp % fold.ep == 0


def evaluate(
    config: Config,
    world: int,
    device: Device,
    factors: Factors,
    *,
    imbalance: float = 1.0,
    stack: Stack = TITANMOE,
    reference: bool = False,
    lengths: TextLengths | None = None,
) -> PricedMapping:
    """Return time and memory of the recipe's own mappings; "auto" overlap and dispatcher are resolved first.

    Its mappings are that of training and, with [rl], that of the generator. Whether they fit is not checked.

    Args:
        config: recipe with a global batch size, whose mapping is legal.
        imbalance: routed tokens of the busiest rank over the mean.
        reference: whether a frozen copy of the model lies beside it.
        lengths: mean tokens of texts of [rl]; None for the most that the recipe allows.

    Raises:
        ConfigError: a teacher cannot be read; with [rl], the model cannot generate under generation.parallelism.
    """
    fold = derive(world, config.parallelism)
    config, _ = planned_overlap(config, world, device)
    node = config.parallelism.node if config.parallelism.node != -1 else min(device.node, device.domain)
    config = with_planned_dispatcher(config, fold, node, device.name != "cpu")
    price = Pricer(config, device, factors, imbalance, stack).price(config, fold)
    mapping = PricedMapping(config, fold, price, rank_memories(config, fold, imbalance, reference=reference))
    if not config.rl.reward:
        return mapping
    costs = GeneratorCosts(config, world, device, factors, imbalance=imbalance, stack=stack, lengths=lengths)
    return mapping.beside(costs.plan(config.generation.parallelism))


@dataclass
class Search:
    """Result of a search."""

    best: list[PricedMapping]
    """Fastest mappings that fit, fastest first."""
    best_unfolded: PricedMapping | None
    """Fastest mapping that fits with experts on attention's own mesh, priced so; None if none fits."""
    nearest: PricedMapping | None
    """Mapping that comes closest to fitting, if none fits."""
    considered: int
    """Number of mappings that have a lower bound."""


def _illegal(config: Config, world: int) -> list[str]:
    """Return why the config, or else its teacher under the config's mapping, cannot run on `world` ranks, or []."""
    return violations(config, world) or [*teacher_problems(config, world)]


def search(
    config: Config,
    world: int,
    device: Device,
    factors: Factors,
    *,
    count: int = 10,
    imbalance: float = 1.0,
    stack: Stack = TITANMOE,
    reference: bool = False,
    lengths: TextLengths | None = None,
) -> Search:
    """Return the fastest mappings among those that divide everything evenly and fit into a device's memory.

    If none fits, `best` is [], and `nearest` is the one that exceeds memory least; None if no mapping is legal. With
    [rl] each has the fastest generator that fits beside it, and the seconds of both count.

    Args:
        config: recipe with a global batch size, whose own degrees are not used.
        count: largest number of mappings to return.
        imbalance: routed tokens of the busiest rank over the mean.
        reference: whether a frozen copy of the model lies beside it.
        lengths: mean tokens of texts of [rl]; None for the most that the recipe allows.

    Raises:
        ConfigError: with [rl], if the model cannot generate.
    """
    generators = _generators(config, world, device, factors, imbalance=imbalance, stack=stack, lengths=lengths)
    memories = partial(rank_memories, imbalance=imbalance, reference=reference)
    pricer, one_mesh = (kind(config, device, factors, imbalance, stack) for kind in (Pricer, OneMesh))
    candidates = Candidates(config, world, pricer, device.memory - device.reserved)
    # Every mapping needs at least a generator's fewest seconds, and its bound is one of the rest.
    generating = min(generator.seconds if generator else 0.0 for generator in generators)
    best: dict[MappingKey, PricedMapping] = {}
    best_unfolded, unfolded_step = None, inf
    slowest_shown = inf  # steps that are longer than the last one shown are of no use
    for candidate in candidates.by_bound():
        if candidate.bound >= slowest_shown and candidate.bound >= unfolded_step:
            break
        may_be_best_unfolded = is_unfolded(candidate.fold) and candidate.bound < unfolded_step
        limit = to_beat = best[candidate.key].seconds - generating if candidate.key in best else slowest_shown
        if may_be_best_unfolded:
            limit = max(limit, unfolded_step)
        if candidate.bound >= limit:
            continue
        for mapping in _priced_mappings(config, candidate, pricer, limit):
            improves = mapping.price.step < to_beat
            unfolded = mapping
            if may_be_best_unfolded and mapping.fold.cp > 1:  # else both are one mesh
                unfolded = replace(mapping, price=one_mesh.price(mapping.config, mapping.fold))
            improves_unfolded = may_be_best_unfolded and unfolded.price.step < unfolded_step
            if not (improves or improves_unfolded) or _illegal(mapping.config, world):
                continue
            usable = usable_bytes(mapping.config, mapping.fold, device)
            ends = memories(mapping.config, mapping.fold, only_ends=True)
            if max(rank.peak for rank in ends) > usable:
                continue
            mapping.memory = memories(mapping.config, mapping.fold)
            if (fitting := _fitting(mapping, generators, usable)) is None:
                continue
            unfolded = replace(fitting, price=unfolded.price)
            if improves_unfolded and unfolded.seconds - generating < unfolded_step:
                best_unfolded, unfolded_step = unfolded, unfolded.seconds - generating
            if improves and fitting.seconds - generating < to_beat:
                best[candidate.key] = fitting
                best = dict(sorted(best.items(), key=lambda item: item[1].seconds)[:count])
                slowest_shown = [*best.values()][-1].seconds - generating if len(best) == count else inf
                to_beat = fitting.seconds - generating
    nearest = None
    if not best:
        smallest = nsmallest(SMALLEST, Candidates(config, world, pricer, inf), key=attrgetter("least_bytes"))
        mappings = [mapping for candidate in smallest for mapping in _priced_mappings(config, candidate, pricer)]
        mappings = [mapping for mapping in mappings if not _illegal(mapping.config, world)]
        for mapping in mappings:
            mapping.memory = memories(mapping.config, mapping.fold)
        smallest_generator = min(generators, key=lambda generator: generator.bytes if generator else 0)
        nearest = min(
            (mapping.beside(smallest_generator) for mapping in mappings),
            key=lambda mapping: mapping.peak - usable_bytes(mapping.config, mapping.fold, device),
            default=None,
        )
    return Search([*best.values()], best_unfolded, nearest, len(candidates))


def _generators(
    config: Config, world: int, device: Device, factors: Factors, **options: Any
) -> list[GeneratorPlan | None]:
    """Return the generators that may be beside training, fastest first; [None] without [rl].

    ConfigError if the model cannot generate. `options` are imbalance, stack and lengths, as GeneratorCosts takes them.
    """
    return [*GeneratorCosts(config, world, device, factors, **options).fastest()] if config.rl.reward else [None]


def _fitting(mapping: PricedMapping, generators: Iterable[GeneratorPlan | None], usable: float) -> PricedMapping | None:
    """Return the mapping beside the first of the generators with which it fits; None if it fits with none.

    Its `memory` must be that of training alone; that of the result is of the fullest moment: training, copying weights
    to the generator, or generating. A generator of None takes nothing. `usable` is the bytes of a device.
    """
    both = map(mapping.beside, generators)
    return next((mapping for mapping in both if mapping.peak <= usable), None)


def fits(config: Config, world: int, device: Device, factors: Factors) -> bool:
    """Return whether any legal mapping of `world` ranks fits into the devices' memory, with [rl] beside a generator.

    Only mappings that the search tries count (titanmoe.plan.candidates).

    Args:
        config: recipe with a global batch size, whose own degrees are not used.

    Raises:
        ConfigError: with [rl], if the model cannot generate.
    """
    pricer = Pricer(config, device, factors)
    candidates = Candidates(config, world, pricer, device.memory - device.reserved)
    generators = _generators(config, world, device, factors)
    return any(
        _fitting(
            replace(mapping, memory=rank_memories(mapping.config, mapping.fold)),
            generators,
            usable_bytes(mapping.config, mapping.fold, device),
        )
        and not _illegal(mapping.config, world)
        for candidate in candidates
        for mapping in _priced_mappings(config, candidate, pricer)
    )


def _priced_mappings(
    config: Config, candidate: Candidate, pricer: Pricer, limit: float = inf
) -> Iterator[PricedMapping]:
    """Yield a candidate, priced, with each choice of replicas and of reshard_after_forward, and of vocab if that pays.

    Replicas are one, or so many that each stays within a domain of the fast link. Laws are not checked; `memory` is [].

    Args:
        candidate: degrees with one replica, and what else the search chose.
        pricer: pricer of `config` on the device.
        limit: seconds of a step; replicas with which no step can be faster are left out.
    """
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
        gathering_once = with_mapping(config, mapped_fold, candidate, "never")
        bound = candidate.bound + pricer.least_weights_exposed(gathering_once, mapped_fold, candidate.busy)
        if bound >= limit * (1 + ROUNDING):
            continue
        for reshard in _reshards(config, candidate, mapped_fold.edp):
            mapped_config = with_mapping(config, mapped_fold, candidate, reshard)
            mapping = PricedMapping(mapped_config, mapped_fold, pricer.price(mapped_config, mapped_fold), [])
            yield mapping
            if head_excess(mapped_config, mapped_fold) > GAIN and candidate.schedule in PASSES_FIT:
                parallelism = replace(mapped_config.parallelism, vocab="pipeline")
                shared_config = replace(mapped_config, parallelism=parallelism)
                if any(vocabulary_violations(shared_config, mapped_fold.pp, mapped_fold.tp)):
                    continue
                if mapping.price.step <= GAIN * pricer.price(shared_config, mapped_fold, least=True).step:
                    continue
                shared = PricedMapping(shared_config, mapped_fold, pricer.price(shared_config, mapped_fold), [])
                if mapping.price.step > GAIN * shared.price.step:
                    yield shared


def head_excess(config: Config, fold: Fold) -> float:
    """Return the FLOPs of the head with the cheapest layer over those of the mean pipeline rank; at least 1.

    It is the imbalance that no split of the layers avoids, and sharing the head does. 1 without a pipeline.
    """
    layers, head = layer_flops(config.model, config.training.seq_len)
    mean = (sum(layers) + head) / fold.pp
    return max(mean, head + min(layers)) / mean


def _reshards(config: Config, candidate: Candidate, edp: int) -> list[str]:
    """Return the values of reshard_after_forward to price: the recipe's, and with "auto" also those that may differ.

    Args:
        edp: data ranks that share an expert; only if it is 1 can "always" differ from "auto" without a pipeline.
    """
    if config.parallelism.reshard_after_forward != "auto":
        return [config.parallelism.reshard_after_forward]
    if candidate.fold.pp == 1:  # "always" differs from "auto" for experts in no FSDP unit
        return ["auto", "never", *(["always"] if edp == 1 and has_compute_copies(config.training) else [])]
    return ["auto"] if SCHEDULES[candidate.schedule].zero_bubble else ["auto", "always"]


def with_mapping(config: Config, fold: Fold, candidate: Candidate, reshard: str) -> Config:
    """Return the recipe with the candidate's mapping, microbatch, schedule, recomputation, dispatcher and overlap.

    `vocab` becomes "tensor", activation_checkpoint.every 1; schedule_csv and layers_per_stage become empty.

    Args:
        fold: the candidate's degrees, with the replicas chosen.
        reshard: value of parallelism.reshard_after_forward.
    """
    table, single = config.parallelism, SCHEDULES[candidate.schedule].stages_per_rank == 1
    choice = candidate.dispatch_choice
    experts = replace(table.experts, ep=fold.ep, etp=fold.etp, edp=-1, edp_replicate=-1)
    parallelism = replace(
        table,
        pp=fold.pp,
        dp_replicate=fold.dp_replicate,
        dp_shard=-1,
        cp=fold.cp,
        tp=fold.tp,
        vocab="tensor",
        experts=experts,
        reshard_after_forward=reshard,  # type: ignore[arg-type]
    )
    pipeline = replace(
        config.pipeline,
        schedule=candidate.schedule,  # type: ignore[arg-type]
        virtual_stages=-1 if single else candidate.stages,
        schedule_csv="",
        layers_per_stage=[],
    )
    return replace(
        config,
        training=replace(config.training, local_batch_size=candidate.samples),
        parallelism=parallelism,
        pipeline=pipeline,
        moe=replace(config.moe, dispatcher=choice.dispatcher, overlap=choice.overlap),
        activation_checkpoint=ActivationCheckpoint(candidate.mode),  # type: ignore[arg-type]
    )


class OneMesh(Pricer):
    """Pricer for experts that use attention's mesh dp x cp x tp, as without folding.

    The ranks of an ep group are cp x tp apart, so that fewer of them share a node.
    """

    def _experts(self, sample_ranks: int, samples: int, tp: int, *mapping: Any) -> tuple[Cost, Cost]:
        folded = self.device, self.links
        self.device = replace(self.device, domain=max(tp, self.device.domain * tp // sample_ranks))
        self.links = Links(self.device, self.factors)
        try:
            return super()._experts(sample_ranks, samples, tp, *mapping)
        finally:
            self.device, self.links = folded
