"""Every value of every option of [moe] can be rehearsed, and has no operation that `training.deterministic` forbids on
GPUs; an option that is added is covered by itself."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from tests.rehearse.small import config_of
from tests.support import nondeterministic
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.config.fields import ranges
from titanmoe.config.schema import MoE
from titanmoe.ops.kernels import installed
from titanmoe.rehearse.rehearsal import Rehearsal, rehearse

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")
SMALL = {"model.num_layers": 2, "training.global_batch_size": 4, "parallelism.experts.ep": 4, "parallelism.node": 2}
SMALL |= {
    "training.device": "auto",
    "moe.force_balance": False,
    "moe.kernels": "auto",
    "model.dim": 32,
    "model.expert_hidden": 32,
}
NARROW = {"training.mixed_precision_param": "bfloat16"}
DROPS = {"moe.capacity_factor": 1.2}
PADS = DROPS | {"moe.pad_to_capacity": True}
WHOLE = DROPS | {"moe.capacity_scope": "full_sequence", "parallelism.tp": 2, "training.global_batch_size": 2}
CASES = {
    "dropless": NARROW,
    "drops": NARROW | DROPS,
    "drops per sample": NARROW | WHOLE,
    "pads": NARROW | PADS,
    "pads in float32": PADS,
}
NUMBERS = {int: (-1, 0, 1, 2, 3), float: (0.0, 0.01, 1.0, 1.2, 4.0)}
OUTSIDE = "tests.moe.test_balance_losses:Even"
REFUSED = {"moe.dispatcher": {"deepep"}}
NEEDS = {
    "moe.dispatcher = symm_mem": {"parallelism.node": 4},
    "moe.overlap = halves": {"training.local_batch_size": 2, "training.global_batch_size": 8},
}
"""The other options that a value is refused without."""


def options() -> dict[str, list[Any]]:
    """The values to try, by the path of the option."""
    values, hints = {}, get_type_hints(MoE)
    for option in fields(MoE):
        path, hint = f"moe.{option.name}", hints[option.name]
        kind = COMPONENTS.kind_of(path)
        if kind and get_origin(hint) is list:
            values[path] = [[f"{name} 0.01"] for name in (*kind.table, OUTSIDE) if name not in hints]
        elif kind:
            values[path] = list(kind.table)
        elif get_origin(hint) is Literal:
            values[path] = list(get_args(hint))
        else:
            values[path] = [False, True] if hint is bool else [n for n in NUMBERS[hint] if n in ranges()[path]]
    return values


def of(changes: dict[str, Any]) -> Rehearsal | None:
    """None if the recipe is refused."""
    try:
        config = config_of(SMALL | changes, 4, "h100")
    except ConfigError:
        return None
    with nondeterministic.record_refused() as refused:
        rehearsal = rehearse(config, 4, 1, "h100", routing=1.7)
    assert not refused
    return rehearsal


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("dropless", "pads")])
def test_dropping(case: str) -> None:
    rehearsal = of(CASES[case])
    rows = [m for m in rehearsal.log.messages if m.op == "all-to-all" and m.dtype.is_floating_point and not m.backward]
    assert len(rows) == 2 * 2  # there, with the routing weights, and back
    even = all(len(set(m.splits[0])) == 1 for m in rows)
    assert even == ("pads" in case)


@pytest.mark.slow
@pytest.mark.parametrize("path", options())
def test_every_value(path: str) -> None:
    for value in options()[path]:
        option = f"{path} = {value}"
        needed = NEEDS.get(option, {})
        rehearsed = [case for case, changes in CASES.items() if of(changes | needed | {path: value}) is not None]
        assert bool(rehearsed) != (value in REFUSED.get(path, ())), f"{option}: {rehearsed}"
