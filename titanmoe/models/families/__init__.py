"""The model families: which sizes there are, and the [model] fields each stands for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

from titanmoe.config import families
from titanmoe.config.schema import Model
from titanmoe.models.families.huggingface import HuggingFace

NEEDED = {
    "SIZES": "its sizes, each with the [model] fields that it stands for",
    "HF": "how Hugging Face names its tensors and fields",
}
"""What the file of a family has."""


def _file(family: str) -> ModuleType:
    name = f"{__name__}.{family}"
    try:
        file = import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise LookupError("there is no such file") from None
    lacking = [f"it lacks {member}, {what}" for member, what in NEEDED.items() if not hasattr(file, member)]
    if not lacking and file.HF.family != family:
        lacking = [f"its HF says family = {file.HF.family!r}"]
    if not lacking:
        field_names = {field.name for field in fields(Model)}
        lacking = [
            f"its size {size!r} has {', '.join(sorted(unknown))}, no field of [model]"
            for size, values in file.SIZES.items()
            if (unknown := values.keys() - field_names)
        ]
    if lacking:
        raise LookupError("; ".join(lacking))
    return file


FAMILIES: dict[str, dict[str, dict[str, object]]] = {}
HUGGING_FACE: dict[str, HuggingFace] = {}
"""How each family is written for transformers."""
_LACKING: dict[str, str] = {}
for _name in families.NAMES:
    try:
        FAMILIES[_name], HUGGING_FACE[_name] = _file(_name).SIZES, _file(_name).HF
    except LookupError as _error:
        _LACKING[_name] = f"titanmoe/models/families/{_name}.py: {_error} (docs/extending.md#a-family)"


def names() -> dict[str, list[str]]:
    """The sizes of each family."""
    return {family: list(sizes) for family, sizes in FAMILIES.items()}


def preset(family: str, size: str) -> dict[str, object]:
    """The [model] fields that a family and a size stand for; the fields left out keep their defaults."""
    if family in _LACKING:
        raise LookupError(f"model.family = {family!r} cannot be used. {_LACKING[family]}")
    if family not in FAMILIES:
        raise LookupError(f"model.family = {family!r} is not a family.{_nearest(family, FAMILIES)} {_choices()}")
    sizes = FAMILIES[family]
    if size not in sizes:
        owners = [owner for owner, owner_sizes in FAMILIES.items() if size in owner_sizes]
        hint = f" It is one of {owners[0]}." if owners else _nearest(size, sizes)
        raise LookupError(f"model.size = {size!r} is not a size of {family}.{hint} {_choices()}")
    return {"family": family, "size": size, **sizes[size]}


def _nearest(name: str, candidates: Iterable[str]) -> str:
    close = get_close_matches(name.lower(), candidates, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _choices() -> str:
    return "Known: " + "; ".join(f"{family} ({', '.join(sizes)})" for family, sizes in names().items())
