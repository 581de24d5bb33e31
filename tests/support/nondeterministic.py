"""Finds operations of a rehearsed step that PyTorch refuses on CUDA under `training.deterministic`.

The table follows the list in the docstring of torch.use_deterministic_algorithms. A rehearsal runs on CPU tensors,
which torch would not refuse, so the conditions treat every tensor as one on CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from titanmoe.rehearse.code_site import CodeSite
from titanmoe.rehearse.operation_costs import Operations, local_tensors

Arguments = dict[str, Any]
"""Arguments of a call by their names in the operation's schema; "returned" is its result."""


def always(_: Arguments) -> bool:
    return True


def sums_fractions(call: Arguments) -> bool:
    (result,) = local_tensors(call["returned"])
    return result.dtype.is_floating_point or result.dtype.is_complex


def returns_indices(call: Arguments) -> bool:
    return len(list(local_tensors(call["returned"]))) == 2


LISTED: dict[str, tuple[str, Callable[[Arguments], bool]]] = {
    "torch.nn.AvgPool3d": ("avg_pool3d_backward", always),
    "torch.nn.AdaptiveAvgPool2d": ("_adaptive_avg_pool2d_backward", always),
    "torch.nn.AdaptiveAvgPool3d": ("_adaptive_avg_pool3d_backward", always),
    "torch.nn.AdaptiveMaxPool2d": ("adaptive_max_pool2d_backward", always),
    "torch.nn.FractionalMaxPool2d": ("fractional_max_pool2d_backward", always),
    "torch.nn.FractionalMaxPool3d": ("fractional_max_pool3d_backward", always),
    "torch.nn.MaxPool3d": ("max_pool3d_with_indices_backward", always),
    "torch.nn.MaxUnpool1d": ("max_unpool2d", always),
    "torch.nn.MaxUnpool2d": ("max_unpool2d", always),
    "torch.nn.MaxUnpool3d": ("max_unpool3d", always),
    "torch.nn.functional.interpolate": (
        "upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward "
        "upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward",
        always,
    ),
    "torch.nn.ReflectionPad1d": ("reflection_pad1d_backward", always),
    "torch.nn.ReflectionPad2d": ("reflection_pad2d_backward", always),
    "torch.nn.ReflectionPad3d": ("reflection_pad3d_backward", always),
    "torch.nn.NLLLoss": ("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward", always),
    "torch.nn.CTCLoss": ("_ctc_loss_backward", always),
    "torch.nn.EmbeddingBag": ("_embedding_bag_dense_backward", lambda call: call["mode"] == 2),  # "max"
    "torch.Tensor.put_": ("put put_", always),
    "torch.histc": ("histc", always),
    "torch.bincount": ("bincount", lambda call: call["weights"] is not None),
    "torch.kthvalue": ("kthvalue", always),
    "torch.median": ("median nanmedian", returns_indices),
    "torch.nn.functional.grid_sample": ("grid_sampler_2d_backward grid_sampler_3d_backward", always),
    "torch.cumsum": ("cumsum cumsum_", sums_fractions),
    "torch.Tensor.scatter_reduce": ("scatter_reduce scatter_reduce_", lambda call: call["reduce"] == "prod"),
    "torch.Tensor.resize_": ("resize_", lambda call: call["self"].is_quantized),
}
"""By name in torch's list: operations of aten in any overload, and the condition under which they are refused."""
OURS = {"titanmoe::route": lambda call: call["count_BE"].dtype.is_floating_point}
"""Triton kernels that add by atomics, which is deterministic for whole numbers."""

CONDITIONS = {
    getattr(torch.ops.aten, name)._qualified_op_name: condition
    for names, condition in LISTED.values()
    for name in names.split()
} | OURS


def names_in_docstring() -> set[str]:
    """Return the names in torch's own list of operations that it refuses, without those of MPS alone."""
    text = torch.use_deterministic_algorithms.__doc__
    _, listed = re.split(r"will throw a\s+:class:`RuntimeError` when ``mode=True``:", text)
    items = re.findall(r"\* :(?:class|func):`([\w.]+)`([^*]*)", listed.partition("In addition")[0])
    return {name for name, condition in items if "an MPS" not in condition}


def cuda_refuses(func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> bool:
    """Return whether PyTorch would refuse a call of an operation on CUDA, under deterministic algorithms.

    `func` is the operation with its overload, `out` its result.
    """
    condition = CONDITIONS.get(func._schema.name)
    if condition is None:
        return False
    schema = func._schema.arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    unset = {argument.name: argument.default_value for argument in schema if argument.name not in given}
    return condition(given | unset | {"returned": out})


@contextmanager
def record_refused() -> Iterator[set[str]]:
    """Return a context whose set has the refused operations of all rehearsals in it, as "OPERATION in FILE"."""
    seen: set[str] = set()
    add = Operations.add

    def add_and_note(
        self: Operations, func: Any, args: tuple, kwargs: dict[str, Any], out: Any, site: CodeSite
    ) -> None:
        if cuda_refuses(func, args, kwargs, out):
            seen.add(f"{func} in {site.file}")
        add(self, func, args, kwargs, out, site)

    with mock.patch.object(Operations, "add", add_and_note):
        yield seen
