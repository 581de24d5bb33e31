"""From a recipe and a command line to a Config, or to everything that is wrong with them."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from titanmoe.config import laws, other_names
from titanmoe.config.field_values import WrongType, closest, fit, fit_texts, nearest_field, shortened, shown
from titanmoe.config.fields import Field, build, fields, flat, help_page, own_fields, tables, to_toml, toml_value
from titanmoe.config.parts import PartError, Parts
from titanmoe.config.recipe import Recipe, RecipeError, read_recipe
from titanmoe.config.recipes import find_recipe, names
from titanmoe.config.schema import OWN, Config

_OPTION = re.compile(r"--|-[A-Za-z]")
"""How an option begins; a value may be negative."""
HINTS = 20
"""Up to this many problems, an unknown name gets a suggestion: each is compared with every field's name."""


class ConfigError(ValueError):
    """What was asked for cannot run. `problems` has every reason, `source` says where it was asked for."""

    def __init__(self, problems: list[str], source: str = ""):
        super().__init__(problems, source)  # its arguments, from which pickle makes it again
        self.problems, self.source = problems, source

    def __str__(self) -> str:
        return format_problems(self.problems, self.source)


def format_problems(problems: Sequence[str], source: str = "") -> str:
    """A header with the count and the source, then the problems by number."""
    if len(problems) == 1 and not source:
        return f"error: {problems[0]}"
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"error: {count} in {source}" if source else f"error: {count}", ""]
    width = len(str(len(problems)))
    for number, problem in enumerate(problems, 1):
        lines.append(f"  {number:>{width}}. {problem}".replace("\n", "\n" + " " * (width + 4)))
    return "\n".join(lines)


def exit_with(problems: Sequence[str], source: str = "") -> NoReturn:
    """Ends the process over a user's mistake: exit code 2 on every rank, the message once, on stderr.

    Rank 0 prints; another rank only if the mistake is its own, such as data that its machine lacks.
    """
    if _first_rank():
        print(format_problems(problems, source), file=sys.stderr, flush=True)
    else:
        # torchrun ends all ranks once one has ended, and rank 0 may not have printed yet. So wait for it to go first;
        # the SIGTERM that follows cuts the wait short.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
        time.sleep(5)
        print(f"rank {os.environ['RANK']}: {format_problems(problems, source)}", file=sys.stderr, flush=True)
    sys.exit(2)


def load(
    argv: Sequence[str],
    parts: Parts,
    check: Callable[[Config], list[str]],
    resolve: Callable[[Config], Config] | None = None,
) -> Config:
    """The config that a command line asks for; ConfigError with everything that is wrong if it cannot run.

    parts: what names of parts stand for. check(config) lists what else is wrong with it, such as a mapping that does
    not fit. resolve(config) fills in what is derived, once nothing is wrong. --help and --print-config print and exit
    with code 0.
    """
    asked = _split(argv)
    given = _Given()
    source = " and ".join(filter(None, [asked.recipe, "the command line" if asked.overrides or asked.problems else ""]))
    try:
        if asked.recipe is not None:
            given.recipe = read_recipe(str(find_recipe(asked.recipe)))
            _take(given.recipe.data, "", given)
    except RecipeError as error:
        raise ConfigError([str(error), *asked.problems], source) from None
    given.problems += asked.problems
    for path, texts in asked.overrides.items():
        given.on_command_line.add(path)
        if path in fields():
            given.put(fields()[path], fit_texts(texts, fields()[path]), shortened(" ".join(texts)) or '""')
        else:
            given.own[path] = texts

    fallback = _fallback(given, parts)
    _take_own(given, own_fields(fallback))
    values = fallback | given.values
    if not values["job.name"]:
        size = f"{values['model.family']}_{values['model.size']}"
        values["job.name"] = Path(asked.recipe).stem if asked.recipe else size
    if asked.help:
        import shutil

        origins = {path: given.where(path) for path in given.values}
        width = min(shutil.get_terminal_size().columns, 120)
        _print_and_exit(help_page(Path(sys.argv[0]).name, values, origins, width, parts))

    for violation in laws.out_of_range(values):
        given.blame(violation.fields, violation.text)
        given.unsound.update(violation.fields)
        values |= {path: fallback[path] for path in violation.fields}
    config = build(values, parts)
    for violation in laws.contradictions(config):
        if given.unsound.isdisjoint(violation.fields):
            given.blame(violation.fields, violation.text)
    given.problems += [_mention_fallbacks(problem, given.unsound, values) for problem in check(config)]
    if given.problems:
        raise ConfigError(given.problems, source)

    if resolve is not None:
        config = resolve(config)
    if asked.print_config:
        _print_and_exit(to_toml(config))
    return config


def peek(argv: Sequence[str], parts: Parts) -> tuple[Config | None, ConfigError | None]:
    """The config as far as it can be read, whatever its mapping, and what is wrong with it. Prints nothing."""
    seen: list[Config] = []
    try:
        load(argv, parts, lambda config: seen.append(config) or [""])
    except ConfigError as error:
        problems = [problem for problem in error.problems if problem]
        return (seen[0] if seen else None), ConfigError(problems, error.source) if problems else None


def recipe_of(argv: Sequence[str]) -> str | None:
    """The recipe that a command line names."""
    return _split(argv).recipe


def prints(argv: Sequence[str]) -> bool:
    """Whether --print-config is among the words: then nothing starts, and any machine will do."""
    return _split(argv).print_config


@dataclass
class _Given:
    """What recipe and command line say, by path, and what is wrong with it."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unsound: set[str] = field(default_factory=set)
    """Fields whose value here replaces one that cannot be used: conclusions from it may be wrong."""
    on_command_line: set[str] = field(default_factory=set)
    recipe: Recipe | None = None
    own: dict[str, Any] = field(default_factory=dict)
    """What was given for [model.own]: values, or words of the command line. Its fields are known once the family is."""

    def put(self, target: Field, value: Any, text: str) -> None:
        path = target.path
        if isinstance(value, WrongType):
            self.unsound.add(path)
            self.blame((path,), f"{path} = {text} is not {target.expected}{value.correction}")
        else:
            self.unsound.discard(path)
            self.values[path] = value

    def where(self, path: str) -> str:
        if path in self.on_command_line:
            return "command line"
        return self.recipe.where(path) if self.recipe else ""

    def blame(self, paths: Iterable[str], text: str) -> None:
        places = ", ".join(dict.fromkeys(filter(None, map(self.where, paths))))
        self.problems.append(f"{places}: {text}" if places else text)


# ---- the command line


@dataclass
class _Asked:
    recipe: str | None = None
    overrides: dict[str, list[str]] = field(default_factory=dict)
    help: bool = False
    print_config: bool = False
    problems: list[str] = field(default_factory=list)

    def take_recipe(self, name: str) -> None:
        if self.recipe is None:
            self.recipe = name
        else:
            self.problems.append(
                f"command line: two recipes are given, {self.recipe} and {name}: a run has one, "
                "put the rest into overrides"
            )


def _split(argv: Sequence[str]) -> _Asked:
    asked = _Asked()
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == "-h":
            argument = "--help"
        first = len(rest) == len(argv) - 1
        if not argument.startswith("-") and (first or Path(argument).suffix == ".toml" or argument in names()):
            asked.take_recipe(argument)
            continue
        if not argument.startswith("--"):
            asked.problems.append(
                f"command line: {argument!r} does not belong to an option: fields are set as in --training.steps 10"
            )
            continue
        name, attached, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        known = fields().get(name)
        following = next((i for i, text in enumerate(rest) if _OPTION.match(text)), len(rest))
        if attached or name in ("help", "print_config"):
            following = 0
        elif name == "config" or (known and not known.item) or name.startswith(f"{OWN}."):
            following = min(following, 1)
        texts, rest = [value] if attached else rest[:following], rest[following:]

        if name in ("help", "print_config"):
            setattr(asked, name, True)
        elif name == "config" and not (texts and texts[0]):
            asked.problems.append("command line: --config needs a file, as in --config train_configs/debug.toml")
        elif name == "config":
            asked.take_recipe(texts[0])
        elif name.startswith(f"{OWN}.") or (known and (texts or known.kind is bool)):
            asked.overrides[name] = texts or ["true"]
        elif known:
            asked.problems.append(f"command line: --{name} needs a value, {known.expected}")
        elif name in tables():
            members = ", ".join(f"--{path}" for path, it in fields().items() if it.table == name) or "the family's own"
            asked.problems.append(f"command line: --{name} is a table, not a field: its fields are {members}")
        else:
            near = nearest_field(name) if len(asked.problems) < HINTS else ""
            hint = f"did you mean --{near}?" if near else "--help lists them all"
            hint = other_names.hint(name, texts) or hint
            asked.problems.append(f"command line: unknown option {shortened(argument.partition('=')[0])}: {hint}")
    return asked


# ---- the recipe


def _take(data: dict[str, Any], prefix: str, given: _Given) -> None:
    for key, value in data.items():
        path = prefix + key
        if path in fields():
            given.put(fields()[path], fit(value, fields()[path]), shown(value))
        elif prefix == f"{OWN}.":
            given.own[path] = value
        elif path in tables() and isinstance(value, dict):
            _take(value, f"{path}.", given)
        elif path in tables():
            given.blame((path,), f"{path} = {shown(value)} is not a table: write [{path}] and its fields below")
        else:
            kind = "table" if isinstance(value, dict) else "key"
            hint = _hint(path) if len(given.problems) < HINTS else "--help lists all fields"
            given.blame((path,), f"unknown {kind} {shortened(path)}: {hint}")


def _take_own(given: _Given, own: dict[str, Field]) -> None:
    """own: the fields of [model.own] that the family has."""
    family_known = given.unsound.isdisjoint(("model.family", "model.size"))
    for path, value in given.own.items():
        if path in own and path in given.on_command_line:
            given.put(own[path], fit_texts(value, own[path]), shortened(" ".join(value)) or '""')
        elif path in own:
            given.put(own[path], fit(value, own[path]), shown(value))
        elif family_known:
            near = closest(path.removeprefix(f"{OWN}."), [it.name for it in own.values()])
            known = f"the family's are {', '.join(own)}" if own else "the family has none of its own"
            hint = f"did you mean {OWN}.{near}?" if near else known
            given.blame((path,), f"unknown key {shortened(path)}: {hint}")


def _hint(path: str) -> str:
    near, table = other_names.SAME.get(path) or nearest_field(path), path.rpartition(".")[0]
    if path in other_names.OTHERWISE:
        return other_names.OTHERWISE[path]
    if near:
        return f"did you mean {near}?"
    if table in tables():
        return f"[{table}] has {', '.join(it.name for it in fields().values() if it.table == table)}"
    return f"the tables are {', '.join(tables())}"


# ---- the rest


def _fallback(given: _Given, parts: Parts) -> dict[str, Any]:
    """The value of every field that neither recipe nor command line gives. A part that cannot be used is refused, and
    its field has its default."""
    defaults, presets = flat(Config()), {}
    for kind in parts:
        values = defaults | given.values
        try:
            preset = {
                path: value for rules in kind.named(values[kind.field]) for path, value in rules.preset(values).items()
            }
        except PartError as error:
            given.blame(error.fields, str(error))
            for path in error.fields:
                given.unsound.add(path)
                given.values.pop(path, None)
            preset = {}
        presets |= preset
    named = ("model.family", "model.size")
    if not given.unsound.isdisjoint(named):
        given.unsound.update(path for path, it in fields().items() if it.table == "model" and path not in given.values)
    return defaults | presets


def _mention_fallbacks(problem: str, unsound: set[str], values: dict[str, Any]) -> str:
    """Names the fields in a problem whose values are not the user's, because those were refused."""
    stand_ins = [path for path in values if path in unsound and re.search(rf"\b{path.rpartition('.')[2]}\b", problem)]
    if not stand_ins:
        return problem
    taken = ", ".join(f"{path} = {toml_value(values[path])}" for path in stand_ins)
    return f"{problem} (taking {taken}, because what was given is refused above)"


def _first_rank() -> bool:
    return os.environ.get("RANK", "") in ("", "0")


def _print_and_exit(text: str) -> NoReturn:
    if _first_rank():
        try:
            print(text, end="", flush=True)
        except BrokenPipeError:  # as in `train.py --help | head`: leave Python nothing to flush at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
