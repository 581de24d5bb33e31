"""The hardware that a rehearsal can imitate."""

from __future__ import annotations

from titanmoe.ops.device import Hardware

HARDWARE = {
    "a100": Hardware("cuda", (8, 0)),
    "h100": Hardware("cuda", (9, 0)),
    "h200": Hardware("cuda", (9, 0)),
    "b200": Hardware("cuda", (10, 0)),
    "cpu": Hardware("cpu"),
}
