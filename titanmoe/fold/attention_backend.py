"""Choice of the attention implementation: torch's where it supports the run, else ours.

`titanmoe.parallel.choose_attention` chooses with `pick_backend`; the laws refuse settings that cannot be followed. The
table of choices is in docs/parallelism.md. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from titanmoe.config.blocks import separates_documents, window
from titanmoe.config.schema import Config, Model

Backend = Literal["plain", "ring", "flex"]
"""Our implementation (for causal attention, torch's scaled_dot_product_attention), torch's ring, flex_attention."""
Kernel = Literal["fa2", "fa3", "fa4", "cudnn"]
WIDEST = {"fa3": 256, "fa4": 128}
"""Widest heads of FlashAttention 3 (by its README) and 4 (its backward on GPUs other than Blackwell)."""
FLEX_NARROWEST = 16
"""Narrowest heads that flex_attention's kernel supports (torch 2.11, _inductor/kernel/flex/flex_attention.py)."""


def pick_backend(
    setting: str,
    cp_kind: str,
    cp: int,
    *,
    device: str,
    masked: bool,
    float64: bool = False,
    sinks: bool = False,
    ring_lacks: str = "",
    narrow: bool = False,
) -> tuple[Backend, str]:
    """Choose the implementation of attention for a run.

    Args:
        setting: parallelism.attention_backend: "auto", "torch" or "plain".
        cp_kind: parallelism.cp_kind: "ring", "allgather" or "ulysses".
        device: "cpu" or "cuda".
        masked: whether attention is limited to documents or a sliding window.
        float64: whether attention computes in float64.
        sinks: whether the model has attention sinks.
        ring_lacks: why the installed torch's ring attention cannot run; "" if it can.
        narrow: whether heads are narrower than FLEX_NARROWEST.

    Returns:
        The implementation, and the reason why none of torch's ring and flex_attention can be used; "" if there is none.
        ("plain", "") is causal attention by torch's scaled_dot_product_attention. With "torch" as the setting "plain"
        can be returned too, which `attention_violations` refuses.
    """
    if setting == "plain":
        return "plain", 'parallelism.attention_backend = "plain"'
    if cp > 1 and cp_kind == "ring":
        if masked:
            return "plain", "torch's ring supports neither documents nor windows"
        if device == "cpu" and setting == "auto":
            return "plain", "on CPUs auto uses ours, which supports masks too"
        if device != "cpu" and float64:
            return "plain", "torch's attention on GPUs has no float64"
        return ("plain", ring_lacks) if ring_lacks else ("ring", "")
    if device == "cpu":
        return "plain", "flex_attention has no backward on CPUs"
    if float64:
        return "plain", "torch's attention on GPUs has no float64"
    if masked or sinks or (cp > 1 and cp_kind == "allgather"):
        if narrow:
            return "plain", f"flex_attention has no heads narrower than {FLEX_NARROWEST}"
        return "flex", ""
    return "plain", ""  # causal alone: that is torch's scaled_dot_product_attention


def cudnn_takes(query: int, value: int) -> bool:
    """Return whether cuDNN's attention supports heads with queries and values of these widths, forward and backward.

    As in torch 2.13, sdp_utils.cpp.
    """
    return query % 8 == value % 8 == 0 and (max(query, value) <= 128 or (query, value) == (192, 128))


def kernel_refuses(kernel: str, query: int, value: int, deterministic: bool) -> str:
    """Return why a kernel for attention cannot train heads of these widths; "" if it can.

    Args:
        kernel: the name of the kernel, such as "fa3"; "fa2" and "auto" are never refused.
        query: elements of a head's query.
        value: elements of a head's value.
        deterministic: training.deterministic.
    """
    if kernel in WIDEST and not query == value <= WIDEST[kernel]:
        return f"queries and values must have one width, up to {WIDEST[kernel]}, and these have {query} and {value}"
    if kernel == "cudnn" and not cudnn_takes(query, value):
        return (
            "widths must be multiples of 8 up to 128, or 192 for queries with 128 for values, and these are "
            f"{query} and {value}"
        )
    if kernel == "cudnn" and deterministic:
        return "torch does not count it as deterministic, and training.deterministic = true asks for that"
    return ""


def head_widths(model: Model) -> tuple[int, int]:
    """Return the numbers of elements of a head's query and of its value."""
    return model.head_dim, model.v_head_dim or model.head_dim


def attention_violations(config: Config, cp: int) -> Iterator[str]:
    """Yield a message for each reason why the recipe's choice of attention cannot be followed at this degree of cp.

    Checked are parallelism.attention_kernel and attention_backend = "torch"; whether torch has a ring is not.
    training.device = "auto" counts as a GPU.
    """
    options, model, training = config.parallelism, config.model, config.training
    if why := kernel_refuses(options.attention_kernel, *head_widths(model), training.deterministic):
        yield f'parallelism.attention_kernel = "{options.attention_kernel}" cannot be used here: {why}; use "auto"'
    if options.attention_backend != "torch":
        return
    device = "cpu" if training.device == "cpu" else "cuda"
    documents = separates_documents(config) or bool(config.validation.quiz.paths)
    masked = {documents or window(model, layer) > 0 for layer in range(model.num_layers)}
    case: dict[str, Any] = {
        "device": device,
        "float64": training.mixed_precision_param == "float64",
        "sinks": model.attention_sinks,
        "narrow": min(head_widths(model)) < FLEX_NARROWEST,
    }
    reasons = {pick_backend("torch", options.cp_kind, cp, masked=mask, **case)[1] for mask in masked}
    for why in sorted(filter(None, reasons)):
        other = "" if cp > 1 and options.cp_kind == "ring" else ', or cp > 1 with cp_kind = "ring"'
        fix = other if device == "cpu" else ', or cp_kind = "allgather" or "ulysses"' if masked != {False} else ""
        yield f'parallelism.attention_backend = "torch" cannot be used here: {why}; use "auto"{fix}'
