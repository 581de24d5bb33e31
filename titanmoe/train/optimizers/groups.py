"""[[optimizer.groups]]: parameters with a rate and a decay of their own, by patterns of their names. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from titanmoe.config.fields import toml_value
from titanmoe.config.ranges import Violation
from titanmoe.config.schema import Config
from titanmoe.config.schema import Optimizer as Options
from titanmoe.models.families import mixers
from titanmoe.models.tensors import Tuning, matches, shapes, stored_name, unmatched

FIELD = "optimizer.groups"


class OwnRates(NamedTuple):
    lr: float | None = None
    """Its peak rate; None for that of parameters in no group."""
    weight_decay: float | None = None
    """None for the usual one."""


def groups_of(parameters: Iterable[str], config: Config) -> dict[str, OwnRates]:
    """Of the parameters of a rank that are in a group."""
    out, tied = {}, config.model.tie_embeddings
    for name in parameters:
        for table in config.optimizer.groups:
            if matches(stored_name(name, tied), tuple(table["match"])):
                out[name] = OwnRates(table.get("lr"), table.get("weight_decay"))
    return out


def share(rate: float | None, options: Options) -> float:
    """What to multiply the scheduled rate by, for a peak rate of its own."""
    return 1.0 if rate is None else rate / options.lr


def contradictions(config: Config) -> Iterator[Violation]:
    tuning, groups = Tuning.of(config), config.optimizer.groups
    known = [name for name, _ in shapes(config.model, tuning) if not tuning.freezes(name)]
    texts = [text for number, table in enumerate(groups, 1) for text in _malformed(number, table)]
    yield from (Violation((FIELD,), text) for text in texts)
    if texts or not groups:
        return
    if unnamed := next((mixer for mixer in mixers(config.model) if not mixer.names(config.model)), None):
        yield Violation(
            (FIELD, "model.family"),
            f"{FIELD} goes by the names of parameters, and the rules of the {unnamed.name} of model.family = "
            f'"{config.model.family}" do not state them: add `names` there (docs/extending.md), or leave it out',
        )
        return
    for table in groups:
        yield from unmatched(FIELD, table["match"], known)
    for name in known:
        if len(of := [n for n, table in enumerate(groups, 1) if matches(name, tuple(table["match"]))]) > 1:
            yield Violation(
                (FIELD,),
                f"{FIELD}: {name} is in groups {' and '.join(map(str, of))}: let the patterns of only one match it",
            )
            break


def _malformed(number: int, table: dict) -> Iterator[str]:
    """What is wrong with a group by itself."""
    place = f"{FIELD}, group {number}"
    for key in table.keys() - {"match", "lr", "weight_decay"}:
        yield f"{place}: unknown key {key}: a group has match, lr and weight_decay"
    match = table.get("match")
    if not isinstance(match, list) or not match or not all(isinstance(pattern, str) for pattern in match):
        yield f'{place}: match must be a list of patterns of names, as in match = ["layers.*.moe.router.weight"]'
    for key in ("lr", "weight_decay"):
        value = table.get(key, 0.0)
        rate = key == "lr" and key in table
        fits = not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= (1 if rate else 100)
        if not fits or (rate and not value):
            limits = "(0, 1] (to keep weights as they are, name them in training.freeze)" if rate else "[0, 100]"
            yield f"{place}: {key} = {toml_value(value)} must be a number in {limits}"
    if not {"lr", "weight_decay"} & table.keys():
        yield f"{place} changes nothing: set its lr or its weight_decay"
