"""Mappings that a search considers, each with lower bounds of its time and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from titanmoe.config.blocks import moe_layers
from titanmoe.config.laws import WIDTHS
from titanmoe.config.ranges import divides, divisors
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import Fold
from titanmoe.fold.legality import divided_fields
from titanmoe.fold.pipeline_schedules import SCHEDULES
from titanmoe.models.count import parameters, trained_parameters
from titanmoe.models.tensors import Tuning
from titanmoe.moe.dispatchers.dispatcher_spec import DISPATCHERS
from titanmoe.plan.devices import Device
from titanmoe.plan.dispatch_costs import NEAR, DispatchChoice, hidden_by_pairs
from titanmoe.plan.price import Pricer
from titanmoe.plan.saved_bytes import Widths, saved_bytes
from titanmoe.plan.schedule_cost import backward_loads, schedule_cost
from titanmoe.plan.totals_by_mode import (
    MODES,
    expert_seconds,
    non_expert_seconds,
    routed_message_seconds,
    seconds_in_halves,
)

MICROBATCHES = (1, 2, 4, 8)
MOST_SPLIT, MOST_STAGES = 16, 10
"""Largest tp and etp, and most stages per rank."""

MappingKey = tuple[int, int, int, int]
"""pp, tp, ep, etp."""


class Candidate(NamedTuple):
    """Mapping, microbatch, recomputation, schedule and dispatcher that the search may price, with two lower bounds."""

    bound: float
    """Lower bound of the seconds of a step."""
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


def candidates_of(config: Config, world: int, pricer: Pricer, limit: float) -> Iterator[Candidate]:
    """Yield the mappings of `world` ranks that divide the model and batch evenly, in no order, with lower bounds.

    Args:
        pricer: pricer of `config` on the device.
        limit: bytes of a device; mappings whose lower bound of memory is above it are left out.
    """
    model, training = config.model, config.training
    batch, fields, layers = training.global_batch_size, divided_fields(config), model.num_layers
    moe, deep, mixer_counts = moe_layers(model), model.num_layers - 1, Counter(pricer.first_alike[:layers])
    stored, count = WIDTHS[training.dtype], parameters(model)
    tuning = Tuning.of(config)
    trained = trained_parameters(model, tuning)
    frozen = count.total - (0 if tuning.rank else trained)  # adapters are beside the weights
    state = (4 * stored * trained + WIDTHS[training.mixed_precision_param] * frozen) / world

    def splits(name: str, degree: int) -> bool:
        return all(divides(degree, value) for value in fields.get(name, {}).values() if value > 0)

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
            and (ep * etp == 1 or (moe > 0 and splits("ep", ep) and splits("etp", etp)))
        ]
        attention_grids = [
            (tp, cp)
            for tp, cp in grids
            if stage % (tp * cp) == 0
            and tp <= MOST_SPLIT
            and splits("tp", tp)
            and training.seq_len % (tp * cp * (2 if cp > 1 else 1)) == 0
        ]
        for (tp, cp), samples in product(attention_grids if pp <= layers else [], MICROBATCHES):
            dp = stage // (tp * cp)
            if batch % (samples * dp):
                continue
            m = batch // (samples * dp)
            hop = 2 * m * pricer.hop(pp, stage, samples, tp * cp)
            schedules = [(name, v, schedule_cost(name, pp, v, m).idle) for name, v in _schedules(config, pp, m)]
            loads = [_loads_of_equal_stages(name, pp, v, m) for name, v, _ in schedules]
            batch_config = replace(config, training=replace(training, local_batch_size=samples))
            for ep, etp, dispatchers in expert_grids:
                fold = Fold(world, pp, 1, dp, cp, tp, 1, stage // (ep * etp), ep, etp)
                whole = (count.total - count.experts) / tp + count.experts / (ep * etp)
                gradients = 4 * whole / pp if pp > 1 and tuning.trains_all else 0.0
                if (tp, cp, samples) not in attention:
                    widths = Widths(batch_config, fold)
                    attention_bytes = [
                        sum(n * saved_bytes(widths, i, mode).attention for i, n in mixer_counts.items()) / layers
                        for mode in MODES
                    ]
                    attention[tp, cp, samples] = attention_bytes, non_expert_seconds(pricer, tp, cp, samples)
                experts_key = tp * cp, samples, tp if local else 1, ep, etp
                ffn_key = *experts_key[:3], ep * etp > 1, etp
                if ffn_key not in ffns:
                    widths = Widths(batch_config, fold)
                    ffns[ffn_key] = [saved_bytes(widths, deep, mode).ffn for mode in MODES]
                (attention_bytes, seconds), ffn = attention[tp, cp, samples], ffns[ffn_key]
                for i, mode in enumerate(MODES):
                    block = (attention_bytes[i] + ffn[i]) * layers / pp
                    launches = layers * pricer.launches(fold, mode)
                    for (name, v, idle), schedule_loads in zip(schedules, loads, strict=True):
                        if mode != "none" and SCHEDULES[name].zero_bubble:
                            continue  # what recomputation keeps between both halves of backward is not in the memory
                        least_bytes = state + max(block * load + gradients * begun for load, begun in schedule_loads)
                        if least_bytes > limit:
                            continue
                        if experts_key not in experts:
                            experts[experts_key] = [
                                (
                                    choice,
                                    *(
                                        f(pricer, *experts_key, choice)
                                        for f in (expert_seconds, routed_message_seconds)
                                    ),
                                )
                                for choice in map(DispatchChoice, dispatchers)
                            ]
                        for plain, by_mode, message_seconds in experts[experts_key]:
                            choice, more, dispatcher = plain, by_mode[i], plain.dispatcher
                            if name == "DualPipeV":
                                hidden = hidden_by_pairs(pp, m, moe / pp / v)
                                choice, more = pricer.in_pairs(choice, more, message_seconds, hidden)
                            halves_key = tp, cp, samples, ep, etp, dispatcher
                            if halves_key not in halves:
                                halves[halves_key] = seconds_in_halves(batch_config, pricer, dispatcher, fold)
                            if NEAR * halves[halves_key][i] < seconds[i] + more:
                                choice = DispatchChoice(dispatcher, halves=True)
                                more = halves[halves_key][i] - seconds[i]
                            bound = max(seconds[i] + more, launches) / pp * (m + idle) + hop * v
                            yield Candidate(bound, least_bytes, fold, samples, mode, name, v, choice)


def _loads_of_equal_stages(schedule: str, pp: int, stages: int, microbatches: int) -> list[tuple[float, float]]:
    """Return what the first pipeline rank holds in those of its backward passes that may be the peak, for equal stages.

    Returns:
        For each such pass, the microbatches in flight in all stages of the rank over its stages, and the fraction of
        its stages that have gradients already.
    """
    loads = backward_loads(schedule, pp, stages, microbatches, 0)
    return [(sum(load.in_flight) / stages, sum(load.begun) / stages) for load in loads]


def _schedules(config: Config, pp: int, m: int) -> list[tuple[str, int]]:
    """Return the (schedule, stages per rank) to try with `m` microbatches."""
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
    """Return the dispatchers to try for groups of ep x etp ranks; the recipe's own if no other may replace it."""
    dispatcher = config.moe.dispatcher
    if not DISPATCHERS.look_up(dispatcher).search_tries:
        return [dispatcher]
    tried = {name: DISPATCHERS.look_up(name) for name in DISPATCHERS.table}
    return [
        name for name, spec in tried.items() if spec.search_tries and (group > device.domain or not spec.works_by_node)
    ]
