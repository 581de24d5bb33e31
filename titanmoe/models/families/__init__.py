"""The model families: which sizes there are, and the [model] fields each stands for."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from titanmoe.models.families import deepseek_v3, gpt_oss, llama3_moe, mixtral, olmoe, qwen2_moe, qwen3_moe
from titanmoe.models.families.huggingface import HuggingFace

FAMILIES: dict[str, dict[str, dict[str, object]]] = {
    "mixtral": mixtral.SIZES,
    "qwen2_moe": qwen2_moe.SIZES,
    "qwen3_moe": qwen3_moe.SIZES,
    "llama3_moe": llama3_moe.SIZES,
    "deepseek_v3": deepseek_v3.SIZES,
    "olmoe": olmoe.SIZES,
    "gpt_oss": gpt_oss.SIZES,
}
HUGGING_FACE: dict[str, HuggingFace] = {
    "mixtral": mixtral.HF,
    "qwen2_moe": qwen2_moe.HF,
    "qwen3_moe": qwen3_moe.HF,
    "llama3_moe": llama3_moe.HF,
    "deepseek_v3": deepseek_v3.HF,
    "olmoe": olmoe.HF,
    "gpt_oss": gpt_oss.HF,
}
"""How each family is written for transformers."""


def names() -> dict[str, list[str]]:
    """The sizes of each family."""
    return {family: list(sizes) for family, sizes in FAMILIES.items()}


def preset(family: str, size: str) -> dict[str, object]:
    """The [model] fields that a family and a size stand for; the fields left out keep their defaults."""
    if family not in FAMILIES:
        raise LookupError(f"model.family = {family!r} is not a family.{_nearest(family, FAMILIES)} {_known()}")
    sizes = FAMILIES[family]
    if size not in sizes:
        owners = [other for other, theirs in FAMILIES.items() if size in theirs]
        hint = f" It is one of {owners[0]}." if owners else _nearest(size, sizes)
        raise LookupError(f"model.size = {size!r} is not a size of {family}.{hint} {_known()}")
    return {"family": family, "size": size, **sizes[size]}


def _nearest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _known() -> str:
    return "Known: " + "; ".join(f"{family} ({', '.join(sizes)})" for family, sizes in names().items())
