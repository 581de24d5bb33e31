"""Repeat a step whose numbers are not finite, checking every module: where did it begin, and on which rank and samples?

Under every mapping a microbatch goes through the layers in the same order. So the first finding of all ranks is that of
the earliest microbatch in the earliest layer, forward before backward; within a layer, all ranks run the same modules.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from titanmoe.config import ConfigError
from titanmoe.config.schema import Compile, Data, Model
from titanmoe.data.batch import Batch
from titanmoe.data.loader import Loader
from titanmoe.data.shards import is_shards
from titanmoe.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from titanmoe.observe import Observer, listening
from titanmoe.train.gradients import Gradients, StepWork, Sums
from titanmoe.watch.bit_checks import first_few

TEXT = 60
"""Characters of a sample that a message shows."""


class CheckedTensor(NamedTuple):
    """A tensor that was checked."""

    backward: bool
    module: str
    microbatch: Tensor
    bad: Tensor
    """How many of its numbers are not finite."""
    numbers: int
    rows_B: Tensor | None
    """Which samples of the microbatch have such numbers, if the tensor has a row per sample."""
    weight: bool = False
    """Whether it is a weight's gradient, before it is summed over ranks; `module` is the weight's name."""


class FirstNotFinite(NamedTuple):
    """The first tensor of a rank that is not finite. The fields are in the order in which ranks are compared."""

    backward: bool
    microbatch: int
    layer: int
    nth: int
    """Its index among the notes of this layer and microbatch."""
    module: str
    bad: int
    numbers: int
    samples: dict[int, str]
    """The beginning of the text, by number in the run."""
    weight: bool


class Trace(Observer):
    def __init__(self, gradients: Gradients, loader: Loader, compilation: Compile, model: Model, data: Data):
        self.passes, self.loader, self.data = gradients, loader, data
        self.compiled, self.layers = compilation.enable, model.num_layers
        self.notes = list[CheckedTensor]()
        self.weights: dict[int, Any] = {}
        """The hooks on those that have been used, by id."""
        self.gradient_counts: Counter[str] = Counter()
        """How many each weight has received: one for each microbatch whose backward has reached it."""
        self.thread = threading.local()  # two microbatches that take turns have a thread each
        self.names = {module: name for part in gradients.stages for name, module in part.named_modules()}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.passes.stages:
                for name, module in part.named_modules():
                    hook = part.register_forward_pre_hook(self._set_microbatch, with_kwargs=True) if not name else None
                    hook = hook or module.register_forward_hook(partial(self._check_module, name))
                    stack.callback(hook.remove)
                    # Only then has FSDP put in the whole weights, from which gradients flow.
                    stack.callback(module.register_forward_pre_hook(partial(self._hook_weights, name)).remove)
            stack.enter_context(listening(self))
            try:
                yield
            finally:
                for hook in self.weights.values():
                    hook.remove()

    def products(self, experts: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """A hook on the experts would see what is already on its way back."""
        self._check_module(self.names[experts], experts, inputs, output)

    def _set_microbatch(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.thread.microbatch = (kwargs["tokens"] if "tokens" in kwargs else args[1]).microbatch

    def _hook_weights(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        for short, weight in module.named_parameters(recurse=False):
            if weight.requires_grad and id(weight) not in self.weights:
                full_name = f"{name}.{short}" if name else short
                self.weights[id(weight)] = weight.register_hook(partial(self._check_gradient, full_name))

    @torch.no_grad()
    def _check_gradient(self, name: str, grad: Tensor) -> None:
        not_finite = (grad.to_local() if isinstance(grad, DTensor) else grad).isfinite().logical_not()
        microbatch = torch.tensor(self.gradient_counts[name])
        self.gradient_counts[name] += 1
        self.notes.append(
            CheckedTensor(True, name, microbatch, not_finite.sum(), not_finite.numel(), None, weight=True)
        )

    def _check_module(self, name: str, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        microbatch = getattr(self.thread, "microbatch", None)
        if microbatch is None:  # recomputed in one of autograd's threads: its first run was checked
            return
        for x in _numbers(out):
            self._check_tensor(False, name, microbatch, x)
        for x in _numbers(args):
            if x.requires_grad:
                x.register_hook(partial(self._check_tensor, True, name, microbatch))

    @torch.no_grad()
    def _check_tensor(self, backward: bool, name: str, microbatch: Tensor, x: Tensor) -> None:
        not_finite = x.isfinite().logical_not()
        rows_B = not_finite.flatten(1).any(1) if x.dim() == 3 and len(x) == len(self.batches[0].tokens_BS) else None
        self.notes.append(CheckedTensor(backward, name, microbatch, not_finite.sum(), x.numel(), rows_B))

    def run(self, work: StepWork) -> Sums:
        self.batches = work.batches
        with torch.compiler.set_stance("force_eager") if self.compiled else nullcontext(), self.hooked():
            return self.passes.sums(work)

    def earliest(self) -> FirstNotFinite | None:
        """What this rank saw first."""
        nth: Counter[tuple[bool, int, int]] = Counter()
        findings: list[tuple[tuple[bool, int, int, int], CheckedTensor]] = []
        for note in self.notes:
            key = note.backward, int(note.microbatch), self._layer(note.module) * (-1 if note.backward else 1)
            if int(note.bad):
                findings.append(((*key, nth[key]), note))
            nth[key] += 1
        if not findings:
            return None
        key, note = min(findings, key=lambda entry: entry[0])
        # If its rows are not samples, the next tensor of this layer with a row per sample shows which ones are
        # affected.
        rows = [n.rows_B for other_key, n in sorted(findings, key=lambda entry: entry[0]) if other_key[:3] == key[:3]]
        sample_rows = [rows_B for rows_B in rows if rows_B is not None]
        return FirstNotFinite(
            *key, note.module, int(note.bad), note.numbers, self._samples(key[1], sample_rows[:1]), note.weight
        )

    def _layer(self, module: str) -> int:
        kind, _, rest = module.partition(".")
        return int(rest.partition(".")[0]) if kind == "layers" else -1 if kind == "embed" else self.layers

    def _samples(self, microbatch: int, rows: list[Tensor]) -> dict[int, str]:
        numbers = list(self.loader.identify(self.batches))
        batch, decode = self.batches[microbatch], decoder(self.data)
        size = len(batch.tokens_BS)
        indices = rows[0].nonzero().flatten().tolist() if rows else []
        return {numbers[microbatch * size + row]: beginning_of_text(batch, row, decode) for row in indices}


def _numbers(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]


def decoder(data: Data) -> Tokenizer | None:
    """The tokenizer of the run's text, if the config names it. Only token shards know theirs."""
    if data.source == "synthetic" or any(is_shards(Path(entry).expanduser()) for entry in data.paths):
        return None
    try:
        return open_tokenizer(data.tokenizer) if data.source == "files" else ByteTokenizer()
    except ConfigError:  # it may be gone, and the numbers are named all the same
        return None


def beginning_of_text(batch: Batch, row: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    return " ".join(tokenizer.decode(batch.tokens_BS[row, :TEXT].tolist()).split())[:TEXT]


def first_not_finite(trace: Trace, work: StepWork) -> tuple[Sums, str]:
    """The sums of a second pass, whose gradients replace those of the first, and what it found first.

    All ranks call it together.
    """
    trace.passes.drop()
    sums = trace.run(work)
    first_by_rank: list[FirstNotFinite | None] = [None] * dist.get_world_size()
    dist.all_gather_object(first_by_rank, trace.earliest())
    return sums, describe(first_by_rank)


def describe(first_by_rank: list[FirstNotFinite | None]) -> str:
    firsts = {rank: first for rank, first in enumerate(first_by_rank) if first}
    if not firsts:
        return "a second forward and backward is finite in every module on all ranks"
    earliest = min(first[:4] for first in firsts.values())
    ranks = [rank for rank, first in firsts.items() if first[:4] == earliest]
    first = firsts[ranks[0]]
    kind = "gradient that leaves the backward" if first.backward else "output"
    kind = "gradient" if first.weight else kind
    same_place = [other for other in firsts.values() if other[:3] == earliest[:3]]
    samples = {number: text for other in same_place for number, text in other.samples.items()}
    sample_texts = [f"{number} ({text!r})" if text else str(number) for number, text in sorted(samples.items())]
    return (
        f"first not finite: the {kind} of {first.module or 'the stage'}, microbatch {first.microbatch}, on rank"
        f"{'s' * (len(ranks) > 1)} {first_few(ranks)} ({first.bad:,} of {first.numbers:,} numbers)"
        + (f"; sample{'s' * (len(sample_texts) > 1)} {first_few(sample_texts)} of the run" if sample_texts else "")
    )
