"""Whose attention runs: torch's own where it works, ours elsewhere. docs/parallelism.md has the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from titanmoe.config.blocks import window
from titanmoe.config.schema import Config

Backend = Literal["plain", "ring", "flex"]


def pick_backend(
    setting: str, kind: str, cp: int, device: str, float64: bool, masked: bool, sinks: bool, ring_lacks: str = ""
) -> tuple[Backend, str]:
    """The backend, and why torch's cannot be used if it is plain.

    masked: there are documents or a window. ring_lacks: why this torch's ring cannot run, if it cannot.
    """
    if setting == "plain":
        return "plain", "it was asked for"
    if cp > 1 and kind == "ring":
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
    if masked or sinks or (cp > 1 and kind == "allgather"):
        return "flex", ""
    return "plain", ""  # causal alone: that is torch's scaled_dot_product_attention


def attention_violations(config: Config, cp: int) -> Iterator[str]:
    """What attention_backend = "torch" requires of the device, the model and the documents; "auto" uses ours
    instead."""
    options, model, training = config.parallelism, config.model, config.training
    if options.attention_backend != "torch":
        return
    device, float64 = "cpu" if training.device == "cpu" else "cuda", training.mixed_precision_param == "float64"
    apart = config.data.packing != "stream"
    masked = {apart or window(model, layer) > 0 for layer in range(model.num_layers)}
    picked = [
        pick_backend("torch", options.cp_kind, cp, device, float64, mask, model.attention_sinks) for mask in masked
    ]
    for why in sorted({why for _, why in picked if why}):
        other = "" if cp > 1 and options.cp_kind == "ring" else ', or cp > 1 with cp_kind = "ring"'
        fix = other if device == "cpu" else ', or cp_kind = "allgather" or "ulysses"' if masked != {False} else ""
        yield f'parallelism.attention_backend = "torch" cannot be used here: {why}; use "auto"{fix}'
