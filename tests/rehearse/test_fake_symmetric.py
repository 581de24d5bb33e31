"""Recipes with the dispatcher symm_mem: what its operations send, its buffers, its start, and faults."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.rehearse.small import config_of
from tests.rehearse.test_clean import ONE, faulty
from tests.rehearse.test_rehearse_command import SMALL, rehearse
from titanmoe.comm.collectives import InFlight
from titanmoe.moe.symmetric import ALIGN, Symmetric
from titanmoe.ops.kernels import installed
from titanmoe.rehearse import world
from titanmoe.rehearse.record import ALL_TO_ALLS, SYMMETRIC

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")
THERE, BACK = SYMMETRIC


def of(dispatcher: str, imbalance: float, factor: float = 2.0) -> world.Rehearsal:
    changes = ONE | {"moe.dispatcher": dispatcher, "moe.symm_mem_factor": factor}
    return world.rehearse(config_of(changes, 4, "h100"), 4, 1, "h100", imbalance)


def rows(rehearsal: world.Rehearsal) -> list[tuple[Any, ...]]:
    """Messages of rows and their weights, without the names of the operations."""
    messages = [m for m in rehearsal.log.messages if m.op in ALL_TO_ALLS and m.dtype.is_floating_point]
    return [(m.dtype, m.sent_bytes, m.received_bytes, m.splits, m.backward, m.site.layer) for m in messages]


def test_it_sends_what_alltoall_sends_and_the_host_waits_once_less() -> None:
    rehearsal, plain = of("symm_mem", 1.7), of("alltoall", 1.7)
    assert rows(rehearsal) == rows(plain) and {layer for *_, layer in rows(rehearsal)} == {"layers.0"}
    ops = [(m.op, m.backward, m.wait_timing) for m in rehearsal.log.messages if m.op in SYMMETRIC]
    forward, backward = [THERE, THERE, BACK], [THERE, BACK, BACK]
    assert ops == [(op, False, "at once") for op in forward] + [(op, True, "at once") for op in backward]
    assert len(rehearsal.log.syncs) == len(plain.log.syncs) - 1


def test_its_buffers_are_in_memory_and_its_first_exchange_is_no_part_of_the_step() -> None:
    rehearsal = of("symm_mem", 1.0)
    training, model = rehearsal.config.training, rehearsal.config.model
    home = training.local_batch_size * training.seq_len * model.top_k
    away = math.ceil(2 * home / ALIGN) * ALIGN + model.num_experts // 4 * ALIGN
    row = 2 * model.dim + 4  # bfloat16, and a float32 weight
    sizes = 8 * 7 * model.num_experts
    assert rehearsal.memory.components["symmetric buffers"] == 2 * (home + away) * row + sizes
    assert rehearsal.memory.at_start >= rehearsal.parameter_bytes + rehearsal.optimizer_bytes + 2 * (home + away) * row
    assert [m.op for m in rehearsal.start_up] == [THERE, BACK, "all-reduce"]
    assert rehearsal.start_up[0].splits == ((2,) * 4, (2,) * 4)


def test_a_step_that_does_not_fit_is_repeated_by_alltoall() -> None:
    """At 4 times the mean one rank's experts get all rows."""
    rehearsal = of("symm_mem", 4.0, 1.0)
    assert rows(rehearsal)[6:] == rows(of("alltoall", 4.0))
    assert {messages for _, messages, *_ in rows(rehearsal)[:6]} == {0}
    assert "repeated by alltoall" in rehearsal.notes[1] and len(of("symm_mem", 1.0).notes) == 1


def test_a_rank_that_keeps_its_rows_is_named() -> None:
    real = Symmetric.leave

    def leave(self: Symmetric, y_AD: Tensor, splits: Any) -> InFlight:
        return InFlight(y_AD.new_zeros(splits.lent.rows, y_AD.shape[1]) + y_AD.sum(), None)

    def on(rank: int) -> Any:
        return mock.patch.object(Symmetric, "leave", leave if rank == 2 else real)

    verdict = faulty(4, on, {"moe.dispatcher": "symm_mem"})
    assert not verdict.safe and "rank 2" in verdict.text and BACK in verdict.text


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "rank.json"
    assert rehearse("--ranks", "4", "--json", str(file), "--moe.dispatcher", "symm_mem", *SMALL) == 0
    text = capsys.readouterr().out
    assert "Before the first step symmetric memory sends:" in text and "computation's own stream" in text
    (report,) = json.loads(file.read_text())["ranks"]
    assert {row["dtype"] for row in report["start_up"]} == {"bfloat16", "float32"}
    assert not any("moe/dispatch.py" in line or "moe/symmetric.py" in line for line in report["syncs"])
    assert torch.bfloat16.itemsize * 64 * 2 * 128 in {
        row["sent_bytes"] for row in report["messages"] if row["op"] == BACK and row["pass"] == "forward"
    }
