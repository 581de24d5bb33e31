"""Rates and sizes of a device and its links, read from a TOML file in which every figure has its source.

Bytes and FLOPs per second, seconds, bytes. A link's rate is that of one device in one direction.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

from titanmoe.config import ConfigError
from titanmoe.config.recipe import toml_module

SHIPPED = Path(__file__).parent / "hardware"
RANGES: dict[str, tuple[float, float]] = {
    "node": (1, 1024),
    "domain": (1, 1024),
    "memory": (1e9, 2e12),
    "reserved": (0, 1e11),
    "communicator": (0, 1e10),
    "peer": (0, 1e10),
    "bandwidth": (1e10, 1e14),
    "peak_bfloat16": (1e10, 1e17),
    "peak_float32": (1e10, 1e17),
    "peak_fp8": (1e10, 1e17),
    "attention": (0.01, 1),
    "message_fraction": (0, 0.9),
    "link": (1e9, 1e13),
    "link_latency": (1e-8, 1e-3),
    "network": (1e7, 1e12),
    "network_latency": (1e-7, 1e-2),
    "price": (0, 1000),
}
"""Every figure of a hardware file, with the range in which it is plausible."""
INTEGERS = ("node", "domain")
UNITS = (
    dict.fromkeys(("memory", "reserved", "communicator", "peer"), " bytes")
    | dict.fromkeys(("bandwidth", "link", "network"), " bytes per second")
    | dict.fromkeys(("peak_bfloat16", "peak_float32", "peak_fp8"), " FLOPs per second")
    | dict.fromkeys(("link_latency", "network_latency"), " seconds")
)


@dataclass(frozen=True)
class Device:
    """A kind of device and its links, as a hardware file describes them."""

    name: str
    node: int
    """Devices per node, which share its network cards."""
    domain: int
    """Devices that reach each other over the fast link; more than a node where racks are wired."""
    memory: float
    """Bytes of the device."""
    reserved: float
    """Bytes that CUDA and the allocator's rounding take from tensors."""
    communicator: float
    """Bytes that NCCL takes for each communicator."""
    peer: float
    """Bytes that NCCL also takes for each rank of the fast link that is sent to directly, as in an all-to-all."""
    bandwidth: float
    """Bytes per second of the device's memory."""
    peak_bfloat16: float
    """FLOPs per second of dense matrix products."""
    peak_float32: float
    peak_fp8: float
    attention: float
    """Fraction of the peak that attention kernels reach, forward and backward together."""
    message_fraction: float
    """Fraction of the multiprocessors that the kernels of messages take from computation meanwhile."""
    link: float
    """Bytes per second of the fast link, one direction."""
    link_latency: float
    network: float
    """Bytes per second of the device's network card, one direction."""
    network_latency: float
    price: float
    """US dollars per hour and device."""
    curve: tuple[tuple[float, float], ...]
    """Fraction of the peak that a matrix product reaches, by the harmonic mean of its three sizes."""
    sources: dict[str, str]
    """Source of each figure, by name of the figure."""

    def peak(self, dtype: str) -> float:
        return {"bfloat16": self.peak_bfloat16, "fp8": self.peak_fp8}.get(dtype, self.peak_float32)

    def peak_fraction(self, m: float, n: float, k: float) -> float:
        """Return the fraction of the peak FLOPs that a (m, k) by (k, n) product reaches on the device's curve.

        It is interpolated in the log of the size, the harmonic mean of m, n and k; proportional to the size below the
        curve, and constant above it.
        """
        size = 3 / (1 / m + 1 / n + 1 / k)
        at = bisect_left(self.curve, (size,))
        if at == 0:
            return self.curve[0][1] * size / self.curve[0][0]
        if at == len(self.curve):
            return self.curve[-1][1]
        (a, low), (b, high) = self.curve[at - 1 : at + 1]
        return low + (high - low) * log(size / a) / log(b / a)


def names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def choose_device(gpu: str) -> Device:
    """Return the shipped device whose name is a word of `gpu`, as in "NVIDIA H100 80GB HBM3"; an H100 if none is."""
    return known_device(gpu) or read_device("h100")


def known_device(gpu: str) -> Device | None:
    """Return the shipped device whose name is a word of `gpu`, as in "NVIDIA H100 80GB HBM3"; None if none is."""
    named = next((name for name in names() if re.search(rf"\b{name}\b", gpu, re.IGNORECASE)), None)
    return read_device(named) if named else None


def read_device(name: str) -> Device:
    """Read the figures of a device.

    Args:
        name: name of a shipped device, such as "h100", in upper or lower case; or path of a file that ends in ".toml".

    Raises:
        ConfigError: the name is unknown, or the file cannot be read or has wrong figures; with all problems.
    """
    path = SHIPPED / f"{name.lower()}.toml" if name.lower() in names() else Path(name)
    if path.suffix != ".toml":
        raise ConfigError(f"--hardware = {name} is not known: use {', '.join(names())}, or a file of that form")
    try:
        data = toml_module().loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--hardware: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not TOML, or not text
        raise ConfigError(f"--hardware: {path} is not TOML: {error}") from None
    figures, sources, problems = {}, {}, []
    for key in RANGES:
        figures[key], sources[key], problem = _figure(data, key)
        problems += [problem] * bool(problem)
    points, sources["curve"], problem = _curve(data)
    problems += [problem] * bool(problem)
    problems += [
        f"{key} is no figure of a device: {', '.join([*RANGES, 'curve'])}" for key in data.keys() - RANGES - {"curve"}
    ]
    if not problems and figures["domain"] < figures["node"]:
        problems.append(f"domain = {figures['domain']:g} is smaller than node = {figures['node']:g}")
    if not problems and figures["reserved"] >= figures["memory"]:
        problems.append(
            f"reserved = {figures['reserved']:g} leaves nothing of memory = {figures['memory']:g} to tensors"
        )
    if problems:
        raise ConfigError(problems, str(path))
    node, domain = (int(figures.pop(key)) for key in INTEGERS)
    return Device(path.stem, node=node, domain=domain, **figures, curve=points, sources=sources)


def _figure(data: dict[str, Any], key: str) -> tuple[float, str, str]:
    """Return (value, source, problem) of the figure `key` of a hardware file.

    `problem` is "" for a plausible number with a source. A missing value or source is 0.0 or "".
    """
    entry, (least, most) = data.get(key), RANGES[key]
    if entry is None:
        return 0.0, "", f'{key} is missing: give {key} = {{ value = ..., source = "..." }}'
    value, source = (entry.get("value"), entry.get("source")) if isinstance(entry, dict) else (entry, None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0, "", f"{key} = {value!r} is not a number"
    problem = ""
    if not source:
        problem = f"{key} has no source: say where {value:g} comes from"
    elif not least <= value <= most:
        problem = f"{key} = {value:g} is absurd: expected {least:g} to {most:g}{UNITS.get(key, '')}"
    elif key in INTEGERS and value != int(value):
        problem = f"{key} = {value:g} is not a whole number of devices"
    return float(value), str(source or ""), problem


def _curve(data: dict[str, Any]) -> tuple[tuple[tuple[float, float], ...], str, str]:
    """Return (points, source, problem) of a hardware file's curve, a point as (size, fraction of the peak).

    `problem` is "" if the curve is sound; else there are no points and no source.
    """
    entry = data.get("curve")
    if not isinstance(entry, dict) or not entry.get("source"):
        return (), "", 'curve is missing: give curve = { sizes = [...], fractions = [...], source = "..." }'
    sizes, fractions = entry.get("sizes") or [], entry.get("fractions") or []
    sound = all(isinstance(x, int | float) and not isinstance(x, bool) for x in [*sizes, *fractions])
    rises = sound and all(0 < a < b for a, b in pairwise(sizes))
    if not sizes or len(sizes) != len(fractions) or not rises or not all(0 < x <= 1 for x in fractions):
        return (), "", f"curve: sizes = {sizes} have to rise, and fractions = {fractions} to be as many, within 0 and 1"
    return tuple(zip(map(float, sizes), map(float, fractions), strict=True)), str(entry["source"]), ""
