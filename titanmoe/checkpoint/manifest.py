"""manifest.json: what a checkpoint is, the size and CRC-32 of its files, and a SHA-256 of itself. Without torch.

Manifests may come from strangers: parse() checks types and sizes, and raises CheckpointError whatever the bytes are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanmoe.checkpoint.safe_files import ANOTHER, CheckpointError
from titanmoe.config import old_names
from titanmoe.config.allowed_code import CodeNotAllowed, refuse_code
from titanmoe.config.field_values import WrongType, convert, value_text
from titanmoe.config.fields import fields, own_fields
from titanmoe.config.parse_json import parse_json

FORMAT = 2
"""Format 1 described tensors by torch's .metadata, a pickle, and its manifest had no checksum: it is no longer read."""
MOST_BYTES = 1 << 28
"""Limit on the bytes of a manifest; one for 100,000 files has a tenth of it."""
DEEPEST = 16
"""Limit on nesting."""
OPEN = "{\n"
HEAD = b'{\n "sha256": "'
"""The first bytes of every manifest; the SHA-256 of all other bytes follows."""
AT, END = len(HEAD), len(HEAD) + 64


@dataclass(frozen=True)
class Checksum:
    """The size and CRC-32 that a file must have."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json."""

    step: int
    number: int
    """The checkpoint's number in the order in which the run wrote them; a run may go back to an earlier step."""
    files: dict[str, Checksum]
    record: dict[str, Any] = field(default_factory=dict)
    """The run's config (under the options' current names), mapping, loader state, tokens and versions."""

    def text(self) -> str:
        """Return this manifest as the text of manifest.json, with its SHA-256."""
        files = {name: {"bytes": s.bytes, "crc32": f"{s.crc32:08x}"} for name, s in sorted(self.files.items())}
        data = {"format": FORMAT, "step": self.step, "number": self.number, "record": self.record, "files": files}
        return with_checksum(json.dumps(data, indent=1))


def with_checksum(text: str) -> str:
    """Insert the SHA-256 of all other bytes into a manifest's JSON text, as its first entry; return the new text.

    The text is that of json.dumps(..., indent=1).
    """
    rest = f'",\n{text.removeprefix(OPEN)}'.encode()
    return (HEAD + _sha256(HEAD + rest) + rest).decode()


def _sha256(data: bytes) -> bytes:
    """Return the SHA-256 of `data` as 64 hexadecimal digits in ASCII."""
    return hashlib.sha256(data).hexdigest().encode()


def parse(data: bytes, source: Path) -> Manifest:
    """Parse and check the contents of a manifest.json; old option names in its config are replaced by current ones.

    Raises:
        CheckpointError: in one line that names `source`, the file's path, whatever the bytes are.
    """
    try:
        if data.startswith(HEAD) and data[AT:END] != _sha256(data[:AT] + data[END:]):
            raise ValueError("the SHA-256 at the top does not match the rest, which has changed")
        content = parse_json(data)
        version = content["format"]
        if type(version) is not int:
            raise ValueError(f"format {version!r}")
        if version != FORMAT:
            raise CheckpointError(
                f"{source.parent} has checkpoint format {version}, this titanmoe reads format {FORMAT}: "
                "use the version that wrote it"
            )
        if not data.startswith(HEAD):
            raise ValueError("there is no SHA-256 at the top")
        if type_error := next(type_errors(content, ENTRY_TYPES), ""):
            raise ValueError(type_error)
        old_names.rename(content["record"].get("config", {}))
        files = {name: Checksum(s["bytes"], int(s["crc32"], 16)) for name, s in content["files"].items()}
        return Manifest(content["step"], content["number"], files, content["record"])
    except RecursionError:
        raise CheckpointError(f"{source} is damaged: lists or objects are nested too deep", ANOTHER) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source} is damaged: {type(error).__name__} {error}", ANOTHER) from None


# ---- types


COUNT, NUMBER, ANY = "a count", "a number", "anything"
CRC = "8 hexadecimal digits"
AXES = {"*": COUNT}
ENTRY_TYPES: dict[str, Any] = {
    "step": COUNT,
    "number": COUNT,
    "files": {"*": {"bytes": COUNT, "crc32": CRC}},
    "record": {
        "step": COUNT,
        "tokens": NUMBER,
        "seed": int,
        "made": str,
        "versions": {"*": str},
        "loader": {"consumed": COUNT, "sources": [[int]]},
        "config": {"training": {"global_batch_size": int, "seq_len": COUNT}, "*": {}},
        "mapping": {"world": COUNT, "attention": AXES, "experts": AXES},
        "validation": {},
        "best": {"metric": str, "step": int, "without_gain": COUNT},
    },
}
"""The type of each entry by key, "*" standing for any key. Other keys may hold anything nested at most DEEPEST."""


def type_errors(value: Any, expected: Any, path: str = "", depth: int = 0) -> Iterator[str]:
    """Yield an error line for each value in parsed JSON that has another type than expected. Missing keys are no error.

    Args:
        value: parsed JSON.
        expected: a type, one of COUNT, NUMBER, CRC and ANY, a dict of these by key ("*" for all other keys), or a list
            of one for all items.
        path: the value's path in the file, for the lines.
        depth: number of dicts and lists that the value is nested in.
    """
    if depth > DEEPEST:
        yield f"{path[:80]}... is nested deeper than {DEEPEST}"
    elif isinstance(expected, dict) and isinstance(value, dict):
        for key, item in value.items():
            yield from type_errors(
                item, expected.get(key, expected.get("*", ANY)), f"{path}.{key}" if path else key, depth + 1
            )
    elif isinstance(expected, list) and isinstance(value, list):
        for n, item in enumerate(value):
            yield from type_errors(item, expected[0], f"{path}[{n}]", depth + 1)
    elif expected == ANY:
        if isinstance(value, dict | list):
            inner = value.values() if isinstance(value, dict) else value
            for item in inner:
                yield from type_errors(item, ANY, path, depth + 1)
    elif not _has_type(value, expected):
        name = {dict: "a table", list: "a list"}.get(type(expected)) or (
            expected if isinstance(expected, str) else expected.__name__
        )
        yield f"{path} is {value_text(value)}, not {name}"


def _has_type(value: Any, kind: Any) -> bool:
    if kind == COUNT:
        return type(value) is int and 0 <= value < 1 << 63
    if kind == NUMBER:
        return type(value) in (int, float)
    if kind == CRC:
        return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{8}", value) is not None
    return type(value) is kind


# ---- the config in a record


def flatten_record(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dicts in one dict by dotted path, such as "model.dim", with `prefix` before each."""
    out: dict[str, Any] = {}
    for name, value in table.items():
        out |= flatten_record(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


def refuse_adapters(record: Mapping[str, Any], source: Path) -> None:
    """Raise a CheckpointError if by its record a checkpoint has LoRA adapters alone, without their base weights.

    `source` is the path of the checkpoint or its manifest, for the message.
    """
    if "base" in record:
        raise CheckpointError(
            f"{source} has only adapters, and none of the weights under them: titanmoe convert --to-hf merges them, "
            "and titanmoe generate --adapter uses them (docs/fine-tuning.md)"
        )


def unknown_fields(recorded: Mapping[str, Any]) -> list[str]:
    """Return one error line that names up to 8 fields of a recorded config that this version does not know; [] if none.

    The config is given as `flatten_record` returns it, by dotted path.
    """
    known = fields() | own_fields(recorded)
    unknown = [f"{path} = {value_text(value)}" for path, value in recorded.items() if path not in known]
    some = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
    return [f"this titanmoe does not know {some}: use the version that wrote it"] if unknown else []


def recorded_fields(record: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Return the values of the config in a checkpoint's record by dotted path, converted to the fields' types.

    Args:
        record: the manifest's record.
        source: the manifest's path, for messages.

    Raises:
        CheckpointError: this version does not know a field, one has the wrong type, or one names code that the user has
            not allowed.
    """
    recorded = flatten_record(record.get("config", {}))
    try:
        refuse_code(recorded, source)
    except CodeNotAllowed as error:
        raise CheckpointError(str(error)) from None
    known_fields = fields() | own_fields(recorded)
    fitted = {path: convert(value, known_fields[path]) for path, value in recorded.items() if path in known_fields}
    problems = unknown_fields(recorded) + [
        f"{path} = {value_text(recorded[path])} is not {known_fields[path].expected}"
        for path, value in fitted.items()
        if isinstance(value, WrongType)
    ]
    if problems:
        raise CheckpointError(f"{source}: {'; '.join(problems)}")
    return fitted
