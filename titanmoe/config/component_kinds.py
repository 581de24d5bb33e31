"""What a recipe chooses by name: components, their kinds and their specs. Imports no torch and no component.

A component is one of several of a kind, such as a dispatcher, an optimizer or a model family. Its spec says what is
known without its implementation: a line of help, what it contradicts, what it costs. Each kind has its own folder with
the table of its names; `titanmoe.components` collects these tables and the callers of `load` pass them in. A component
outside the package is named "module:NAME".
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar

from titanmoe.config.model_file import ModelFile
from titanmoe.config.ranges import Violation

Config = Any
"""Stands for titanmoe.config.schema.Config, which this file cannot import because Config has a field of Components."""
PAGE = "docs/extending.md"
"""The docs page that error messages refer to."""


class ComponentError(LookupError):
    """The error for a name whose component does not exist, cannot be imported or lacks a member."""

    def __init__(self, fields: tuple[str, ...], text: str):
        """Store the paths of the recipe's fields that name the component, and the message."""
        super().__init__(fields, text)  # pickle makes the exception from these arguments
        self.fields, self.text = fields, text

    def __str__(self) -> str:
        return self.text


class Spec:
    """The base class of specs: what is known about a component, such as a dispatcher, without its implementation.

    Each kind of component has a subclass with more facts.
    """

    help = ""
    """The sentence of --help that says when to choose it."""
    implementation = ""
    """The module and name of the implementation, as "module:NAME".

    "" if the spec is the attribute `spec` of the implementation.
    """

    def preset(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults of fields that this component changes, by path; {} by default.

        Args:
            values: the values of all fields so far, by path.
        """
        return {}

    def contradictions(self, config: Config) -> Iterator[Violation]:
        """Yield a violation for each combination of fields in the config that this component cannot be used with."""
        yield from ()

    def divided(self, config: Config) -> dict[str, dict[str, int]]:
        """Return the sizes that have to be divisible by parallel degrees; {} by default.

        Returns:
            A dict by degree, such as "tp", of dicts {name of the size: size}. A size of type
            `titanmoe.config.ranges.Replicable` may also be a divisor of the degree.
        """
        return {}

    def violations(self, config: Config, degrees: Mapping[str, int]) -> Iterator[str]:
        """Yield a message for each reason why the component cannot run with these parallel degrees.

        Without the reasons that follow from `divided`.

        Args:
            degrees: ranks on each axis by name, such as {"tp": 2}, those that are known so far.
        """
        yield from ()


SpecType = TypeVar("SpecType", bound=Spec)


def single_name(value: Any) -> list[str]:
    """Return a list with the value as the only name: the default of `ComponentKind.names`.

    Not a lambda, because worker processes unpickle it.
    """
    return [value]


@dataclass(frozen=True)
class ComponentKind(Generic[SpecType]):
    """A kind of component: the field of a recipe that names one, the table of names, and how they are looked up."""

    field: str
    """Path of the recipe's field, such as moe.dispatcher."""
    table: Mapping[str, SpecType | str]
    """Specs by name. "module:NAME" stands for a spec, or an implementation with a spec, imported on look-up."""
    spec: type[SpecType]
    """The class that the specs of this kind have to be instances of."""
    members: tuple[str, ...] = ()
    """Names of the members that an implementation has to have."""
    names: Callable[[Any], list[str]] = single_name
    """A function that returns the names in a value of the field; raises ComponentError if it cannot be read."""

    def specs_of(self, value: Any) -> list[SpecType]:
        """Return the specs of all components that a value of the field names, in its order.

        Args:
            value: the field's value: one name, or what `names` reads, such as ["my_package.mine:Mine 0.001"].

        Raises:
            ComponentError: with a message for each component that cannot be used.
        """
        specs, problems = [], []
        for name in self.names(value):
            try:
                specs.append(self.look_up(name))
            except ComponentError as error:
                problems.append(str(error))
        if problems:
            raise ComponentError((self.field,), "; ".join(problems))
        return specs

    def look_up(self, name: str) -> SpecType:
        """Return the spec of a component, after importing it if necessary.

        A module outside the package is also searched in the current folder, which is appended to sys.path. An
        implementation that a spec only names is not imported here.

        Args:
            name: a name of the table, or "module:NAME" for a component outside the package.

        Raises:
            ComponentError: if there is no such component, or it cannot be imported or lacks a member.
        """
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
        """Import and return the implementation of a component, usually a class.

        Args:
            name: a name of the table, or "module:NAME" for a component outside the package.

        Raises:
            ComponentError: if there is no such component, or it cannot be imported or lacks a member.
        """
        spec, entry = self.look_up(name), self.table.get(name, name)
        member = self._import(name, spec.implementation or str(entry))
        self._check_members(name, spec.implementation or str(entry), member)
        return member

    def summary(self) -> str:
        """Return the components' lines of help, joined into one paragraph for --help; a name where there is no line.

        The line of a component that cannot be used is its error.
        """
        lines = []
        for name in self.table:
            try:
                lines.append(self.look_up(name).help or name)
            except ComponentError as error:
                lines.append(str(error))
        return (" " if any(" " in line for line in lines) else ", ").join(lines).rstrip(".") + "."

    def _import(self, name: str, import_path: str) -> Any:
        module_name, _, member = import_path.partition(":")
        # An installed program does not search the current folder. Search it last, and only for the user's own modules.
        if not module_name.startswith("titanmoe.") and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            module = import_module(module_name)
        except Exception as error:  # its own code may raise anything
            raise self._unusable(name, f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
        if not hasattr(module, member):
            raise self._unusable(name, f"{module_name} has no {member}")
        return getattr(module, member)

    def _check_members(self, name: str, import_path: str, component: Any) -> None:
        cls = component if isinstance(component, type) else type(component)
        declared = [member for member in dir(cls) if _is_abstract(getattr(cls, member, None))]
        lacking = [member for member in self.members if getattr(component, member, None) is None] + declared
        if lacking:
            raise self._unusable(name, f"{import_path} lacks {', '.join(lacking)}")

    def _unusable(self, name: str, why: str) -> ComponentError:
        return ComponentError((self.field,), f"{self.field} = {json.dumps(name)} cannot be used: {why} ({PAGE})")

    def _unknown(self, name: str) -> ComponentError:
        near = get_close_matches(name.lower(), self.table, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f'one of your own is called "module:NAME" ({PAGE})'
        text = f"{self.field} = {json.dumps(name)} is not one of {', '.join(self.table)}: {hint}"
        return ComponentError((self.field,), text)


def _is_abstract(member: Any) -> bool:
    return getattr(member, "__isabstractmethod__", False) is True


class Components(NamedTuple):
    """Contributions of the packages above `config` to reading a recipe: kinds of components, laws, a reader of models.

    Empty in a Config that was not read from a recipe.
    """

    kinds: tuple[ComponentKind[Any], ...] = ()
    laws: tuple[Callable[[Config], Iterator[Violation]], ...] = ()
    """Functions that yield a violation for each set of fields that contradict each other, for any components."""
    read_model_file: Callable[[Mapping[str, Any]], ModelFile] | None = None
    """A function that reads the published model of the field model.hf, from the values of all fields by path.

    Raises ConfigError if it cannot.
    """
    input_checks: tuple[Callable[[Config], None], ...] = ()
    """Functions that check what a run reads, from the resolved config, before ranks start. They raise ConfigError."""

    def kind_of(self, field: str) -> ComponentKind[Any] | None:
        """Return the kind whose components a field names, such as that of moe.dispatcher; None for other fields."""
        return next((kind for kind in self.kinds if kind.field == field), None)

    def specs(self, config: Config) -> Iterator[Spec]:
        """Yield the specs of all components that a config names, kind by kind.

        Raises:
            ComponentError: if a component cannot be used.
        """
        for kind in self.kinds:
            table, _, name = kind.field.rpartition(".")
            yield from kind.specs_of(getattr(getattr(config, table), name))

    def contradictions(self, config: Config) -> Iterator[Violation]:
        """Yield a violation for each set of a config's fields that contradict each other.

        They come from `laws` and from the specs of the components that the config names.

        Raises:
            ComponentError: if a component cannot be used.
        """
        for law in self.laws:
            yield from law(config)
        for spec in self.specs(config):
            yield from spec.contradictions(config)
