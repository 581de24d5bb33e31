"""A part is one of several of a kind: a dispatcher, an optimizer, a family of models. A recipe names it.

The spec of a part is what is known of it without torch: a line of help, and what it refuses. Each kind lies in a
folder of its own, with the table of its names; `load` is handed these tables, because this room knows no part. A part
may also lie outside the package: its name is then "module:NAME".
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple

from titanmoe.config.model_file import ModelFile
from titanmoe.config.ranges import Violation

Config = Any
"""A titanmoe.config.schema.Config, which holds the tables that this file defines."""
PAGE = "docs/extending.md"


class PartError(LookupError):
    """There is no such part, or it cannot be used."""

    def __init__(self, fields: tuple[str, ...], text: str):
        """fields: those of the recipe that name it."""
        super().__init__(fields, text)  # its arguments, from which pickle makes it again
        self.fields, self.text = fields, text

    def __str__(self) -> str:
        return self.text


class Spec:
    """What is known of a part. Each kind adds the facts that its parts have to state."""

    help = ""
    """When to choose it, as --help says it."""
    implementation = ""
    """"module:NAME", imported when it is used; "" if the spec is an attribute of the implementation itself."""

    def preset(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Fields, by path, that have another default with this part. values: of all fields."""
        return {}

    def contradictions(self, config: Config) -> Iterator[Violation]:
        """Fields that do not fit this part."""
        yield from ()

    def divided(self, config: Config) -> dict[str, dict[str, int]]:
        """What a degree has to split into equal parts: numbers by degree and name. `titanmoe.config.ranges.Repeated`
        is one of which a degree may be a multiple too."""
        return {}

    def violations(self, config: Config, degrees: Mapping[str, int]) -> Iterator[str]:
        """Other mappings that do not fit this part. degrees: those that are known."""
        yield from ()


def single_name(value: Any) -> list[str]:
    """Return the one name that the field's value is. A function of the module, because worker processes unpickle it."""
    return [value]


@dataclass(frozen=True)
class Kind:
    field: str
    """The field of a recipe that names one."""
    table: Mapping[str, Spec | str]
    """Parts by name. "module:NAME" stands for a part in one file, or its spec, imported when it is looked up."""
    spec: type[Spec] = Spec
    members: tuple[str, ...] = ()
    """What an implementation has to have."""
    names: Callable[[Any], list[str]] = single_name
    """Those in a value of the field; PartError if it cannot be read."""

    def specs_of(self, value: Any) -> list[Spec]:
        """Return the specs of all parts that a value of the field names; PartError with all that cannot be used."""
        specs, problems = [], []
        for name in self.names(value):
            try:
                specs.append(self.look_up(name))
            except PartError as error:
                problems.append(str(error))
        if problems:
            raise PartError((self.field,), "; ".join(problems))
        return specs

    def look_up(self, name: str) -> Spec:
        """Return the spec of a part; PartError if it cannot be used."""
        entry = self.table.get(name, name)
        if isinstance(entry, Spec):
            return entry
        if ":" not in entry:
            raise self._unknown(name)
        member = self._import(name, entry)
        spec = member if isinstance(member, Spec) else getattr(member, "spec", None)
        if not isinstance(spec, self.spec):
            raise self._unusable(name, f"{entry} has no `spec`, an instance of {self.spec.__name__}")
        if not spec.implementation:
            self._check_members(name, entry, member)
        return spec

    def implementation(self, name: str) -> Any:
        spec, entry = self.look_up(name), self.table.get(name, name)
        member = self._import(name, spec.implementation or str(entry))
        self._check_members(name, spec.implementation or str(entry), member)
        return member

    def summary(self) -> str:
        """For --help: what each part says of itself, or their names."""
        lines = []
        for name in self.table:
            try:
                lines.append(self.look_up(name).help or name)
            except PartError as error:
                lines.append(str(error))
        return (" " if any(" " in line for line in lines) else ", ").join(lines).rstrip(".") + "."

    def _import(self, name: str, place: str) -> Any:
        module_name, _, member = place.partition(":")
        # An installed program does not search the current folder. It comes last, and only for the user's own modules.
        if not module_name.startswith("titanmoe.") and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            module = import_module(module_name)
        except Exception as error:  # its own code may raise anything
            raise self._unusable(name, f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
        if not hasattr(module, member):
            raise self._unusable(name, f"{module_name} has no {member}")
        return getattr(module, member)

    def _check_members(self, name: str, place: str, part: Any) -> None:
        kind = part if isinstance(part, type) else type(part)
        declared = [member for member in dir(kind) if _is_abstract(getattr(kind, member, None))]  # by a base class
        lacking = [member for member in self.members if getattr(part, member, None) is None] + declared
        if lacking:
            raise self._unusable(name, f"{place} lacks {', '.join(lacking)}")

    def _unusable(self, name: str, why: str) -> PartError:
        return PartError((self.field,), f"{self.field} = {json.dumps(name)} cannot be used: {why} ({PAGE})")

    def _unknown(self, name: str) -> PartError:
        near = get_close_matches(name.lower(), self.table, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f'one of your own is called "module:NAME" ({PAGE})'
        text = f"{self.field} = {json.dumps(name)} is not one of {', '.join(self.table)}: {hint}"
        return PartError((self.field,), text)


def _is_abstract(member: Any) -> bool:
    return getattr(member, "__isabstractmethod__", False) is True


class Parts(NamedTuple):
    """What the rooms above know of a recipe. Empty in a config that no recipe was read for."""

    kinds: tuple[Kind, ...] = ()
    laws: tuple[Callable[[Config], Iterator[Violation]], ...] = ()
    """Each yields the fields of a config that contradict each other, whatever parts it names."""
    read_model_file: Callable[[Mapping[str, Any]], ModelFile] | None = None
    """What the file says that model.hf names, from the values of all fields by path; ConfigError if it cannot be
    read."""

    def of(self, field: str) -> Kind | None:
        return next((kind for kind in self.kinds if kind.field == field), None)

    def specs(self, config: Config) -> Iterator[Spec]:
        """Those of the parts that a config names."""
        for kind in self.kinds:
            table, _, name = kind.field.rpartition(".")
            yield from kind.specs_of(getattr(getattr(config, table), name))

    def contradictions(self, config: Config) -> Iterator[Violation]:
        for law in self.laws:
            yield from law(config)
        for spec in self.specs(config):
            yield from spec.contradictions(config)
