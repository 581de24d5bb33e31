"""Recipes with the dispatcher symm_mem: what it sends, its buffers, its start, and faults."""

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
from titanmoe.moe.dispatchers.dispatcher_spec import ALIGN
from titanmoe.moe.dispatchers.symm_mem import SymmetricExchange
from titanmoe.moe.permute import unpermute_tokens
from titanmoe.ops.kernels import installed
from titanmoe.rehearse import rehearsal
from titanmoe.rehearse.message_recorder import ALL_TO_ALLS, PUT

pytestmark = pytest.mark.skipif(not installed(), reason="Triton is not installed")


def of(dispatcher: str, imbalance: float, factor: float = 2.0) -> rehearsal.Rehearsal:
    changes = ONE | {"moe.dispatcher": dispatcher, "moe.symm_mem_factor": factor}
    return rehearsal.rehearse(config_of(changes, 4, "h100"), 4, 1, "h100", routing=imbalance)


def rows(rehearsal: rehearsal.Rehearsal) -> set[tuple[Any, ...]]:
    """How many rows go where, whether their weights are messages of their own or not."""
    messages = [m for m in rehearsal.log.messages if m.op in ALL_TO_ALLS and m.dtype.is_floating_point]
    return {(m.splits, m.backward, m.site.layer) for m in messages}


def test_it_sends_what_alltoall_sends_and_the_host_waits_once_less() -> None:
    rehearsal, plain = of("symm_mem", 1.7), of("alltoall", 1.7)
    assert rows(rehearsal) == rows(plain) and {layer for *_, layer in rows(rehearsal)} == {"layers.0"}
    puts = [(m.backward, m.wait_timing) for m in rehearsal.log.messages if m.op == PUT]
    assert puts == [(False, "at once")] * 3 + [(True, "at once")] * 3
    assert len(rehearsal.log.syncs) == len(plain.log.syncs) - 1


def test_its_buffers_are_in_memory_and_its_first_exchange_is_no_part_of_the_step() -> None:
    rehearsal = of("symm_mem", 1.0)
    training, model = rehearsal.config.training, rehearsal.config.model
    home = training.local_batch_size * training.seq_len * model.top_k
    away = math.ceil(2 * home / ALIGN) * ALIGN + model.num_experts // 4 * ALIGN
    row = 2 * model.dim + 4  # bfloat16, and a float32 weight
    buffers = (max(home, away) + 1) * row
    assert rehearsal.memory.components["symmetric buffers"] == buffers
    assert rehearsal.memory.at_start >= rehearsal.parameter_bytes + rehearsal.optimizer_bytes + buffers
    assert [m.op for m in rehearsal.start_up] == [PUT, PUT, "all-reduce"]
    assert rehearsal.start_up[0].splits == ((1,) * 4, (1,) * 4)


def test_auto_is_what_it_would_be_on_that_hardware() -> None:
    """Where memory can be shared, which a rehearsal cannot know."""
    auto = ONE | {"moe.dispatcher": "auto"}

    def chosen(changes: dict[str, Any], hardware: str = "h100") -> str:
        return config_of(auto | changes, 4, hardware).moe.dispatcher

    config = config_of(auto, 4, "h100")
    assert chosen({}) == "symm_mem" and chosen({}, "cpu") == chosen({"parallelism.node": 2}) == "alltoall"
    halves = {"moe.overlap": "halves", "training.local_batch_size": 2, "training.global_batch_size": 8}
    assert chosen(halves) == "alltoall"
    memory = rehearsal.rehearse(config, 4, 1, "h100", routing=1.0).memory
    assert memory.components["symmetric buffers"] and memory.peak == of("symm_mem", 1.0).memory.peak


def test_a_step_that_does_not_fit_is_repeated_by_alltoall() -> None:
    """At 4 times the mean one rank's experts get all rows."""
    rehearsal = of("symm_mem", 4.0, 1.0)
    sent = rows(rehearsal)
    empty = {message for message in sent if message[0] == ((0,) * 4, (0,) * 4)}
    assert sent - empty == rows(of("alltoall", 4.0)) and {backward for _, backward, _ in empty} == {False, True}
    assert "repeated by alltoall" in rehearsal.notes[1] and len(of("symm_mem", 1.0).notes) == 1


def test_a_rank_that_keeps_its_rows_is_named() -> None:
    real = SymmetricExchange.combine

    def keep(self: SymmetricExchange, y_RD: Tensor) -> Tensor:
        y_SD = y_RD.new_zeros(len(self.to_S), y_RD.shape[1]) + y_RD.sum()
        return unpermute_tokens(y_SD, self.route.source_S, self.route.slot_TJ, self.kernels)

    def on(rank: int) -> Any:
        return mock.patch.object(SymmetricExchange, "combine", keep if rank == 2 else real)

    verdict = faulty(4, on, {"moe.dispatcher": "symm_mem"})
    assert not verdict.safe and "rank 2" in verdict.text and PUT in verdict.text


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "rank.json"
    assert rehearse("--ranks", "4", "--json", str(file), "--moe.dispatcher", "symm_mem", *SMALL) == 0
    text = capsys.readouterr().out
    assert "Before the first step symmetric memory sends:" in text and "computation's own stream" in text
    (report,) = json.loads(file.read_text())["ranks"]
    assert {row["dtype"] for row in report["start_up"]} == {"bfloat16", "float32"}
    assert not any("moe/dispatchers" in line for line in report["syncs"])
    one_way = torch.bfloat16.itemsize * 64 * 2 * 128
    sent = [row["sent_bytes"] for row in report["messages"] if row["op"] == PUT and row["pass"] == "forward"]
    assert sent.count(one_way) == 2
