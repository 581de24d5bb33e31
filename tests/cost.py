"""What tests cost: CPU-seconds of their processes, by folder, next to the budget in tests/budget.toml.

CPU-seconds and not wall-clock time, which mostly shows what else the machine is doing. A test pays for this process,
for those that it started and for the ranks of its pools (tests/world.py).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from titanmoe.config.recipe import toml

BUDGET = Path(__file__).with_name("budget.toml")
FAIL_AT = 2.0
"""Multiple of the budget, in CI. Processors differ by less."""
START = 20.0
"""The first test in a worker pays for its processes' imports."""
LONG = (
    "test_parity", "rehearse/test_clean", "checkpoint/test_local", "ops/test_interpreter", "test_extending",
    "test_launch_scripts", "parallel/test_compiled", "checkpoint_hf/test_fields", "moe/test_dispatch",
    "rehearse/test_memory", "parallel/test_pairs", "data/test_loader", "train/test_validation",
    "ops/test_kernels_compile", "moe/test_compile", "moe/test_symmetric", "train/test_watch", "train/test_skips",
)  # fmt: skip
"""The files that take longest. They come first: the worker that got one of them last would be waited for."""
PROPERTY = "cpu_s"
TICKS = os.sysconf("SC_CLK_TCK")


def children(pid: int | str) -> list[int]:
    out = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            out += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:  # it has ended, or this kernel has no such file
        pass
    return out


def ticks(pid: int | str) -> int:
    """CPU ticks of a process and of those of its children that it has waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return sum(map(int, stat.rpartition(")")[2].split()[11:15]))


def family() -> Iterator[int | str]:
    """This process, its children, and theirs: ranks are children of the fork server."""
    yield "self"
    for child in children("self"):
        yield child
        yield from children(child)


class Meter:
    """CPU-seconds since the last reading."""

    def __init__(self) -> None:
        self.last = 0
        self.read()

    def read(self) -> float:
        now = sum(ticks(pid) for pid in family())
        used, self.last = max(0, now - self.last), now
        return used / TICKS


def place(nodeid: str) -> str:
    """The folder of a test, or its file if it is not in one."""
    parts = nodeid.partition("::")[0].removeprefix("tests/").split("/")
    return parts[0].removesuffix(".py")


def turn(nodeid: str) -> int:
    """The position of a test's file in LONG."""
    file = nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
    return LONG.index(file) if file in LONG else len(LONG)


class Bill:
    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()

    def add(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.spent[place(report.nodeid)] += dict(report.user_properties).get(PROPERTY, 0.0)

    def lines(self, budget: dict[str, float]) -> Iterator[str]:
        yield f"{'CPU-seconds of':<24}{'spent':>8}{'budget':>8}"
        for name in sorted(self.spent.keys() | budget.keys(), key=lambda name: -self.spent[name]):
            yield f"{name:<24}{self.spent[name]:>8.1f}{budget.get(name, 0):>8.0f}"
        yield f"{'all':<24}{sum(self.spent.values()):>8.1f}{sum(budget.values()):>8.0f}"

    def beyond(self, budget: dict[str, float]) -> list[str]:
        """Folders that spent more than FAIL_AT times their budget, and folders without one."""
        return [
            f"tests/{name} took {spent:.1f} CPU-seconds, over {FAIL_AT:g} times its budget of {budget.get(name, 0):g} "
            f"and {START:g} besides: make its tests cheaper (--durations=20 shows which), or raise it in budget.toml"
            for name, spent in self.spent.items()
            if spent > FAIL_AT * budget.get(name, 0) + START
        ]


def read_budget() -> dict[str, float]:
    return toml().loads(BUDGET.read_text())["cpu_seconds"]


def whole_suite(config: pytest.Config) -> bool:
    """Whether nothing was picked by name, so that the cost of folders can be judged."""
    picked = {"-k", "-m", "--lf"}.intersection(config.invocation_params.args)
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not picked
