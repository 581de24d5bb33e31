"""Find the first NaN or infinity of a step (`[debug] culprit`): its module, rank, microbatch and samples.

The step's forward and backward are repeated with hooks that check the outputs and gradients of every module. Under
every mapping a microbatch goes through the layers in the same order. So the first non-finite tensor of all ranks is
one of a forward if there is any, else of a backward: that of the earliest microbatch in the earliest layer; within a
layer, all ranks run the same modules.

Shapes: B samples, S positions.
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

from titanmoe.checkpoint.on_all_ranks import on_all_ranks
from titanmoe.config import ConfigError
from titanmoe.config.schema import Compile, Data, Model
from titanmoe.data.batch import Batch
from titanmoe.data.loader import Loader
from titanmoe.data.token_shards import is_shards
from titanmoe.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from titanmoe.observe import Observer, listening
from titanmoe.train.gradients import Gradients, StepSums, StepWork
from titanmoe.watch.bit_checks import first_few

SHOWN_CHARACTERS = 60
"""The number of characters of a sample that a message shows."""


class CheckedTensor(NamedTuple):
    """The count of NaNs and infinities in one tensor of a module, on the device until the host reads it."""

    backward: bool
    module: str
    microbatch: Tensor
    bad: Tensor
    """The count of elements that are not finite."""
    numbers: int
    """The count of all elements."""
    rows_B: Tensor | None
    """Whether each sample of the microbatch has non-finite elements; None if the tensor has no dimension of samples."""
    weight: bool = False
    """Whether the tensor is a weight's gradient, before it is summed over ranks; `module` is the weight's name."""


class FirstNonFinite(NamedTuple):
    """The first tensor of a rank that is not finite.

    Ranks are compared by the first four fields, the smallest first.
    """

    backward: bool
    microbatch: int
    layer: int
    """The layer, as `_layer` returns it; negated in backward, so that later layers come first."""
    nth: int
    """The index of the tensor among the checked tensors of this layer and microbatch."""
    module: str
    bad: int
    numbers: int
    samples: dict[int, str]
    """The beginning of each affected sample's text, by the sample's index in the training data."""
    weight: bool


class NonFiniteTrace(Observer):
    """Observer that repeats a step with hooks on all modules, to count NaNs and infinities in outputs and gradients."""

    def __init__(self, gradients: Gradients, loader: Loader, compilation: Compile, model: Model, data: Data):
        self.passes, self.loader, self.data = gradients, loader, data
        self.compiled, self.layers = compilation.enable, model.num_layers
        self.checked = list[CheckedTensor]()
        """All checks so far, in order."""
        self.weight_hooks: dict[int, Any] = {}
        """Gradient hooks, by the id of the weight."""
        self.gradient_counts: Counter[str] = Counter()
        """The number of gradients that each weight has received: one for each microbatch."""
        self.thread = threading.local()  # overlapped microbatches have a thread each
        self.names = {module: name for stage in gradients.stages for name, module in stage.named_modules()}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Register the checking hooks on all modules, and this object as observer; remove them at the end."""
        with ExitStack() as stack:
            for stage in self.passes.stages:
                for name, module in stage.named_modules():
                    if name:
                        hook = module.register_forward_hook(partial(self._check_module, name))
                    else:
                        hook = stage.register_forward_pre_hook(self._set_microbatch, with_kwargs=True)
                    stack.callback(hook.remove)
                    # Just before a module's forward FSDP has set its unsharded weights, which receive the gradients.
                    stack.callback(module.register_forward_pre_hook(partial(self._hook_weights, name)).remove)
            stack.enter_context(listening(self))
            try:
                yield
            finally:
                for hook in self.weight_hooks.values():
                    hook.remove()

    def products(self, experts: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Count NaNs and infinities in the outputs of a layer's experts, and later in the gradients of their inputs.

        Called as an observer.
        """
        self._check_module(self.names[experts], experts, inputs, output)

    def _set_microbatch(self, stage: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.thread.microbatch = (kwargs["tokens"] if "tokens" in kwargs else args[1]).microbatch

    def _hook_weights(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        for short, weight in module.named_parameters(recurse=False):
            if weight.requires_grad and id(weight) not in self.weight_hooks:
                full_name = f"{name}.{short}" if name else short
                self.weight_hooks[id(weight)] = weight.register_hook(partial(self._check_gradient, full_name))

    def _check_gradient(self, name: str, grad: Tensor) -> None:
        microbatch = torch.tensor(self.gradient_counts[name])
        self.gradient_counts[name] += 1
        self._check_tensor(True, name, microbatch, grad.to_local() if isinstance(grad, DTensor) else grad, weight=True)

    def _check_module(self, name: str, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        microbatch = getattr(self.thread, "microbatch", None)
        if microbatch is None:  # recomputed in one of autograd's threads: the original forward was checked
            return
        for x in _float_tensors(out):
            self._check_tensor(False, name, microbatch, x)
        for x in _float_tensors(args):
            if x.requires_grad:
                x.register_hook(partial(self._check_tensor, True, name, microbatch))

    @torch.no_grad()
    def _check_tensor(self, backward: bool, name: str, microbatch: Tensor, x: Tensor, weight: bool = False) -> None:
        not_finite = x.isfinite().logical_not()
        has_samples = not weight and x.dim() == 3 and len(x) == len(self.batches[0].tokens_BS)
        rows_B = not_finite.flatten(1).any(1) if has_samples else None
        self.checked.append(
            CheckedTensor(backward, name, microbatch, not_finite.sum(), x.numel(), rows_B, weight=weight)
        )

    def run(self, work: StepWork) -> StepSums:
        """Run the step's forward and backward, uncompiled and checked, and return the step's sums.

        Adds the checks to `checked`. Gradients are summed over ranks in `.grad`, which must be None before. Collective
        over the world.
        """
        self.batches = work.batches
        with torch.compiler.set_stance("force_eager") if self.compiled else nullcontext(), self.hooked():
            return self.passes.sums(work)

    def earliest(self) -> FirstNonFinite | None:
        """Return the first non-finite tensor of this rank, None if all are finite. The host waits for the device.

        All of forward count as earlier than those of backward, then a lower microbatch, then a layer that runs earlier.
        """
        nth: Counter[tuple[bool, int, int]] = Counter()
        findings: list[tuple[tuple[bool, int, int, int], CheckedTensor]] = []
        for checked in self.checked:
            layer = self._layer(checked.module)
            key = checked.backward, int(checked.microbatch), -layer if checked.backward else layer
            if int(checked.bad):
                findings.append(((*key, nth[key]), checked))
            nth[key] += 1
        if not findings:
            return None
        findings.sort(key=lambda entry: entry[0])
        key, first = findings[0]
        # If it has no dimension of samples, the next tensor of this layer that has one shows which are affected.
        of_layer = [checked.rows_B for other, checked in findings if other[:3] == key[:3]]
        rows_B = next((rows_B for rows_B in of_layer if rows_B is not None), None)
        samples = {} if rows_B is None else self._samples(key[1], rows_B)
        return FirstNonFinite(*key, first.module, int(first.bad), first.numbers, samples, first.weight)

    def _layer(self, module: str) -> int:
        """Return a module's layer: -1 for the embedding, the number of layers for modules after the last one."""
        kind, _, rest = module.partition(".")
        return int(rest.partition(".")[0]) if kind == "layers" else -1 if kind == "embed" else self.layers

    def _samples(self, microbatch: int, rows_B: Tensor) -> dict[int, str]:
        numbers = list(self.loader.digest_samples(self.batches))
        batch, decode = self.batches[microbatch], text_tokenizer(self.data)
        indices = (microbatch * len(rows_B) + rows_B.nonzero()).flatten().tolist()
        return {numbers[i]: beginning_of_text(batch, i % len(rows_B), decode) for i in indices}


def _float_tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]


def text_tokenizer(data: Data) -> Tokenizer | None:
    """Return the tokenizer that decodes samples for a message; None for synthetic data and token shards.

    None also if the tokenizer's files are gone. For data.source = "stdlib" it is the byte tokenizer.
    """
    if data.source == "synthetic" or any(is_shards(Path(entry).expanduser()) for entry in data.paths):
        return None
    try:
        return open_tokenizer(data.tokenizer) if data.source == "files" else ByteTokenizer()
    except ConfigError:  # the tokenizer may be gone: the samples' indices are reported all the same
        return None


def beginning_of_text(batch: Batch, row: int, tokenizer: Tokenizer | None) -> str:
    """Return the first `SHOWN_CHARACTERS` characters of sample `row` of the batch, on one line.

    "" without a tokenizer.
    """
    if tokenizer is None:
        return ""
    return " ".join(tokenizer.decode(batch.tokens_BS[row, :SHOWN_CHARACTERS].tolist()).split())[:SHOWN_CHARACTERS]


def find_first_nonfinite(trace: NonFiniteTrace, work: StepWork) -> tuple[StepSums, str]:
    """Repeat a step's forward and backward with checks, to find the first NaN or infinity on any rank.

    Collective over the world. The gradients of this pass replace those of the first. The trace must not have run yet.

    Returns:
        The sums of this pass, and a text that names module, microbatch, rank and samples of the first non-finite
        tensor, or says that this time all are finite.
    """
    trace.passes.drop()
    sums = trace.run(work)
    return sums, describe_first_nonfinite(on_all_ranks(dist.group.WORLD, trace.earliest))


def describe_first_nonfinite(first_by_rank: list[FirstNonFinite | None]) -> str:
    """Return a text that names the first non-finite tensor of all ranks, its ranks, and its samples.

    `first_by_rank` has that of each rank, None where all are finite. If no rank has one, the text says that the second
    pass is finite.
    """
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
