"""Rehearse a move of a model's weights to another mapping (titanmoe.checkpoint.relayout) on every rank of a world.

What a rank sends depends on the shards of all ranks. So both models are built on the meta device once as each rank, to
see its shards; then each rank makes the move with these. `titanmoe rehearse --relayout` prints the bytes and the
memory of each rank, and whether all messages can complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from titanmoe.checkpoint.relayout import (
    ROUND_BYTES,
    LocalTensors,
    MessagePlan,
    TensorPlaces,
    merge_layouts,
    overlaps,
    pack,
    refuse_other_model,
)
from titanmoe.checkpoint.state import Targets, persistent_buffers, shards_to_load
from titanmoe.comm.collectives import Group
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.files import format_bytes
from titanmoe.fold.degrees import derive
from titanmoe.fold.meshes import build_meshes
from titanmoe.generate.build_model import build_empty
from titanmoe.generate.model import config_to_run
from titanmoe.ops.device import imitate
from titanmoe.parallel.apply import build, make_meshes
from titanmoe.rehearse.code_site import CodeSite
from titanmoe.rehearse.memory_over_step import WEIGHTS, Ledger
from titanmoe.rehearse.message_order import Communicator, Program, Verdict, check_order
from titanmoe.rehearse.message_recorder import Recorder
from titanmoe.rehearse.rehearsal import fake_world, hardware_of, recipe_to_rehearse
from titanmoe.text_report import columns

LEFT_OUT = ("model.mtp.",)
"""Prefixes of the weights that the destination may lack, as in Session.copy_weights."""
DEGREES = ("pp", "cp", "tp", "ep", "etp")
META = torch.device("meta")


@dataclass(frozen=True)
class Destination:
    """The model that the weights move to."""

    config: Config
    generates: bool
    """Whether it only generates: its weights are not sharded over data ranks (titanmoe.generate.build_model)."""


@dataclass(frozen=True)
class RankMove:
    """Traffic of one rank in a move, in bytes."""

    needed: int
    """Bytes, in the narrower dtype, of the rank's shards in the destination that it does not hold in the source."""
    received: int
    sent: int
    rounds: int
    """Number of all-to-alls."""
    messages: int
    """Most memory that messages take at once."""
    weights: int
    """Memory of both models' shards."""


def read_destination(words: str, argv: list[str], config: Config, world: int, hardware: str, node: int) -> Destination:
    """Return the destination that the words of --relayout describe.

    Args:
        words: "tp=2 ep=4 dtype=bfloat16" for a model that generates, or options of the recipe such as
            "parallelism.tp=2" for one that trains. A degree that the first form lacks is 1.
        argv: the recipe and its overrides, as on the command line.
        config: the resolved config of the source.
        hardware: the hardware whose code runs: one of `titanmoe.ops.device.HARDWARE`, such as "h100".

    Raises:
        ConfigError: with every problem, such as a mapping that cannot generate.
    """
    options = {name: value for name, _, value in (word.partition("=") for word in words.split())}
    if options and all("." in name for name in options):
        argv = [*argv, *(f"--{name}={value}" for name, value in options.items())]
        return Destination(recipe_to_rehearse(argv, world, hardware, node), generates=False)
    problems = [
        f'--relayout "{words}" has {name}={value}: give {", ".join(DEGREES)} (numbers) and dtype for a model that '
        "generates, or options of the recipe such as parallelism.tp=2 for one that trains"
        for name, value in options.items()
        if name != "dtype" and not (name in DEGREES and value.isdecimal())
    ]
    if not options:
        problems = [f'--relayout "{words}" names no mapping: give one, such as "tp=2 ep=4" or "parallelism.tp=2"']
    if problems:
        raise ConfigError(problems)
    degrees = {name: int(options.get(name, 1)) for name in DEGREES}
    return Destination(config_to_run(config, world, degrees, options.get("dtype"), "cpu"), generates=True)


def rehearse_relayout(
    source: Config, destination: Destination, world: int, hardware: str, round_bytes: int = ROUND_BYTES
) -> tuple[list[RankMove], Verdict]:
    """Rehearse the move on every rank; return what each rank does, by rank, and whether all messages can complete.

    torch.distributed must not be initialized.

    Args:
        source: the resolved config of the mapping to move from.
        destination: the model to move to.
        hardware: the hardware whose code runs: one of `titanmoe.ops.device.HARDWARE`, such as "h100".
        round_bytes: most bytes that a rank sends in a round, and most that it receives.

    Raises:
        ConfigError: the destination is another model, with names and shapes.
    """
    ends = Destination(source, generates=False), destination
    with imitate(hardware_of(hardware)):
        shards = [[_shards(end, world, rank) for end in ends] for rank in range(world)]
    held, wanted = (
        merge_layouts([pack(LocalTensors(end.values()).layout) for end in of_ranks])
        for of_ranks in zip(*shards, strict=True)
    )
    refuse_other_model(held, wanted, LEFT_OUT)
    moves, programs = [], []
    for rank in range(world):
        move, program = _move(rank, *shards[rank], held=held, wanted=wanted, world=world, round_bytes=round_bytes)
        moves.append(move)
        programs.append(program)
    return moves, check_order(programs)


def _shards(end: Destination, world: int, rank: int) -> Targets:
    """Return a rank's shards of a model on the meta device: {name on the rank: (name of the full tensor, shard)}.

    Builds the model in this process as that rank of a fake world.
    """
    config, fold = end.config, derive(world, end.config.parallelism)
    with fake_world(rank, world):
        if end.generates:
            return build_empty(config, build_meshes(fold, "cpu", trains=False), META)[1]
        meshes = make_meshes(fold, config, torch.device("cpu"))
        stages = build(config, meshes, 1, META, materialize=lambda model, seed, device: None)
        parameters = {name: p for stage in stages for name, p in stage.named_parameters()}
        buffers = {name: b for stage in stages for name, b in persistent_buffers(stage).items()}
        return shards_to_load(parameters, buffers, None, config.model.tie_embeddings)


class MetaRecorder(Recorder):
    """A recorder of messages of meta tensors, and of their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(CodeSite)

    def compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        out = super().compute(func, args, kwargs)
        if not func.is_view:
            self.ledger.note(out, CodeSite())
        return out

    def run_message(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        # torch's meta implementation of the wait would allocate a copy.
        return args[0] if func._overloadpacket.__name__ == "wait_tensor" else super().run_message(func, args, kwargs)

    def after_message(self, func: Any, args: tuple, out: Any) -> None:
        self.ledger.note(out, CodeSite())


def _move(
    rank: int,
    source: Targets,
    destination: Targets,
    *,
    held: Mapping[str, TensorPlaces],
    wanted: Mapping[str, TensorPlaces],
    world: int,
    round_bytes: int,
) -> tuple[RankMove, Program]:
    """Make the move as one rank, on meta tensors; return its bytes and memory, and its messages for `check_order`.

    Args:
        source: this rank's shards of the model to move from.
        destination: this rank's shards of the model to move to.
        held: which ranks have which blocks of each tensor of the source, by name.
        wanted: which ranks have which blocks of each tensor of the destination, by name.
        round_bytes: most bytes that a rank sends in a round, and most that it receives.
    """
    recorder = MetaRecorder()
    with fake_world(rank, world):
        ends = [LocalTensors(end.values()) for end in (source, destination)]
        group = Group.of(dist.group.WORLD)
        plan = MessagePlan(held, wanted, group, round_bytes)
        recorder.ledger.assign((x for end in ends for some in end.by_region.values() for x in some), WEIGHTS)
        recorder.ledger.begin_step()
        with recorder.recording():
            plan.move(*ends, META)
    everyone = tuple(range(world))
    program = Program(rank, recorder.log, {group.name: Communicator("world", everyone, everyone)})
    needed = 0
    for name, tensor in wanted.items():
        regions, local = ([region for region, ranks in x.ranks.items() if rank in ranks] for x in (tensor, held[name]))
        elements = sum(prod(sizes) for _, sizes in regions) - sum(
            prod(sizes) for *_, (_, sizes) in overlaps(regions, local)
        )
        needed += elements * min(tensor.dtype.itemsize, held[name].dtype.itemsize)
    messages, memory = recorder.log.messages, recorder.ledger.memory()
    move = RankMove(
        needed=needed,
        received=sum(message.received_bytes for message in messages),
        sent=sum(message.sent_bytes for message in messages),
        rounds=len(messages),
        messages=memory.peak - memory.at_start,
        weights=memory.at_start,
    )
    return move, program


def format_relayout(
    source: Config, destination: Destination, moves: list[RankMove], verdict: Verdict, hardware: str
) -> list[str]:
    """Return the report of a rehearsed move as lines to print, with a row for each rank.

    Args:
        moves: bytes that each rank needs, receives and sends, by rank.
        hardware: name of the device that is imitated, such as "h100".
    """
    lines = [f"move of the weights on {len(moves)} ranks, as on {hardware}"]
    for title, config in (("from", source), ("to", destination.config)):
        fold = derive(len(moves), config.parallelism)
        for view, axes in (("attention", fold.attention_axes), ("experts", fold.expert_axes)):
            lines.append(f"    {title:<4}  {view:<9}  " + " x ".join(f"{name} {n}" for name, n in axes.items()))
    body = [("rank", "needs", "receives", "sends", "messages", "memory of messages", "of both models")]
    for rank, move in enumerate(moves):
        sizes = map(format_bytes, (move.needed, move.received, move.sent))
        body.append((str(rank), *sizes, str(move.rounds), format_bytes(move.messages), format_bytes(move.weights)))
    sent, needed = (sum(getattr(move, name) for move in moves) for name in ("sent", "needed"))
    ratio = f", {sent / needed:.3f} times what ranks need and do not hold" if needed else ""
    lines += ["", *columns(body, right=tuple(range(7))), "", f"{format_bytes(sent)} sent{ratio}"]
    return [*lines, "", f"Order of messages: {verdict.text}", *(f"    {text}" for text in verdict.details)]


def relayout_as_json(moves: list[RankMove], verdict: Verdict) -> dict[str, Any]:
    """Return a rehearsed move as a JSON object, for `--json`: "ranks", each one's bytes, and "order", the verdict."""
    order = {"verdict": verdict.text, "safe": verdict.safe, "concerned": verdict.details}
    return {"ranks": [{"rank": rank} | asdict(move) for rank, move in enumerate(moves)], "order": order}
