"""The oracle: a mapping's loss, gradients, norm and stepped weights against the plain model in tests/reference.py.

`measure` runs on every rank of a pool and calls what train.py calls: a recipe is read, checked and resolved, a Trainer
is built from it and takes two steps. Only the samples are the test's own: they have padding and labels without loss.
`changes` are recipe keys in place of TINY's. T tokens, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests import reference, world
from tests.support import blame, emulated_deep_ep, unwritten_rows  # noqa: F401 (what importing them changes)
from tests.support.parity_errors import NUMERICS, TOLERANCE, compare, nan_to_inf, relative_error, tolerance, worst_error
from titanmoe.config.command_line import to_words
from titanmoe.config.schema import Config
from titanmoe.data.batch import COMPLETION, PAIRS, REFERENCE, WEIGHT, Batch
from titanmoe.data.loader import Loader
from titanmoe.fold.degrees import Fold, derive
from titanmoe.moe.balance_losses.balance_spec import active_losses
from titanmoe.observe import Observer, listening
from titanmoe.ops import counter_rng
from titanmoe.tokens import IGNORE

STEPS = 2
# A model small enough for hundreds of mappings, with every degree of 8 ranks legal: 8 heads, 8 key heads, 8 experts.
TINY: dict[str, Any] = {
    "model.family": "mixtral",
    "model.size": "debug",
    "model.vocab_size": 48,
    "model.dim": 16,
    "model.num_layers": 2,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.head_dim": 4,
    "model.num_experts": 8,
    "model.top_k": 2,
    "model.expert_hidden": 16,
    "model.init_std": 0.2,
    "training.dtype": "float64",
    "training.mixed_precision_param": "float64",
    "training.mixed_precision_reduce": "float64",
    "training.seq_len": 16,
    "training.local_batch_size": 1,
    "training.global_batch_size": 4,
    "training.steps": 10,
    "training.device": "cpu",
    "optimizer.max_grad_norm": 0.5,
    "optimizer.lr": 0.01,
    # AdamW turns the rounding of gradients far below eps into whole steps; so few of them are.
    "optimizer.eps": 1e-4,
    "lr_schedule.warmup_steps": 1,
    "metrics.tensorboard": False,
    "checkpoint.enable": False,
    "validation.interval": 0,
}
SAVING = TINY | {
    "data.source": "synthetic",
    "checkpoint.enable": True,
    "checkpoint.interval": 1,
    "checkpoint.save": "sync",
    "metrics.console": "lines",
    "job.name": "run",
}
"""A run that saves every step."""


def arguments(changes: dict[str, Any]) -> list[str]:
    """Return recipe keys and values as words of a command line."""
    words = []
    for key, value in changes.items():
        words += to_words({f"{key}.{n}": x for n, x in value.items()} if isinstance(value, dict) else {key: value})
    return words


@functools.cache
def _read(argv: tuple[str, ...], size: int) -> Config:
    from titanmoe.components import COMPONENTS
    from titanmoe.train.launch import read_config

    return read_config(list(argv), size, COMPONENTS)


def read(changes: dict[str, Any], size: int) -> Config:
    return _read(tuple(arguments(TINY | changes)), size)


def sample(config: Config, number: int, clean: bool = False) -> Batch:
    """Return the sample of a global number: random tokens, padding at the end of some, labels without loss.

    It begins with five equal tokens: as long as they see nothing else, they stay equal in every layer. Number 3 is all
    padding. A `clean` one has neither padding nor labels without loss.
    """
    length = config.training.seq_len
    ids = counter_rng.bits(counter_rng.key("sample", config.training.seed), number * 1000 + torch.arange(length + 1))
    ids = ids % config.model.vocab_size
    ids[1:5] = ids[0]
    labels, valid = ids[1:].clone(), torch.ones(length, dtype=torch.bool)
    if not clean:
        labels[number % 3 :: 7] = IGNORE
        end = length if number % 4 == 3 else length - number % 4
        valid[end:] = False
        if number == 3:
            valid[:] = False
        labels[~valid] = IGNORE
    return Batch(ids[:-1], labels, valid)


def batch(config: Config, numbers: list[int], documents: bool = False) -> Batch:
    """Return a batch of the samples with these numbers.

    With `documents`, samples have documents of 1 to 7 tokens, starting with the sample's first, with shuffled
    positions: RoPE only depends on distances, so ordinary positions would give the right numbers even if they never
    reached it.
    """
    tokens, labels, valid, *_ = zip(*(sample(config, n) for n in numbers), strict=True)
    length = config.training.seq_len
    document = position = None
    tokens, labels = torch.stack(tokens), torch.stack(labels)
    if documents:
        document = torch.stack([torch.arange(length) // (1 + 3 * n % 7) for n in numbers])
        position = torch.stack([(torch.arange(length) * (7 + 2 * n)) % (length + 3) for n in numbers])
        begins = document.diff(dim=1, prepend=document.new_full((len(numbers), 1), -1)) > 0
        tokens = tokens.where(~begins, tokens[:, :1])
    extra_fields = {WEIGHT: torch.stack([weight(config, n) for n in numbers])} if config.data.label_weights else {}
    if config.training.objective == "dpo":
        extra_fields |= pairs(numbers, document, labels)
    return Batch(tokens, labels, torch.stack(valid), document, position, extra_fields=extra_fields)


def pairs(numbers: list[int], document: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the fields of samples' documents as pairs of completions, and what a reference might say of their labels.

    The last document of an odd number loses its labels, in place.
    """
    count, length = (document.max(1).values + 1) // 2, document.shape[1]
    labels[document >= 2 * count.unsqueeze(1)] = IGNORE
    reference = torch.stack([-(torch.arange(length) * (3 + n) % 7).double() for n in numbers])
    return {COMPLETION: document.where(labels != IGNORE, 0), PAIRS: count, REFERENCE: reference}


def weight(config: Config, number: int) -> torch.Tensor:
    """Return the weight of each label of a sample; a sixth of them are 0."""
    return (torch.arange(config.training.seq_len) * (3 + number) % 6).float() / 4


def grouped(config: Config, dp: int, step: int, documents: bool = False) -> list[list[Batch]]:
    """Return the microbatches of a step (from 0): by index, then by data rank."""
    size, total = config.training.local_batch_size, config.training.global_batch_size
    return [
        [batch(config, [step * total + (m * dp + d) * size + b for b in range(size)], documents) for d in range(dp)]
        for m in range(total // (size * dp))
    ]


class Samples:
    """Stand-in for a run's loader, over the test's samples."""

    mix = SimpleNamespace(tokenizer=None)

    def __init__(self, config: Config, rank: int, ranks: int, documents: bool):
        self.config, self.rank, self.ranks, self.documents, self.step = config, rank, ranks, documents, 0
        self.global_batch_size = config.training.global_batch_size
        self.microbatches = self.global_batch_size // (config.training.local_batch_size * ranks)

    def peek(self) -> list[Batch]:
        return [row[self.rank] for row in grouped(self.config, self.ranks, self.step, self.documents)]

    def next_step(self) -> list[Batch]:
        batches = self.peek()
        self.step += 1
        return batches


class NaNPositions(Loader):
    """Loader whose positions are NaN from step 2 on, and so is everything that attention computes from them."""

    def next_step(self) -> list[Batch]:
        batches = super().next_step()
        if self.consumed == self.global_batch_size:
            return batches
        return [batch._replace(position_BS=torch.full(batch.tokens_BS.shape, torch.nan)) for batch in batches]


@dataclasses.dataclass
class Outcome:
    loss: list[float]
    norm: list[float]
    reports: list[dict[str, float]]
    grads: dict[str, torch.Tensor]  # of the first step, whole
    weights: dict[str, torch.Tensor]  # after the last step, whole
    bias: dict[str, torch.Tensor]


def whole(
    pieces: dict[str, Any], rank: int, fold: Fold, places: dict[str, blame.HeldShard] | None = None
) -> dict[str, torch.Tensor]:
    """Return full tensors from every rank's shards, on rank 0; {} on others. Replicas must be equal, up to rounding.

    Collective over the world. `places` says where this rank's shards are, None to find that out.
    """
    mine, places = {}, places or blame.describe_shards(pieces)
    for name, tensor in pieces.items():
        part = tensor.detach()
        part = part.to_local() if isinstance(part, DTensor) else part
        assert part.shape == places[name].shape, f"{name}: a piece of {part.shape}, in a place of {places[name].shape}"
        part = part.float() if part.dtype == torch.bfloat16 else part  # numpy has no bfloat16
        mine[name] = (part.numpy(), places[name], tuple(tensor.shape))  # a tensor takes ten times as long to pickle
    gathered = [None] * dist.get_world_size() if rank == 0 else []
    dist.gather_object(mine, gathered or None)
    parts = [{name: (torch.from_numpy(array), one) for name, (array, one, _) in mine.items()} for mine in gathered]
    apart = [blame.describe_wrong_replicas(fold, parts, 1e-12)]
    dist.broadcast_object_list(apart)  # a rank that did not know would wait for those that fail
    assert not apart[0], apart[0]
    if rank:
        return {}
    shapes = {name: shape for mine in gathered for name, (_, _, shape) in mine.items()}
    out, seen = {}, {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}
    for theirs in parts:
        for name, (part, one) in theirs.items():
            out.setdefault(name, torch.zeros(shapes[name], dtype=part.dtype))[one.place] = part
            seen[name][one.place] = True
    for name, filled in seen.items():
        assert filled.all(), f"{name}: no rank holds {int((~filled).sum())} of {filled.numel()} elements"
    return out


def no_collection(every: int) -> Any:
    """Return a stand-in for GarbageCollection, whose first full collection would be a third of a short test's time."""
    return SimpleNamespace(collect=lambda step: None)


def runtime_here() -> Any:
    """Return the runtime of a pool's rank. The ranks are reused, so the time-outs of their groups must not change."""
    from titanmoe.train.runtime import Runtime

    rank = dist.get_rank()
    return Runtime(rank, rank, dist.get_world_size(), torch.device("cpu"), keep_timeouts=True)


def make_trainer(changes: dict[str, Any], **seams: Any) -> Any:
    """Build the Trainer of a recipe on this rank, with the recipe's own data unless a loader is given."""
    runtime = runtime_here()
    return build_trainer(read(changes, runtime.world), runtime, **{"garbage": no_collection} | seams)


def build_trainer(config: Config, runtime: Any, **seams: Any) -> Any:
    from titanmoe.train.build import build_training
    from titanmoe.train.trainer import Trainer

    return Trainer(build_training(config, runtime, **seams))


def samples(documents: bool = False) -> Callable[[Config, int, int], Samples]:
    """Return the maker of `Samples`, for `loader`."""
    return functools.partial(Samples, documents=documents)


B_STD = 0.2
"""Standard deviation of adapters' B as runs begin here: at 0, as they are made, A has no gradient."""


def initial_weights(config: Config) -> dict[str, torch.Tensor]:
    """Return the initial weights of the plain model: with random A and B, if it has adapters."""
    seed = config.training.seed
    return reference.initial_weights(config.model, seed) | reference.initial_adapters(config, seed, b=B_STD)


def random_b(trainer: Any) -> None:
    """Set the adapters' B of a run of seed 0 to those of `initial_weights`, in place."""
    from titanmoe.parallel.materialize import fill_normal, local_shard

    for name, parameter in trainer.training.parameters.items():
        if name.endswith("lora_B"):
            part, offset = local_shard(parameter.detach())
            fill_normal(part, offset, parameter.shape, counter_rng.key("weight", 0, name), B_STD)


Choices = dict[int, torch.Tensor]
"""By layer: experts of each token of a step, by its global index."""


@contextmanager
def frozen(choices: Choices | None) -> Iterator[None]:
    """Let every router on this rank make these choices within this context, whatever its scores; None: its own."""
    from titanmoe.moe.router import Router

    def choose(self: Router, scores_TE: torch.Tensor, index_T: torch.Tensor) -> torch.Tensor:
        return choices[self.layer][index_T]

    with mock.patch.object(Router, "_choose", choose) if choices else nullcontext():
        yield


def one_step(trainer: Any) -> dict[str, Any]:
    return trainer.train_step()


def measure(
    changes: dict[str, Any],
    documents: bool = False,
    fault: str = "",
    steps: int = STEPS,
    choices: Choices | None = None,
    prepare: Callable[[Any], None] = lambda trainer: None,
    train_step: Callable[[Any], dict[str, Any]] = one_step,
) -> Outcome | None:
    """Run steps of a recipe on this rank; return what they gave on rank 0, None on others. Collective over the world.

    Args:
        changes: recipe keys.
        documents: whether samples have several documents.
        fault: name of a planted fault; "" for none.
        steps: number of steps.
        choices: experts that every router is made to choose; None for its own.
        prepare: called with the Trainer before its first step.
        train_step: runs one step of it.
    """
    from tests.support import planted_faults

    config, rank = read(changes, dist.get_world_size()), dist.get_rank()
    undo = planted_faults.FAULTS[fault]() if fault else lambda: None
    grads: list[dict[str, torch.Tensor]] = []

    class Capture(Observer):
        def gradients(self, step: int, work: Any, parameters: dict[str, Any]) -> None:
            if step == 1:
                missing = [name for name, p in parameters.items() if p.grad is None]
                assert not missing, f"no gradient at all: {missing}"
                grads.append(whole({name: p.grad for name, p in parameters.items()}, rank, parts.fold, places))

    try:
        trainer = make_trainer(changes, loader=samples(documents))
        parts = trainer.training
        places = blame.describe_shards(parts.parameters)
        prepare(trainer)
        with frozen(choices), listening(Capture()):
            reports = [train_step(trainer) for _ in range(steps)]
        weights = whole(parts.parameters, rank, parts.fold, places)
        buffers = [item for part in parts.stages for item in part.named_buffers()]
        bias = {name: buffer.clone() for name, buffer in buffers if name.endswith("expert_bias")}
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, bias)
    finally:
        undo()
        if config.compile.enable:
            torch._dynamo.reset()  # or the graphs of earlier cases would count towards its limit for a function
    if rank:
        return None
    for copy in ("head.weight",) * config.model.tie_embeddings + ("embed_copy.weight",):
        for tensors in (grads[0], weights):
            if copy in tensors:  # the two ends of a pipeline have one matrix
                assert torch.equal(tensors.pop(copy), tensors["embed.weight"]), "copies of the embedding differ"
    return Outcome(
        [r["loss"] for r in reports],
        [r["grad_norm"] for r in reports],
        reports,
        grads[0],
        weights,
        {name: value for part in everyone for name, value in part.items()},
    )


def train(argv: list[str]) -> None:
    """Do on this rank what train.py does once it has joined the others."""
    from titanmoe.components import COMPONENTS
    from titanmoe.train.launch import read_config

    runtime = runtime_here()
    build_trainer(read_config(argv, runtime.world, COMPONENTS), runtime).train()


def places(changes: dict[str, Any]) -> dict[str, blame.HeldShard]:
    """Return where this rank's shards of the parameters are, by name."""
    return blame.describe_shards(make_trainer(changes, loader=samples()).training.parameters)


# What may change speed and memory but no number: the reference is computed without it, once.
NEUTRAL = (
    "parallelism.",
    "pipeline.",
    "activation_checkpoint.",
    "compile.",
    "moe.dispatcher",
    "moe.overlap",
    "moe.symm_mem_factor",
    "moe.pad_to_capacity",
    "moe.grouped_mm",
    "moe.kernels",
    "moe.accumulate_weight_gradients",
)


def owners(config: Config) -> list[int]:
    """Return which rank of a sequence owns each position: its cp rank's chunks side by side, divided over tp."""
    fold, length = config.parallelism, config.training.seq_len
    chunk = length // (2 * fold.cp) if fold.cp > 1 and fold.cp_placement == "zigzag" else length // fold.cp
    place: dict[int, int] = {}
    out = []
    for position in range(length):
        number = position // chunk
        rank = min(number, 2 * fold.cp - 1 - number) if chunk * fold.cp < length else number
        place[rank] = place.get(rank, -1) + 1
        out.append(rank * fold.tp + place[rank] // (length // (fold.cp * fold.tp)))
    return out


@functools.cache
def _expected(
    argv: tuple[str, ...], dp: int, owner: tuple[int, ...] | None, documents: bool, steps: int
) -> reference.Run:
    config = _read(argv, 1)
    batches = [grouped(config, dp, step, documents) for step in range(steps)]
    return reference.train(config, initial_weights(config), batches, owner or 1)


def expected(changes: dict[str, Any], size: int, documents: bool = False, steps: int = STEPS) -> reference.Run:
    """Return the plain model's steps. Mappings that must agree share one result.

    dp and owners enter only where they may.
    """
    config = read(changes, size)
    moe, fold = config.moe, config.parallelism
    sub_sequence = moe.capacity_factor > 0 and moe.capacity_scope == "sub_sequence"
    grouping = sub_sequence or any(term.spec.by_microbatch for term in active_losses(moe))
    neutral = {key: value for key, value in (TINY | changes).items() if not key.startswith(NEUTRAL)}
    neutral |= dict.fromkeys(NUMERICS, "float64")
    dp = fold.dp_replicate * fold.dp_shard if grouping else 1
    return _expected(tuple(arguments(neutral)), dp, tuple(owners(config)) if sub_sequence else None, documents, steps)


class OutsideTolerance(AssertionError):
    """Error of a mapping that disagrees with the plain model. `errors` are all of its errors, by what was compared."""

    def __init__(self, message: str, errors: dict[str, float]):
        super().__init__(message)
        self.errors = errors


def check(
    size: int,
    changes: dict[str, Any],
    documents: bool = False,
    fault: str = "",
    timeout: float = 120,
    steps: int = STEPS,
    freeze: bool = False,
    prepare: Callable[[Any], None] = random_b,
    train_step: Callable[[Any], dict[str, Any]] = one_step,
) -> dict[str, float]:
    """Return a mapping's errors. Raise OutsideTolerance unless it agrees with the plain model.

    With `freeze`, run one step with the plain model's choices of experts. Other parameters are those of `measure`.
    """
    config, allowed = read(changes, size), tolerance(read(changes, size))
    want = expected(changes, size, documents, 1 if freeze else steps)
    choices = want.steps[0].chosen if freeze else None
    how = documents, fault, len(want.steps), choices, prepare, train_step
    got = world.run(size, measure, changes, *how, timeout=timeout)[0]
    if not freeze:
        margin, least = min(min(step.margin, step.drop_margin) for step in want.steps), max(1e-9, allowed)
        assert margin > least, f"the data leaves routing to rounding: margin {margin}, for errors of {allowed}"
    errors = compare(got, want, config)
    if allowed >= TOLERANCE["float32"]:
        errors.pop("weights")  # AdamW's first steps turn rounding of tiny gradients into whole steps
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= allowed:
        raise OutsideTolerance(
            f"{worst} is off by {errors[worst]:.2e}; {errors}; {changes}; of gradients, "
            + blame.describe_wrong_gradients(
                derive(size, config.parallelism),
                world.run(size, places, changes),
                got.grads,
                want.steps[0].grads,
                allowed,
            ),
            errors,
        )
    return errors


def preset_of(family: str, size: str = "debug") -> dict[str, Any]:
    from titanmoe.models.families import preset

    return dataclasses.asdict(dataclasses.replace(Config().model, **preset(family, size)))


def biased(changes: dict[str, Any], bias: list[float]) -> Outcome | None:
    """Return the result of a step of `measure` with every router's selection bias set."""

    def set_bias(trainer: Any) -> None:
        for moe in trainer.training.moe_layers.values():
            moe.router.expert_bias.copy_(torch.tensor(bias))

    return measure(changes, steps=1, prepare=set_bias)


def check_biased(size: int, changes: dict[str, Any], bias: list[float]) -> dict[str, float]:
    """Return errors of a step with the routers' choice forced; AssertionError if it disagrees with the plain model.

    `deserted` is the largest gradient of an expert that nothing chose.
    """
    got = world.run(size, biased, changes, bias)[0]
    config = read(changes, size)
    weights = reference.initial_weights(config.model, config.training.seed, torch.float64)
    given = {name: torch.tensor(bias) for name in reference.initial_bias(config.model)}
    want = reference.step(config, weights, grouped(config, 1, 0), 1, given)
    idle = [e for e in range(config.model.num_experts) if all(count[e] == 0 for count in want.counts.values())]
    assert idle, "every expert has tokens"
    errors = {"grads": worst_error(got.grads, want.grads)[0], "loss": relative_error(got.loss[0], want.loss)}
    assert max(errors.values()) <= TOLERANCE["float64"], errors
    of_experts = [g[idle] for name, g in got.grads.items() if ".experts." in name]
    errors["deserted"] = max(nan_to_inf(float(g.abs().max())) for g in of_experts)
    return errors
