"""Any text and any command line ends in a config or in problems, one a line, after a bounded amount of work."""

import random
import sys
from functools import cache
from pathlib import Path

import pytest

import titanmoe.parallel.pipeline  # noqa: F401 (torch is loaded before steps are counted)
from titanmoe.components import COMPONENTS
from titanmoe.config import Config, ConfigError, load
from titanmoe.config.fields import fields, toml_value
from titanmoe.config.ranges import LAYERS
from titanmoe.models.families import names
from titanmoe.train.refusals import refusals

ROOT = Path(__file__).parents[2]
CALLS = 400 * LAYERS
"""The limit for one config, in Python function calls, loop lines and generator steps: the work grows with the layers,
by about 360 for each."""
WORLDS = (1, 2, 3, 8, 12, 64, 4096)
NUMBERS = [0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 64, 97, 128, 255, 1000, 4099, 65_537, 2**20, 2**31 - 1, 2**31, 10**9]
NUMBERS += [-1, -2, 2**61 - 1, 2**62, 2**63 - 1, 2**63, -(2**63), 10**18, 10**30, 10**400]
FLOATS = [0.0, 0.5, 1.0, -0.0, -1.5, 1e-300, 1e18, 1e300, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", ".", "..", "/", "a/b", "a\0b", "x" * 300, "日本", "\u202e", "none", "auto", "true", "7", "-1", "[", "{}"]
TEXTS += ["\ud800", "%s", "*", "my.toml", "~nobody", "a\nb", "debug", "bytes"]


@cache
def recipes() -> list[str]:
    return [path.read_text() for path in sorted((ROOT / "train_configs").glob("debug*.toml"))]


def nested(rng: random.Random) -> str:
    """A value in nested lists or tables: some depths are too much for Python's recursion."""
    depth = rng.choice([2, 15, 18, 100, 400, 5000])
    opening, closing = rng.choice([("[", "]"), ("{a = ", "}"), ("[{a = ", "}]")])
    return opening * depth + rng.choice(["1", "", '"x"']) + closing * (depth - rng.choice([0, 0, 0, 1]))


def value(rng: random.Random, field=None) -> object:
    """A value that is likely to fit the field, or any."""
    if field is not None and rng.random() < 0.8:
        if field.choices:
            return rng.choice(field.choices)
        kind, count = field.item or field.kind, rng.choice([0, 1, 2, 3])
        one = {
            int: lambda: rng.choice(NUMBERS if rng.random() < 0.3 else NUMBERS[:17]),
            float: lambda: rng.choice(FLOATS if rng.random() < 0.3 else FLOATS[:3]),
            bool: lambda: rng.random() < 0.5,
            str: lambda: rng.choice(TEXTS),
            dict: lambda: {"match": [rng.choice(TEXTS)], rng.choice(["lr", "x"]): rng.choice([*FLOATS, *TEXTS])},
        }[kind]
        return [one() for _ in range(count)] if field.item else one()
    return rng.choice([rng.choice(NUMBERS), rng.choice(FLOATS), rng.choice(TEXTS), True, [1, "a"], [[]], {"a": 1}])


def written(rng: random.Random, given: object) -> str:
    roll = rng.random()
    if roll < 0.03:
        return nested(rng)
    if roll < 0.05:
        return "0x" + "f" * 5000
    return toml_value(given).replace("\ud800", "\\ud800") if roll < 0.95 else str(given)


def recipe(rng: random.Random) -> str:
    """One of the project's recipes or none, with fields changed, and occasionally truncated or stretched."""
    if rng.random() < 0.3:
        text = rng.choice(recipes())
        lines = text.split("\n")
    else:
        by_table: dict[str, list[str]] = {}
        for path in rng.sample(list(fields()), rng.choice([1, 2, 5, 20])):
            field = fields()[path]
            by_table.setdefault(field.table, []).append(f"{field.name} = {written(rng, value(rng, field))}")
        if rng.random() < 0.5:
            family = rng.choice(list(names()))
            of_model = by_table.setdefault("model", [])
            if not any(line.startswith(("family ", "size ")) for line in of_model):
                of_model += [f'family = "{family}"', f'size = "{rng.choice(names()[family])}"']
        lines = [line for table, its in by_table.items() for line in [f"[{table}]", *its]]
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        at = rng.randrange(len(lines) + 1)
        odd = [
            lambda: ".".join(["a"] * rng.choice([3, 30, 3000])) + " = 1",
            lambda: f"x = {nested(rng)}",
            lambda: "[" + ".".join(["parallelism", "experts"] * rng.choice([1, 9, 900])) + "]",
            lambda: "\n".join(f"unknown_{n} = {n}" for n in range(rng.choice([1, 400]))),
            lambda: "paths = [\n" + "".join(f'  "{n}",\n' for n in range(rng.choice([3, 2000]))) + "]",
            lambda: f'"{rng.choice(["", "é", " ", "." * 99])}" = 1',
            lambda: "".join(chr(rng.randrange(32, 127)) for _ in range(40)),
            lambda: f"[[{rng.choice(list(fields())).split('.')[0]}]]",
        ]
        lines.insert(at, rng.choice(odd)())
    text = "\n".join(lines)
    if rng.random() < 0.1:
        text = text[: rng.randrange(len(text) + 1)]
    return text


def overrides(rng: random.Random) -> list[str]:
    argv: list[str] = []
    for _ in range(rng.choice([0, 0, 1, 2, 5])):
        path = (
            rng.choice(list(fields())) if rng.random() < 0.9 else rng.choice(["training", "x" * 3000, "tp", "", "a.b"])
        )
        given = value(rng, fields().get(path))
        text = (
            nested(rng) if rng.random() < 0.1 else toml_value(given) if isinstance(given, list | dict) else str(given)
        )
        argv += [f"--{path}={text}"] if rng.random() < 0.7 else [f"--{path}", text]
    return argv


class TooMuch(BaseException):
    """None of the program's handlers takes it for a user's mistake."""


class Counted:
    """Stops whatever takes too many steps: calls of Python functions, lines they run, and elements that generators
    give."""

    def __init__(self, most: int):
        self.most, self.made = most, 0

    def __enter__(self) -> "Counted":
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self.before)

    def trace(self, frame, event, arg):
        if "titanmoe" not in frame.f_code.co_filename and "toml" not in frame.f_code.co_filename:
            return None
        self.made += 1
        if self.made > self.most:
            raise TooMuch(f"more than {self.most} steps, now in {frame.f_code.co_filename}:{frame.f_lineno}")
        return self.trace


def answered(seed: int, folder: Path) -> int:
    """Steps that the seed's config took; AssertionError, or whatever was raised, if there was no clean answer."""
    rng = random.Random(seed)
    argv, world = overrides(rng), rng.choice(WORLDS)
    if rng.random() < 0.85:
        file = folder / "my.toml"
        file.write_bytes(recipe(rng).encode("utf-8", "surrogatepass"))
        argv = ["--config", str(file), *argv]
    with Counted(CALLS) as counted:
        try:
            config = load(argv, COMPONENTS, lambda config: refusals(config, world))
        except ConfigError as error:
            assert error.problems and all(error.problems)
            return counted.made
    assert isinstance(config, Config)
    return counted.made


def run(seeds: range, folder: Path) -> None:
    failed = []
    for seed in seeds:
        try:
            answered(seed, folder)
        except (Exception, TooMuch) as error:
            failed.append(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}")
    assert not failed, "\n".join([f"{len(failed)} of {len(seeds)}", *failed[:20]])


@pytest.fixture(autouse=True)
def from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_sixty_configs(tmp_path):
    run(range(60), tmp_path)


@pytest.mark.slow
def test_two_thousand_configs(tmp_path):
    run(range(2000), tmp_path)
