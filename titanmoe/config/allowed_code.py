"""Permission to import components outside the package: the names "module:NAME" that the user has given.

A recipe or a command line that the user gives may name components of their own, which are imported. A record, such as
the manifest of a checkpoint or the config.toml of a run's folder, may come from a stranger: what it names is only
imported if the user has given the same name, in a recipe or with --allow-code.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

NAMING_FIELDS = (
    *("data.format", "model.family", "model.score_function", "moe.dispatcher", "moe.balance_losses"),
    *("training.objective", "optimizer.name"),
)
"""The fields whose values name components, by path: those of `titanmoe.components.COMPONENTS`."""
VARIABLE = "TITANMOE_ALLOWED_CODE"
"""The environment variable that holds the allowed names, so that ranks and worker processes inherit them."""
OPTION = "--allow-code"
"""The option of commands that read the folder of a run."""


class CodeNotAllowed(ValueError):
    """The error for a record of a run that names components outside the package that the user has not allowed."""


def allow_code(names: Iterable[str]) -> None:
    """Allow records of runs to name these components ("module:NAME") too, in this process and its later children."""
    os.environ[VARIABLE] = json.dumps(sorted({*_allowed(), *names}))


def _allowed() -> list[str]:
    return json.loads(os.environ.get(VARIABLE, "[]"))


def code_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names "module:NAME" of components outside the package that a config names, each once.

    A function of rl.reward is no component, and not among them.

    Args:
        values: the config's values by path, such as "moe.dispatcher".
    """
    given = []
    for path in NAMING_FIELDS:
        value = values.get(path)
        if isinstance(value, list):  # lines of a name and a coefficient
            given += [line.strip().partition(" ")[0] for line in value if isinstance(line, str)]
        elif isinstance(value, str):
            given.append(value)
    return [name for name in dict.fromkeys(given) if ":" in name]


def refuse_code(values: Mapping[str, Any], source: object) -> None:
    """Raise CodeNotAllowed if a record of a run names components outside the package that the user has not allowed.

    Args:
        values: the values of the config in the record, by path, such as "moe.dispatcher".
        source: where the record comes from, such as its file, for the message.
    """
    if unknown := [name for name in code_names(values) if name not in _allowed()]:
        options = " ".join(f"{OPTION} {json.dumps(name)}" for name in unknown)
        raise CodeNotAllowed(
            f"{source} names code outside titanmoe, which is not run unless you give the same name: if you trust that "
            f"code, add {options}"
        )


def add_allow_code(parser: argparse.ArgumentParser) -> None:
    """Add the option --allow-code to the parser of a command that reads the folder of a run."""
    parser.add_argument(
        OPTION, action=_Allow, metavar="MODULE:NAME",
        help="a family, dispatcher or other component of your own that the run's record names: its module is imported, "
        "from the current folder too. Can be given several times; without it, no code that a record names is run",
    )  # fmt: skip


class _Allow(argparse.Action):
    """The argparse action of --allow-code, which allows the name while the command line is parsed."""

    def __call__(self, parser: Any, namespace: Any, name: Any, option: Any = None) -> None:
        if ":" not in name:
            parser.error(f"{OPTION} {name} is not MODULE:NAME")
        allow_code([name])
