"""Rehearse one rank of a world in this process: build a recipe's training on fake tensors and run steps of it.

`recipe_to_rehearse` resolves a recipe without looking at data or runs, and `rehearse` runs it with torch's fake process
group. The command, tests and benchmarks call them.

Shapes: T tokens, K top-k.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes as disable_modes

from titanmoe.comm.collectives import to_local
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, load
from titanmoe.config.schema import Config, Profile, Validation
from titanmoe.data.batch import COMPLETION, PAIRS, REFERENCE, TEACHER_IDS, TEACHER_LOG_P, WEIGHT, Batch
from titanmoe.data.loader import BatchLayout
from titanmoe.fold.degrees import Fold, derive
from titanmoe.fold.meshes import Communicators
from titanmoe.fold.rank_groups import axes_of
from titanmoe.models.transformer import Transformer
from titanmoe.moe.dispatchers.dispatcher_spec import with_planned_dispatcher
from titanmoe.ops.device import HARDWARE, Hardware, imitate
from titanmoe.ops.kernels import installed
from titanmoe.parallel.apply import build
from titanmoe.parallel.flex import flex
from titanmoe.plan.devices import read_device
from titanmoe.plan.planned_overlap import planned_overlap
from titanmoe.rehearse import known_integers, stand_ins
from titanmoe.rehearse.assumed_routing import AssumedRouting, IntegerMessages, Routing, with_imbalance
from titanmoe.rehearse.fake_recorder import FakeRecorder
from titanmoe.rehearse.fake_symmetric import reserve, symmetric_notes
from titanmoe.rehearse.memory_over_step import MOMENTS, WEIGHTS, Memory
from titanmoe.rehearse.message_recorder import Log, Message
from titanmoe.rehearse.operation_costs import Operations
from titanmoe.replace import replaced
from titanmoe.train.build import build_training
from titanmoe.train.launch import resolve
from titanmoe.train.objectives.objective_spec import OBJECTIVES
from titanmoe.train.refusals import refusals
from titanmoe.train.runtime import GarbageCollection, Runtime
from titanmoe.train.trainer import Trainer
from titanmoe.train.training import Training


@dataclass(frozen=True)
class NamedGroup:
    """A process group of this rank, with the axes of the mapping that it spans."""

    kind: str
    """The communicator kind."""
    axes: str
    ranks: tuple[int, ...]
    across: bool
    """Whether it spans nodes."""


DOCUMENTS = 4
"""The number of documents in a sample, if the recipe keeps documents apart."""


class FakeLoader:
    """A batch loader of one data rank, with the recipe's shapes and no content: ids are 0, no position is padding."""

    def __init__(self, config: Config, data_rank: int, data_ranks: int):
        self.layout = BatchLayout(config, data_rank, data_ranks)
        self.objective = OBJECTIVES.look_up(config.training.objective)
        self.teacher_top_k, _ = self.objective.teacher_top_k(config)
        self.global_batch_size, self.microbatches = self.layout.global_batch_size, self.layout.microbatches

    def next_step(self) -> list[Batch]:
        layout = self.layout
        shape = layout.local_batch_size, layout.seq_len
        ids = torch.zeros(shape, dtype=torch.int64)
        document = position = None
        if layout.separate_documents:
            length = -(-layout.seq_len // DOCUMENTS)
            place = torch.arange(layout.seq_len).expand(shape)
            document, position = place // length, place % length
        extra_fields = {WEIGHT: torch.ones(shape)} if layout.with_weights else {}
        if self.teacher_top_k:
            extra_fields |= {TEACHER_IDS: torch.zeros((*shape, self.teacher_top_k), dtype=torch.int64)}
            extra_fields |= {TEACHER_LOG_P: torch.zeros((*shape, self.teacher_top_k + 1))}
        if self.objective.reads_reference:
            extra_fields[REFERENCE] = torch.zeros(shape)
        if self.objective.completions_per_prompt > 1:
            extra_fields |= {COMPLETION: document, PAIRS: torch.full(shape[:1], DOCUMENTS // 2)}
        batch = Batch(ids, ids, torch.ones(shape, dtype=torch.bool), document, position, extra_fields=extra_fields)
        return [batch] * self.microbatches

    def peek(self) -> list[Batch]:
        return self.next_step()


@dataclass(kw_only=True)
class Rehearsal:
    """The record of a rehearsed step of one rank."""

    config: Config
    fold: Fold
    rank: int
    hardware: str
    routing: AssumedRouting
    log: Log
    groups: dict[str, NamedGroup]
    """The groups of this rank, by torch's name for them."""
    created_groups: list[tuple[str, tuple[tuple[int, ...], ...]]]
    """The kind and the ranks of all groups that the world makes together, in order."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    left_out: list[str]
    """Features that the recipe asks for and the rehearsal leaves out, as text."""
    notes: list[str]
    """Remarks on the figures, for the report."""
    start_up: list[Message]
    """The messages of symmetric memory before the first step."""
    operations: Operations
    memory: Memory
    exchange: IntegerMessages | None
    """The integers that dispatchers of this stage send each other; None without MoE layers or with padded buffers."""
    moe_layers: list[int]
    """The indices of this rank's MoE layers."""
    step: int
    """The number of the step, from 1."""


def name_groups(communicators: Communicators, fold: Fold, rank: int, node: int) -> dict[str, NamedGroup]:
    """Return the process groups that a rank is in, with their axes, by torch's name for the group.

    `node` is the number of ranks per node.
    """
    out = {}
    for (kind, rank_lists), group in communicators.groups.items():
        if group is None:
            continue
        ranks = next(ranks for ranks in rank_lists if rank in ranks)
        across = len({r // node for r in ranks}) > 1
        out[group.group_name] = NamedGroup(kind, axes_of(fold, kind, ranks), ranks, across)
    return out


def _assume_routing(
    config: Config, training: Training, recorder: FakeRecorder, routing: Routing
) -> IntegerMessages | None:
    """Make routers and dispatchers of `training` follow the assumed routing, by hooks in their forward.

    Args:
        training: the built training of the rehearsed rank, which gets the hooks.
        recorder: recorder of this rank's messages; the hooks tell it the layer and microbatch.

    Returns:
        The integers that dispatchers send each other; None if the rank has no MoE layer, or expert buffers are padded.
        With symmetric memory those of passes that use it become the `counts` of its buffers; those of passes that
        are repeated without it, after an overflow, are returned.
    """
    if not training.moe_layers:
        return None
    if config.moe.capacity_factor and config.moe.pad_to_capacity:
        return None  # the sizes of padded buffers do not depend on the routing
    template = next(iter(training.moe_layers.values())).dispatcher
    node, memory = config.parallelism.node, training.gradients.first_pass
    messages = partial(IntegerMessages, routing, type(template), template, node)
    exchange = messages()
    symmetric_exchange = None if memory is None else messages(symmetric=True)
    if symmetric_exchange is not None:
        memory.counts = symmetric_exchange
    for layer, moe in training.moe_layers.items():

        def route(_: Any, inputs: tuple, out: tuple, layer: int = layer, dispatcher: Any = moe.dispatcher) -> None:
            current = recorder.dispatching
            current.begin(layer, known_integers.known_list(inputs[1].microbatch), 1 + (config.moe.overlap == "halves"))
            current.exchange = exchange if dispatcher.memory is None else symmetric_exchange
            with disable_modes():
                chosen_TK = routing.halves(recorder.rank, current.microbatch, layer)[current.half]
            known_integers.set_known(out[3], chosen_TK)

        moe.router.register_forward_hook(route)
        if moe.capacity is not None:
            moe.capacity.register_forward_hook(_count_before_dropping)
    return exchange


def _count_before_dropping(_: Any, inputs: tuple, out: Tensor) -> None:
    """Give a capacity's output the known integers of its input, in a forward hook, so that no token is dropped.

    Real dropping depends on scores, which are unknown.
    """
    known_integers.set_known(out, known_integers.known_values(inputs[0]))


class _NoGarbageCollection(GarbageCollection):
    """Garbage collection that never runs, because it would take as long as the steps of a small recipe."""

    def __init__(self, every: int):
        gc.disable()

    def collect(self, step: int) -> None:
        pass


def _without_values(fake: FakeTensorMode) -> Callable[..., None]:
    """Return a function (model, seed, device) that makes a model's weights fake tensors, in place of `materialize`.

    It initializes no weights, and sets buffers to zeros.
    """

    def materialized(model: Transformer, seed: int, device: torch.device) -> None:
        with fake:
            model.to_empty(device=device)
            for buffer in model.buffers():
                buffer.zero_()

    return materialized


def _without_unsupported(config: Config, hardware: Hardware) -> tuple[Config, list[str]]:
    """Return the config without compilation and teacher, and a text for the report on each thing that is left out.

    Among these are also dropped tokens, and Triton's kernels where it is missing, for which the config is not changed.
    """
    moe, left_out = config.moe, []
    if config.compile.enable:
        config = replace(config, compile=replace(config.compile, enable=False))
        left_out.append("compilation: operations are those of the uncompiled model")
    if moe.capacity_factor and not moe.pad_to_capacity:
        left_out.append("dropping, which depends on scores: tokens are counted before any is dropped")
    if config.distillation.teacher:
        config = replace(config, distillation=replace(config.distillation, teacher=""))
        left_out.append("the teacher, its weights and its forward (titanmoe plan counts its weights)")
    if hardware.kind == "cuda" and moe.kernels != "torch" and not installed():
        left_out.append(
            "Triton's kernels, because Triton is not installed here: their plain PyTorch operations are counted instead"
        )
    return config, left_out


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Initialize torch.distributed within this context as one rank of `world` ranks, whose messages are not sent.

    torch.distributed must not be initialized yet.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        # Fake groups have no options, and torch asks for their time-out when it waits for a message.
        with replaced(FakeProcessGroup, "options", FakeProcessGroup.Options()):
            yield
    finally:
        dist.destroy_process_group()
        # torch caches shards' layouts by mesh, and equal meshes of two ranks differ in the rank's coordinates.
        _clear_sharding_prop_cache()


def hardware_of(name: str) -> Hardware:
    """Return the hardware of this name; ConfigError, with the known names, if a rehearsal cannot imitate it."""
    if name not in HARDWARE:
        raise ConfigError(f"hardware {name!r} cannot be rehearsed: use {', '.join(HARDWARE)}")
    return HARDWARE[name]


def recipe_to_rehearse(argv: list[str], world: int, hardware: str, node: int = 8) -> Config:
    """Return the resolved config of a recipe, checked for a world and hardware. Data and earlier runs are not opened.

    Overlap and dispatcher are chosen if "auto". Epochs become 100 steps; validation, profile and wandb are left out.

    Args:
        argv: The words of the command line: the recipe and overrides such as "--parallelism.tp=2".
        hardware: The hardware whose code runs: one of `titanmoe.ops.device.HARDWARE`, such as "h100".
        node: The ranks per node, unless the recipe has parallelism.node.

    Raises:
        ConfigError: The recipe is refused; has all reasons.
    """
    imitated, device = hardware_of(hardware), read_device(hardware)

    def without_run(config: Config) -> Config:
        on_node = config.parallelism.node if config.parallelism.node != -1 else min(node, world)
        # Nothing depends on the number of steps, and the data need not be there.
        training = replace(config.training, epochs=0, steps=100) if config.training.epochs else config.training
        return replace(
            config,
            training=training,
            parallelism=replace(config.parallelism, node=on_node),
            metrics=replace(config.metrics, wandb=""),
            data=replace(config.data, skip_steps=[]),
            profile=Profile(),
            validation=Validation(),
        )

    def resolved(config: Config) -> Config:
        config, _ = planned_overlap(resolve(without_run(config), world, lambda _: {}), world, device)
        fold, gpus = derive(world, config.parallelism), imitated.kind == "cuda"
        return with_planned_dispatcher(config, fold, config.parallelism.node, gpus)

    with imitate(imitated):
        return load(argv, COMPONENTS, lambda config: refusals(without_run(config), world), resolved)


def rehearse(
    config: Config,
    world: int,
    rank: int,
    name: str,
    *,
    routing: float | AssumedRouting = 1.0,
    node: int = 8,
    steps: int = 1,
) -> Rehearsal:
    """Run training steps of one rank on fake tensors in this process, and return the record of the last step.

    torch.distributed must not be initialized, and is not afterwards.

    Args:
        config: The resolved config, from `recipe_to_rehearse`.
        name: The hardware whose code runs: one of `titanmoe.ops.device.HARDWARE`, such as "h100".
        routing: The assumed routing, or a number: the routed tokens of the busiest expert over the mean.
        node: The ranks per node.
        steps: The number of steps.
    """
    hardware = hardware_of(name)
    config, left_out = _without_unsupported(config, hardware)
    fold = derive(world, config.parallelism)
    assumed = routing if isinstance(routing, AssumedRouting) else with_imbalance(config, routing)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(imitate(hardware))
        stack.enter_context(fake_world(rank, world))
        stack.callback(gc.enable)
        runtime = Runtime(rank, rank % node, world, torch.device("cpu"))
        layers: dict[int, str] = {}
        recorder = FakeRecorder(layers, rank, hardware.kind == "cuda", fake)
        # Meshes are built from real values and modules on the meta device: fake tensors begin with the weights.
        training = build_training(
            config,
            runtime,
            loader=FakeLoader,
            garbage=_NoGarbageCollection,
            build=partial(
                build,
                materialize=_without_values(fake),
                flex=stand_ins.flex_attention if hardware.kind == "cuda" else flex,
            ),
            reserve_buffers=partial(reserve, recorder, fake),
        )
        layers |= {id(block): f"layers.{i}" for model in training.stages for i, block in model.blocks().items()}
        stack.enter_context(fake)
        exchange = _assume_routing(config, training, recorder, Routing(config, fold, FakeLoader, assumed))
        # tolist counts as one wait of the host; fake tensors would read element by element.
        stack.enter_context(replaced(FakeTensor, "tolist", lambda x: recorder.read_value(x)))
        # numpy is called on batches only, which are on the host, so the host does not wait.
        stack.enter_context(replaced(FakeTensor, "numpy", lambda x: known_integers.known_values(x).numpy()))
        if hardware.kind == "cuda":
            stack.enter_context(stand_ins.gpu_stand_ins())
        training.optimizer.moments()  # allocates the moments, which exist in every step but the first
        for model in training.stages:
            recorder.ledger.assign((*model.parameters(), *model.buffers()), WEIGHTS)
        recorder.ledger.assign(training.optimizer.device_tensors, MOMENTS)
        recorder.ledger.leave_out(training.optimizer.host_tensors)
        trainer = Trainer(training)
        for _ in range(steps):
            recorder.begin_step()
            with recorder.recording():
                trainer.train_step()
        weights = [to_local(p.detach()) for p in training.parameters.values()]
        trained = training.optimizer.local_shards.values()
        return Rehearsal(
            config=config,
            fold=fold,
            rank=rank,
            hardware=name,
            routing=assumed,
            log=recorder.log,
            groups=name_groups(training.meshes.communicators, fold, rank, node),
            created_groups=list(training.meshes.communicators.groups),
            parameter_bytes=sum(p.numel() * p.element_size() for p in weights),
            gradient_bytes=sum(p.numel() * p.element_size() for p in trained),
            optimizer_bytes=sum(x.numel() * x.element_size() for x in training.optimizer.device_tensors),
            left_out=left_out,
            notes=symmetric_notes(training.gradients),
            start_up=recorder.start_up,
            operations=recorder.operations,
            memory=recorder.ledger.memory(),
            exchange=exchange,
            moe_layers=list(training.moe_layers),
            step=steps,
        )
