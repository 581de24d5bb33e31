"""The model families: which sizes there are, and the [model] fields each stands for."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module

from titanmoe.config import families
from titanmoe.models.families.huggingface import HuggingFace

_FILES = {name: import_module(f"{__name__}.{name}") for name in families.NAMES}
FAMILIES: dict[str, dict[str, dict[str, object]]] = {name: file.SIZES for name, file in _FILES.items()}
HUGGING_FACE: dict[str, HuggingFace] = {name: file.HF for name, file in _FILES.items()}
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
