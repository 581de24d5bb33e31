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

from titanmoe.config import laws, old_names, other_names
from titanmoe.config.allowed_code import allow_code, code_names
from titanmoe.config.command_line import HINTS, CommandLine, split_words
from titanmoe.config.component_kinds import ComponentError, Components
from titanmoe.config.field_values import WrongType, closest, convert, convert_words, nearest_field, shorten, value_text
from titanmoe.config.fields import Field, build, fields, flatten, help_page, own_fields, tables, to_toml, toml_value
from titanmoe.config.model_file import ModelFile, changed_paths, disagreements, listed_as
from titanmoe.config.recipe import Recipe, RecipeError, find_recipe, read_recipe
from titanmoe.config.schema import OWN, Config

_UNLISTED = re.compile(r"and (\d[\d,]*) more ")
"""How the last of many problems begins, which stands for those that are not listed."""


class ConfigError(ValueError):
    """A config that cannot run. `problems` has every reason, `source` says where the config comes from."""

    def __init__(self, problems: list[str], source: str = ""):
        super().__init__(problems, source)  # its arguments, from which pickle makes it again
        self.problems, self.source = problems, source

    def __str__(self) -> str:
        return format_problems(self.problems, self.source)


def format_problems(problems: Sequence[str], source: str = "") -> str:
    """Return a header with the count and the source, then the problems by number.

    A last problem that reads "and N more ..." counts as N.
    """
    if len(problems) == 1 and not source:
        return f"error: {problems[0]}"
    unlisted = _UNLISTED.match(problems[-1]) if problems else None
    total = len(problems) - 1 + int(unlisted[1].replace(",", "")) if unlisted else len(problems)
    count = "1 problem" if total == 1 else f"{total:,} problems"
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
    components: Components,
    check: Callable[[Config], list[str]],
    resolve: Callable[[Config], Config] | None = None,
) -> Config:
    """The config that a command line stands for; ConfigError with everything that is wrong if it cannot run.

    components: what names of components stand for. check and resolve: see `Draft.finish`.
    """
    return read_draft(argv, components).finish(check, resolve)


@dataclass(frozen=True)
class Draft:
    """What recipe and command line say, before the mapping is checked. Made by `read_draft`."""

    argv: Sequence[str]
    components: Components
    command_line: CommandLine
    settings: Settings
    fallback: dict[str, Any]
    """Of every field, the value that it has if it is not set, or cannot be set."""
    config: Config | None
    """None if the recipe cannot be read."""

    @property
    def problems(self) -> list[str]:
        return self.settings.problems

    @property
    def source(self) -> str:
        """Where it comes from, for a message."""
        words = self.command_line
        return " and ".join(filter(None, [words.recipe, "the command line" * bool(words.overrides or words.problems)]))

    def error(self, *problems: str) -> ConfigError:
        """With these problems, after its own."""
        return ConfigError([*self.problems, *problems], self.source if self.problems else "")

    def with_words(self, words: Sequence[str]) -> Draft:
        """With these at the end of the command line. The recipe is not read again."""
        return read_draft([*self.argv, *words], self.components, self.settings.recipe)

    def finish(self, check: Callable[[Config], list[str]], resolve: Callable[[Config], Config] | None = None) -> Config:
        """The config; ConfigError with everything that is wrong if it cannot run.

        check(config) lists what else is wrong with it, such as a mapping that does not fit. resolve(config) fills in
        what is derived, once nothing is wrong. --help and --print-config print and exit with code 0.
        """
        if self.config is None:
            raise ConfigError(self.problems, self.source)
        if self.command_line.help:
            self._print_help_and_exit()
        values, unsound = flatten(self.config), self.settings.unsound
        problems = [*self.problems, *(_mention_fallbacks(problem, unsound, values) for problem in check(self.config))]
        if problems:
            raise ConfigError(problems, self.source)
        config = resolve(self.config) if resolve else self.config
        if self.command_line.print_config:
            _print_and_exit(to_toml(config))
        return config

    def _print_help_and_exit(self) -> NoReturn:
        import shutil

        settings = self.settings
        values = self.fallback | settings.values | {"job.name": self.config.job.name}
        origins = {path: settings.where(path) for path in settings.values}
        width = min(shutil.get_terminal_size().columns, 120)
        _print_and_exit(help_page(Path(sys.argv[0]).name, values, origins, width, self.components))


def read_draft(argv: Sequence[str], components: Components, recipe: Recipe | None = None) -> Draft:
    """recipe: the one that argv names, if it has been read before."""
    words, settings = split_words(argv), Settings(recipe)
    try:
        if words.recipe is not None and recipe is None:
            settings.recipe = read_recipe(str(find_recipe(words.recipe)))
    except RecipeError as error:
        settings.problems = [str(error), *words.problems]
        return Draft(argv, components, words, settings, {}, None)
    if settings.recipe:
        _take(settings.recipe.data, "", settings)
    settings.problems += words.problems
    for path, texts in words.overrides.items():
        settings.on_command_line.add(path)
        if path in fields():
            settings.put(fields()[path], convert_words(texts, fields()[path]), shorten(" ".join(texts)) or '""')
        else:
            settings.own[path] = texts

    allow_code([*code_names(settings.values), *words.allowed_code])
    recipe_name = Path(words.recipe).stem if words.recipe else ""
    model_file = _model_file(settings, components, recipe_name)
    fallback = _fallback(settings, components, model_file)
    _take_own(settings, own_fields(fallback))
    if model_file:
        _refuse_disagreements(settings, model_file)
    values = fallback | settings.values | {"model.hf": ""}  # it has said what it is for: a resolved config stands alone
    if not values["job.name"]:
        values["job.name"] = recipe_name or f"{values['model.family']}_{values['model.size']}"
    for violation in laws.out_of_range(values):
        settings.blame(violation.fields, violation.text)
        settings.unsound.update(violation.fields)
        values |= {path: fallback[path] for path in violation.fields}
    config = build(values, components)
    for violation in laws.contradictions(config):
        if settings.unsound.isdisjoint(violation.fields):
            settings.blame(violation.fields, violation.text)
    return Draft(argv, components, words, settings, fallback, config)


@dataclass
class Settings:
    """What recipe and command line set, by path, and what is wrong with it."""

    recipe: Recipe | None
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unsound: set[str] = field(default_factory=set)
    """Fields whose value here replaces one that cannot be used: conclusions from it may be wrong."""
    on_command_line: set[str] = field(default_factory=set)
    own: dict[str, Any] = field(default_factory=dict)
    """What is set in [model.own]: values, or words of the command line. Its fields are known once the family is."""

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


# ---- the recipe


def _take(data: dict[str, Any], prefix: str, settings: Settings) -> None:
    for key, value in data.items():
        path = prefix + key
        if path in fields():
            settings.put(fields()[path], convert(value, fields()[path]), value_text(value))
        elif prefix == f"{OWN}.":
            settings.own[path] = value
        elif (path in tables() or old_names.is_old_table(path)) and isinstance(value, dict):
            _take(value, f"{path}.", settings)
        elif path in tables():
            settings.blame((path,), f"{path} = {value_text(value)} is not a table: write [{path}] and its fields below")
        else:
            kind = "table" if isinstance(value, dict) else "key"
            few = len(settings.problems) < HINTS
            hint = old_names.advise(path, value) or (_hint(path) if few else "--help lists all fields")
            settings.blame((path,), f"unknown {kind} {shorten(path)}: {hint}")


def _take_own(settings: Settings, own: dict[str, Field]) -> None:
    """own: the fields of [model.own] that the family has."""
    family_known = settings.unsound.isdisjoint(("model.family", "model.size"))
    for path, value in settings.own.items():
        if path in own and path in settings.on_command_line:
            settings.put(own[path], convert_words(value, own[path]), shorten(" ".join(value)) or '""')
        elif path in own:
            settings.put(own[path], convert(value, own[path]), value_text(value))
        elif family_known:
            near = closest(path.removeprefix(f"{OWN}."), [field.name for field in own.values()])
            known = f"the family's are {', '.join(own)}" if own else "the family has none of its own"
            hint = f"did you mean {OWN}.{near}?" if near else known
            settings.blame((path,), f"unknown key {shorten(path)}: {hint}")


def _hint(path: str) -> str:
    name = path.replace("-", "_")
    near, table = other_names.field_of(name) or nearest_field(path), path.rpartition(".")[0]
    if name in other_names.ADVICE:
        return other_names.ADVICE[name]
    if near:
        return f"did you mean {near}?"
    if table in tables():
        return f"[{table}] has {', '.join(field.name for field in fields().values() if field.table == table)}"
    return f"the tables are {', '.join(tables())}"


# ---- the rest


def _model_file(settings: Settings, components: Components, recipe_name: str) -> ModelFile | None:
    """What model.hf says; None if it is not set, or refused."""
    if not settings.values.get("model.hf") or components.read_model_file is None:
        return None
    values = flatten(Config()) | settings.values
    values["job.name"] = values["job.name"] or recipe_name
    try:
        return components.read_model_file(values)
    except ConfigError as error:
        for problem in error.problems:
            settings.blame(("model.hf",), problem)
        settings.unsound.update(_other_model_fields(settings))
        return None


def _other_model_fields(settings: Settings) -> set[str]:
    """Fields of [model] that are not set."""
    return {path for path, field in fields().items() if field.table == "model"} - settings.values.keys()


def _refuse_disagreements(settings: Settings, file: ModelFile) -> None:
    for path in disagreements(file, settings.values, settings.values.get("model.change", [])):
        value, theirs = toml_value(settings.values.pop(path)), toml_value(file.fixed[path])
        settings.unsound.add(path)
        settings.blame(
            (path,),
            f"{path} = {value}, but {file.source} says {theirs}: leave it out, or, if the model is to differ from its "
            f"file, list {toml_value(listed_as(path))} in model.change",
        )


def _fallback(settings: Settings, components: Components, model_file: ModelFile | None) -> dict[str, Any]:
    """Return the value of every field that neither recipe nor command line sets.

    A component that cannot be used is refused, and its field has its default.
    """
    defaults, presets, fixed, from_file = flatten(Config()), {}, {}, {}
    if model_file:
        from_file = model_file.defaults | model_file.fixed
        changes = changed_paths(settings.values.get("model.change", []))
        fixed = {path: value for path, value in model_file.fixed.items() if path not in changes}
    for kind in components.kinds:
        values = defaults | from_file | settings.values | fixed
        try:
            specs = kind.specs_of(values[kind.field])
            preset = {path: value for spec in specs for path, value in spec.preset(values).items()}
        except ComponentError as error:
            settings.blame(error.fields, str(error))
            for path in error.fields:
                settings.unsound.add(path)
                settings.values.pop(path, None)
            preset = {}
        presets |= preset
    if settings.values.get("training.epochs"):
        presets["training.steps"] = -1
    family_fields = ("model.family", "model.size")
    if not settings.unsound.isdisjoint(family_fields):
        settings.unsound.update(_other_model_fields(settings))
    return defaults | presets | from_file


def _mention_fallbacks(problem: str, unsound: set[str], values: dict[str, Any]) -> str:
    """Names the fields in a problem whose values are not the user's, because those were refused."""
    stand_ins = [path for path in values if path in unsound and re.search(rf"\b{path.rpartition('.')[2]}\b", problem)]
    if not stand_ins:
        return problem
    values_text = ", ".join(f"{path} = {toml_value(values[path])}" for path in stand_ins)
    return f"{problem} (taking {values_text}, because what was given is refused above)"


def _first_rank() -> bool:
    return os.environ.get("RANK", "") in ("", "0")


def _print_and_exit(text: str) -> NoReturn:
    if _first_rank():
        try:
            print(text, end="", flush=True)
        except BrokenPipeError:  # as in `train.py --help | head`: leave Python nothing to flush at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
