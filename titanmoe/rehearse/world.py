"""One rank of a world in this process: the Trainer of a recipe, built and stepped on fake tensors."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes as outside
from torch.utils._python_dispatch import _pop_mode, _push_mode

from titanmoe.comm import fsdp_cpu
from titanmoe.config import load
from titanmoe.config.schema import Config, Profile
from titanmoe.fold.degrees import Fold, derive
from titanmoe.fold.groups import View, group_of
from titanmoe.fold.meshes import Lanes
from titanmoe.models.families import preset
from titanmoe.models.transformer import Transformer
from titanmoe.ops.device import Hardware, as_on
from titanmoe.ops.kernels import installed
from titanmoe.parallel import apply
from titanmoe.rehearse import stand_ins, values
from titanmoe.rehearse.hardware import HARDWARE
from titanmoe.rehearse.memory import MOMENTS, WEIGHTS, Ledger, Memory
from titanmoe.rehearse.place import Places
from titanmoe.rehearse.record import Log, Recorder
from titanmoe.rehearse.routing import Exchange, Routing, Stated, with_imbalance
from titanmoe.rehearse.samples import Samples
from titanmoe.rehearse.shapes import Shapes
from titanmoe.rehearse.work import Operations
from titanmoe.train.launch import resolve
from titanmoe.train.legal import refusals
from titanmoe.train.runtime import Runtime
from titanmoe.train.trainer import Trainer

AXES: dict[str, tuple[tuple[View, tuple[str, ...]], ...]] = {
    "waited": (
        ("attention", ("tp",)),
        ("attention", ("cp",)),
        ("attention", ("dp",)),
        ("attention", ("cp", "tp")),
    ),
    "rows": (("experts", ("ep", "etp")),),
    "shards": (("attention", ("dp_shard", "cp")), ("experts", ("edp",))),
    "replicas": (("attention", ("dp_replicate",)), ("experts", ("edp_replicate",))),
    "stages": (("attention", ("pp",)),),
}
"""Of each lane of titanmoe.fold.meshes: what its groups may be made of."""


@dataclass(frozen=True)
class Named:
    """A process group in the terms of the fold."""

    lane: str
    axes: str
    ranks: tuple[int, ...]
    across: bool
    """Whether it leaves a node."""
    parts: tuple[tuple[int, ...], ...] = field(repr=False, compare=False, default=())
    """The groups of all ranks that were made with it."""


@dataclass
class Rehearsal:
    config: Config
    fold: Fold
    rank: int
    hardware: str
    routing: Stated
    log: Log
    groups: dict[str, Named]
    """By torch's name."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    left_out: list[str]
    operations: Operations
    memory: Memory
    exchange: Exchange | None
    """What the dispatchers of all ranks of its stage send each other; None without experts."""
    moe_layers: list[int]


def name_groups(lanes: Lanes, fold: Fold, rank: int, node: int) -> dict[str, Named]:
    out = {}
    for (lane, parts), group in lanes.made.items():
        if group is None:
            continue
        ranks = next(part for part in parts if rank in part)
        names = list(
            dict.fromkeys(
                " x ".join(axis for axis in axes if getattr(fold, axis) > 1)
                for view, axes in AXES[lane]
                if group_of(fold, view, axes, rank) == ranks
            )
        )
        if lane == "rows" and not names:
            names = ["within a node" if ranks[-1] - ranks[0] == len(ranks) - 1 else "across nodes"]
        if lane == "waited" and len(ranks) == fold.world:
            names.append("world")
        across = len({r // node for r in ranks}) > 1
        out[group.group_name] = Named(lane, " = ".join(names) or "ends of the pipeline", ranks, across, parts)
    return out


class _Here(threading.local):
    microbatch = layer = -1
    exchange: Exchange | None = None
    met = 0


class FakeRecorder(Recorder):
    """Of a step on fake tensors: it knows the numbers that decide shapes, and sees where the host asks for numbers."""

    def __init__(self, layers: dict[int, str], rank: int, on_gpu: bool, fake: FakeTensorMode):
        super().__init__(layers, on_gpu)
        self.rank, self.here, self.shapes = rank, _Here(), Shapes(fake)
        self.places, self.operations = Places(layers), Operations()
        self.ledger = Ledger(self.places.here)

    def begin(self) -> None:
        """A step begins."""
        self.log, self.operations = Log(), Operations()
        self.ledger.begin()

    @contextmanager
    def on(self) -> Iterator[Recorder]:
        with self.places.on(), self.ledger.on(), super().on():
            yield self

    def compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func._overloadpacket.__name__
        if func.namespace == "profiler":
            with outside():
                return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            found = self.number(args[0])
            return found if not isinstance(found, list) else found[0]
        out = stand_ins.grouped_product(*args, **kwargs) if name == "_grouped_mm" else self.shapes(func, args, kwargs)
        values.follow(func, args, kwargs, out)
        if not func.is_view:
            place = self.places.here()
            self.operations.add(func, args, kwargs, out, place)
            self.ledger.note(out, place)
        return out

    def send(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        # torch's stand-in for it would take other memory.
        return args[0] if func._overloadpacket.__name__ == "wait_tensor" else self.shapes(func, args, kwargs)

    def asked(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        # By far the most frequent, and fake tensors think long about it.
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        return func(*args, **kwargs)

    def number(self, x: Tensor) -> Any:
        """What the host reads: the number, where it is known; else 0, a finite loss and a flag that nobody raised."""
        self.sync()
        found = values.numbers(x)
        if found is not None:
            return found
        if not x.dtype.is_floating_point:
            raise RuntimeError(f"a whole number of shape {tuple(x.shape)} is asked for, and nothing states it")
        with outside():
            return torch.zeros(x.shape).tolist()

    def voted(self, x: Tensor) -> None:
        """Stages tell each other before the first step whether they know their shapes, and all of ours do."""
        if not x.dtype.is_floating_point:
            with outside():
                values.give(x, torch.ones(x.shape, dtype=x.dtype))

    def sent(self, func: Any, args: tuple, out: Any) -> None:
        self.ledger.note(out, self.places.here())
        if func._overloadpacket.__name__ == "recv_":
            self.voted(*args[0])
        if not isinstance(out, FakeTensor) or out.dtype.is_floating_point:
            return
        if func._overloadpacket.__name__ == "wait_tensor":
            if (value := values.known(args[0])) is not None:
                values.give(out, value)
        elif self.here.exchange is not None:
            with outside():
                here = self.here
                comes = here.exchange.received(self.rank, here.microbatch, here.layer, here.met)
            values.give(out, comes)
            self.here.met += 1


def _know_routing(trainer: Trainer, recorder: FakeRecorder, routing: Routing) -> Exchange | None:
    """Routers choose what is stated, and dispatchers hear of the other ranks' choices."""
    if not trainer.moe_layers:
        return None
    like = copy(trainer.dispatchers[0])  # as it is before its methods are replaced
    exchange = Exchange(routing, type(like), like, trainer.config.parallelism.node)
    for layer, moe in trainer.moe_layers.items():
        router, dispatcher = moe.router, moe.dispatcher

        def route(x_TD: Tensor, tokens: Any, layer: int = layer, real: Callable = router.forward) -> tuple:
            out = real(x_TD, tokens)
            recorder.here.microbatch = values.numbers(tokens.microbatch)
            with outside():
                chosen_TK = routing.chosen(recorder.rank, recorder.here.microbatch, layer)
            values.give(out[3], chosen_TK)
            return out

        def start(*args: Any, layer: int = layer, real: Callable = dispatcher.start) -> Any:
            recorder.here.exchange, recorder.here.layer, recorder.here.met = exchange, layer, 0
            return real(*args)

        router.forward = route
        dispatcher.start = start
    return exchange


def _weightless(fake: FakeTensorMode) -> Callable[..., None]:
    """`materialize` without a weight's numbers."""

    def materialized(model: Transformer, seed: int, device: torch.device) -> None:
        with fake:
            model.to_empty(device=device)
            for buffer in model.buffers():
                buffer.zero_()

    return materialized


def _that_can_be_followed(config: Config, hardware: Hardware) -> tuple[Config, list[str]]:
    """The recipe without what a rehearsal cannot do, and what that is."""
    moe, left_out = config.moe, []
    if config.compile.enable:
        config = replace(config, compile=replace(config.compile, enable=False))
        left_out.append("compilation: operations are those of the uncompiled model")
    if moe.overlap_chunks == -1:
        config = replace(config, moe=replace(moe, overlap_chunks=1))
        left_out.append("moe.overlap_chunks = -1 measures the machine: one chunk is taken")
    if moe.capacity_factor and not moe.pad_to_capacity:
        left_out.append("dropping depends on scores: rows are those before anything is dropped")
    if hardware.kind == "cuda" and moe.kernels != "torch" and not installed():
        left_out.append("Triton is not installed here: the plain operations stand for its kernels")
    return config, left_out


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _without_timeout(exchange: fsdp_cpu._Exchange, timeout: Any = None) -> bool:
    """Fake groups have no time-out to keep."""
    for work, *_ in exchange.works:
        work.wait()
    return True


def _in_other_thread(trainer: Trainer, modes: list[Any]) -> None:
    """A pair's second half has a thread of its own, in which modes must be set again."""
    if trainer.engine.pairs is None:
        return
    here = trainer.engine.pairs._here

    def with_modes(work: Callable[[], None]) -> Callable[[], None]:
        work = here(work)

        @wraps(work)
        def run() -> None:
            for mode in modes:
                _push_mode(mode)
            try:
                work()
            finally:
                for _ in modes:
                    _pop_mode()

        return run

    trainer.engine.pairs._here = with_modes


def read(argv: list[str], world: int, hardware: str, node: int = 8) -> Config:
    """The resolved config of a recipe, under the laws of that hardware; no run of its name is looked for."""

    def alone(config: Config) -> Config:
        on_node = config.parallelism.node if config.parallelism.node != -1 else min(node, world)
        return replace(
            config,
            parallelism=replace(config.parallelism, node=on_node),
            metrics=replace(config.metrics, wandb=""),
            profile=Profile(),
        )

    with as_on(HARDWARE[hardware]):
        return load(
            argv,
            preset,
            lambda config: refusals(alone(config), world),
            lambda config: resolve(alone(config), world, lambda _: {}),
        )


def rehearse(
    config: Config, world: int, rank: int, name: str, routing: float | Stated = 1.0, node: int = 8, steps: int = 1
) -> Rehearsal:
    """The last of `steps` steps, as on the hardware of that name. config: from `read`. routing: or its imbalance."""
    hardware = HARDWARE[name]
    config, left_out = _that_can_be_followed(config, hardware)
    fold = derive(world, config.parallelism)
    stated = routing if isinstance(routing, Stated) else with_imbalance(config, routing)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(as_on(hardware))
        stack.enter_context(fake_world(rank, world))
        # Meshes ask for numbers, and modules are on meta: what fills them is the first to meet fake tensors.
        stack.enter_context(mock.patch.object(apply, "materialize", _weightless(fake)))
        stack.callback(gc.enable)
        runtime = Runtime(rank, rank % node, world, torch.device("cpu"))
        trainer = Trainer(config, runtime, loader=Samples)
        layers = {id(block): f"layers.{i}" for part in trainer.parts for i, block in part.blocks().items()}
        recorder = FakeRecorder(layers, rank, hardware.kind == "cuda", fake)
        stack.enter_context(fake)
        exchange = _know_routing(trainer, recorder, Routing(config, fold, Samples, stated))
        _in_other_thread(trainer, [fake, recorder])
        # One wait, where fake tensors would ask for each number.
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda x: recorder.number(x)))
        stack.enter_context(mock.patch.object(fsdp_cpu._Exchange, "wait", _without_timeout))
        if hardware.kind == "cuda":
            stack.enter_context(stand_ins.of_gpus())
        trainer.clock = recorder.places
        trainer.optimizer.moments()  # made now, as any step but the first finds them
        recorder.ledger.own((x for part in trainer.parts for x in (*part.parameters(), *part.buffers())), WEIGHTS)
        recorder.ledger.own(trainer.optimizer.on_device, MOMENTS)
        recorder.ledger.leave_out(trainer.optimizer.on_host)
        for _ in range(steps):
            recorder.begin()
            with recorder.on():
                trainer.train_step()
        pieces = trainer.optimizer.pieces.values()
        return Rehearsal(
            config,
            fold,
            rank,
            name,
            stated,
            recorder.log,
            name_groups(trainer.meshes.lanes, fold, rank, node),
            sum(p.numel() * p.element_size() for p in pieces),
            sum(p.numel() * p.element_size() for p in pieces),
            sum(x.numel() * x.element_size() for x in trainer.optimizer.on_device),
            left_out,
            recorder.operations,
            recorder.ledger.memory(),
            exchange,
            list(trainer.moe_layers),
        )
