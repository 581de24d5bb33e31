"""Hardware files: those that are shipped are sound, and what is wrong with another is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanmoe.config import ConfigError
from titanmoe.plan.devices import SHIPPED, names, read_device


@pytest.mark.parametrize("name", names())
def test_every_figure_has_a_source(name: str) -> None:
    device = read_device(name)
    assert all(device.sources.values())
    fractions = [device.peak_fraction(n, n, n) for n in (64, 256, 1024, 4096, 16384, 65536)]
    assert fractions == sorted(fractions) and 0 < fractions[0] < fractions[-1] <= 1


def test_the_usual_ones_are_there() -> None:
    assert {"h100", "h200", "h800", "b200", "gb200", "a100", "mi300x", "cpu"} == set(names())


def test_the_case_of_a_name_does_not_matter() -> None:
    assert read_device("H100") == read_device("h100")


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    text = (SHIPPED / "h100.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("network =")]
    lines = ["bandwidth = { value = 3.35, source = 'in TB/s' }" if x.startswith("bandwidth") else x for x in lines]
    lines = ["memory = 85e9" if x.startswith("memory") else x for x in lines]
    (file := tmp_path / "mine.toml").write_text("\n".join(lines) + "\nspeed = 1\n")
    with pytest.raises(ConfigError) as caught:
        read_device(str(file))
    for words in (
        "network is missing",
        "bandwidth = 3.35 is absurd: expected 1e+10 to 1e+14 bytes per second",
        "memory has no source",
        "speed is no figure",
    ):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match=r"h900 is not known: use a100, b200"):
        read_device("h900")
    with pytest.raises(ConfigError, match="No such file"):
        read_device(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("reserved", "85e9", "reserved = 8.5e+10 leaves nothing of memory = 8.5e+10 to tensors"),
        ("node", "7.5", "node = 7.5 is not a whole number of devices"),
        ("domain", "4", "domain = 4 is smaller than node = 8"),
    ],
)
def test_figures_that_contradict_each_other(key: str, value: str, says: str, tmp_path: Path) -> None:
    lines = [x for x in (SHIPPED / "h100.toml").read_text().splitlines() if not x.startswith(f"{key} =")]
    (file := tmp_path / "mine.toml").write_text("\n".join([*lines, f"{key} = {{ value = {value}, source = 'mine' }}"]))
    with pytest.raises(ConfigError) as caught:
        read_device(str(file))
    assert caught.value.problems == [says]
