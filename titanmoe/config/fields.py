"""The schema as a flat dict of fields by path ("parallelism.experts.ep"), and what is printed from it.

`load` reads recipes with `fields` and `build`; `with_values` changes a config; `to_toml` writes resolved recipes,
`help_page` prints --help, `update_page` rewrites docs/config.md, `replace_marked` what stands between marks of any
page. Docstrings come from the source of `titanmoe.config.schema`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from titanmoe.config import schema
from titanmoe.config.component_kinds import Components
from titanmoe.config.ranges import Range, number_text
from titanmoe.config.schema import OWN, Config, Own

LISTED = "`titanmoe train --help` lists them; one of your own is called `module:NAME` ([extending.md](extending.md))."
"""The text of docs/config.md in place of {components}, so that the page does not change with the list."""
BEGIN, END = "<!-- fields: written by `python -m titanmoe.config docs/config.md` -->", "<!-- end of fields -->"


class Field(NamedTuple):
    """A field of the schema, or of [model.own], the table of a model family's own fields."""

    path: str
    table: str
    name: str
    kind: Any
    """The type: int, float, bool, str, a list of int, float, str or dict (tables), or a Literal of strings."""
    default: Any

    @property
    def choices(self) -> tuple[str, ...]:
        """The strings that the field can have, if its type is a Literal; else empty."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def item(self) -> Any:
        """The type of the items, if the field is a list; else None."""
        return get_args(self.kind)[0] if get_origin(self.kind) is list else None

    @property
    def expected(self) -> str:
        """The type in words that complete "must be ...", such as "a list of integers"."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.item:
            kinds = {int: "integers", float: "numbers", str: "strings", dict: "tables"}
            return f"a list of {kinds[self.item]}"
        return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[self.kind]


type_hints = cache(get_type_hints)
"""Cached get_type_hints: the types of a table's fields, by name. It takes longer than the rest of reading a recipe."""


def _is_table(kind: Any) -> bool:
    return is_dataclass(kind) or kind is Own


@cache
def tables() -> dict[str, type]:
    """Return the class of every TOML table by its path, in the schema's order, outer tables before nested ones."""

    def walk(cls: type, prefix: str) -> dict[str, type]:
        paths: dict[str, type] = {}
        for name, kind in type_hints(cls).items():
            if _is_table(kind):
                paths |= {prefix + name: kind, **walk(kind, f"{prefix}{name}.")}
        return paths

    return walk(Config, "")


@cache
def fields() -> dict[str, Field]:
    """Return every field of the schema by its path, such as "moe.dispatcher", in the schema's order.

    Those of [model.own] are not among them (`own_fields`).
    """
    return {
        f"{table}.{name}": Field(f"{table}.{name}", table, name, kind, getattr(cls(), name))
        for table, cls in tables().items()
        for name, kind in type_hints(cls).items()
        if not _is_table(kind)
    }


@cache
def ranges() -> dict[str, Range]:
    """Return the allowed range of every number by the field's path; for a list, the range of its items."""
    return {
        f"{table}.{name}": kind.__metadata__[0]
        for table, cls in tables().items()
        for name, kind in get_type_hints(cls, include_extras=True).items()
        if get_origin(kind) is Annotated
    }


def own_fields(values: Mapping[str, Any]) -> dict[str, Field]:
    """Return the fields of [model.own], the table of the model family's own fields, by path.

    Args:
        values: the values of all fields by path; those of [model.own] give the types and defaults.
    """
    return {
        path: Field(path, OWN, path.removeprefix(f"{OWN}."), type(value), value)
        for path, value in values.items()
        if path.startswith(f"{OWN}.")
    }


def flatten(config: Config) -> dict[str, Any]:
    """Return the value of every field of a config, those of [model.own] included, by path, such as "moe.dispatcher"."""
    values = {}
    for path in fields():
        at: Any = config
        for name in path.split("."):
            at = getattr(at, name)
        values[path] = at
    return values | {f"{OWN}.{name}": value for name, value in config.model.own.items()}


def to_tables(config: Config) -> dict[str, dict[str, Any]]:
    """Return the config as nested dicts of plain values, the form in which checkpoints record it."""
    return {name: asdict(getattr(config, name)) for name in tables() if "." not in name}


def build(values: Mapping[str, Any], components: Components | None = None) -> Config:
    """Return a Config with these values, unchecked; fields that are not in `values` have the schema's defaults.

    Args:
        values: values by path, such as "moe.dispatcher". Paths that the schema lacks are ignored, but for [model.own].
        components: the config's components; None for none.
    """

    def table(cls: type, prefix: str) -> Any:
        if cls is Own:
            return Own({field.name: values[path] for path, field in own_fields(values).items()})
        members = {}
        for name, kind in type_hints(cls).items():
            if _is_table(kind):
                members[name] = table(kind, f"{prefix}{name}.")
            elif prefix + name in values:
                members[name] = values[prefix + name]
        return cls(**members)

    return replace(table(Config, ""), components=components or Components())


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a config, or of one of its tables, with some values replaced, unchecked.

    Args:
        config: the config or table.
        values: new values by dotted path, such as "parallelism.tp".
    """
    for path, value in values.items():
        name, _, rest = path.partition(".")
        config = replace(config, **{name: with_values(getattr(config, name), {rest: value}) if rest else value})
    return config


def toml_value(value: Any) -> str:
    """Return a value as TOML text on one line, such as `[1, 2]` or `"a"`; dicts become inline tables."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        import json

        # JSON's escapes are TOML's too, but JSON leaves DEL unescaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    return number_text(value) if isinstance(value, int) else str(value)


def to_toml(config: Config) -> str:
    """Return the TOML text of a recipe that has every field and loads to the same config.

    With training.epochs, training.steps is -1, and the number of steps is a comment, because it depends on the data.
    """
    values, notes = flatten(config), {}
    if config.training.epochs:
        steps = values["training.steps"]
        values["training.steps"], notes["training.steps"] = -1, "" if steps == -1 else f"  # {steps} here"
    known = [*fields().values(), *own_fields(values).values()]
    parts = []
    for table in tables():
        lines = [f"{f.name} = {toml_value(values[f.path])}{notes.get(f.path, '')}" for f in known if f.table == table]
        parts += ["\n".join([f"[{table}]", *lines]) + "\n"] if lines else []
    return "\n".join(parts)


@cache
def docstrings() -> dict[str, str]:
    """Return the docstring of every field of the schema by path, each on one line; "" for a field without one.

    A number's range is added if it has an upper end or leaves out its lower one. The placeholder "{components}" is not
    yet replaced.
    """
    import ast

    docs: dict[tuple[str, str], str] = {}
    for cls in ast.parse(Path(schema.__file__).read_text(encoding="utf-8")).body:
        if isinstance(cls, ast.ClassDef):
            for statement, below in zip(cls.body, cls.body[1:], strict=False):
                if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
                    docs[cls.name, ast.unparse(statement.target)] = " ".join(ast.literal_eval(below.value).split())
    texts = {}
    for path, field in fields().items():
        text = docs.get((tables()[field.table].__name__, field.name), "")
        limits = ranges().get(path)
        bounded = limits and (limits.high is not None or limits.without_low)
        texts[path] = f"{text} {str(limits).capitalize()}." if bounded else text
    return texts


def help_page(
    program: str, values: Mapping[str, Any], origins: Mapping[str, str], width: int, components: Components
) -> str:
    """Return the text of --help: usage, then the fields of each table with their values, origins and docstrings.

    Args:
        program: name of the command.
        values: the value of every field, by path.
        origins: where values that were set come from ("recipe.toml:4", "command line"), by path.
        width: columns of the terminal.
    """
    import textwrap

    def paragraph(text: str, indent: str = "") -> str:
        return textwrap.fill(
            text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )

    lines = [
        f"usage: {program} [--config RECIPE.toml] [--TABLE.FIELD VALUE ...] [--print-config] [--help]",
        "",
        "  --config RECIPE.toml  the recipe of the run, in TOML; without one, the defaults",
        "  --print-config        print what would run, every field resolved, as a recipe; start nothing",
        "  --allow-code MODULE:NAME  code of your own that the record of a teacher or of adapters may name",
        "  --help, -h            this page, with the values of the recipe and the overrides given; start nothing",
        "",
        paragraph(
            "Every field below can be set in the recipe under its [table] or on the command line, which wins: "
            "--training.steps 10, --training.steps=10, --compile.enable (that is: true), --data.paths a.txt b.txt. "
            "In names, - and _ mean the same."
        ),
    ]
    known = [*fields().values(), *own_fields(values).values()]
    for table, cls in tables().items():
        lines += ["", paragraph(f"[{table}] {cls.__doc__}"), ""]
        for field in known:
            if field.table == table:
                origin = f"   ({origins[field.path]})" if field.path in origins else ""
                kind = components.kind_of(field.path)
                placeholder = _placeholder(field)
                if kind and not field.item:
                    placeholder = "{" + ",".join([*kind.table, "MODULE:NAME"]) + "}"
                lines.append(f"  --{field.path} {placeholder} = {toml_value(values[field.path])}{origin}")
                if text := docstrings().get(field.path):
                    lines.append(paragraph(text.replace("{components}", kind.summary()) if kind else text, " " * 6))
    return "\n".join(lines) + "\n"


def _placeholder(field: Field) -> str:
    if field.choices:
        return "{" + ",".join(field.choices) + "}"
    if field.item:
        return f"[{field.item.__name__.upper()} ...]"
    return {int: "INT", float: "FLOAT", bool: "{true,false}", str: "STR"}[field.kind]


def markdown() -> str:
    """Return the reference of docs/config.md: a Markdown table for each TOML table, with defaults and docstrings."""
    lines = []
    for table, cls in tables().items():
        lines += [f"### `[{table}]`", "", cls.__doc__ or "", ""]
        if cls is Own:
            continue
        lines += ["| key | type | default | what it does |", "| --- | --- | --- | --- |"]
        for field in fields().values():
            if field.table == table:
                choices = ", ".join(f"`{choice}`" for choice in field.choices)
                kind = choices or field.expected.removeprefix("an ").removeprefix("a ")
                text = docstrings()[field.path].replace("{components}", LISTED).replace("|", "\\|").replace("*", "\\*")
                lines.append(f"| `{field.name}` | {kind} | `{toml_value(field.default)}` | {text} |")
        lines.append("")
    return "\n".join(lines)


def update_page(page: str) -> str:
    """Return the text of docs/config.md with its generated reference rewritten; other pages as they are."""
    if BEGIN not in page:
        return page
    return replace_marked(page, BEGIN, END, f"\n\n{markdown()}\n")


def replace_marked(page: str, begin: str, end: str, *texts: str) -> str:
    """Return a page with what stands between each mark `begin` and the next mark `end` replaced.

    `texts` has the new text for each mark `begin`, in order; ValueError for another number.
    """
    before, *parts = page.split(begin)
    parts = [text + end + part.partition(end)[2] for text, part in zip(texts, parts, strict=True)]
    return begin.join([before, *parts])
