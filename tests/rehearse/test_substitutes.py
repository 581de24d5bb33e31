"""A rehearsal passes what it substitutes to whoever builds the run, and only replaces functions of torch."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.rehearse.small import config_of
from tests.rehearse.test_clean import ONE, STAGES, schedule
from titanmoe.ops.kernels import installed
from titanmoe.rehearse.rehearsal import rehearse
from titanmoe.replace import replaced

CASES = {
    "h100": ONE | {"moe.dispatcher": "symm_mem", "model.sliding_window": 4, "model.full_attention_every": 0},
    "cpu": STAGES | schedule("DualPipeV"),
}


@pytest.mark.parametrize(
    "hardware", ["cpu", pytest.param("h100", marks=pytest.mark.skipif(not installed(), reason="no Triton"))]
)
def test_only_functions_of_torch_are_replaced(hardware: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = set()

    def note(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
        owners.add(getattr(owner, "__module__", None) or owner.__name__)
        return replaced(owner, name, value)

    for module in [module for name, module in sys.modules.items() if name.startswith("titanmoe.rehearse.")]:
        if hasattr(module, "replaced"):
            monkeypatch.setattr(module, "replaced", note)
    rehearse(config_of(CASES[hardware], 4, hardware), 4, 1, hardware)
    assert owners and all(owner.partition(".")[0] == "torch" for owner in owners)
