"""The event of a hang in events.jsonl, against the step that the ranks should have made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rehearse.small import config_of
from titanmoe.config import ConfigError
from titanmoe.rehearse.event import read_event
from titanmoe.rehearse.hang import Finding, _as_the_run_counts, judge, locate
from titanmoe.rehearse.record import Message
from titanmoe.rehearse.world import Rehearsal, rehearse

CHANGES = {"parallelism.tp": 2, "parallelism.experts.ep": 2, "training.global_batch_size": 4}
KEPT = 32


@pytest.fixture(scope="module")
def role() -> Rehearsal:
    return rehearse(config_of(CHANGES, 4, "cpu"), 4, 0, "cpu", steps=2)


def messages(role: Rehearsal) -> list[Message]:
    return [role.log.messages[i] for i in _as_the_run_counts(role)]


def event(folder: Path, role: Rehearsal, at: dict[int, int], skips: dict[int, int] | None = None) -> Path:
    """at: how many messages of the step each rank has issued; skips: one that it has left out."""
    names = list(role.groups)
    groups = [{"lane": g.lane, "axes": g.axes, "parts": g.parts} for g in role.groups.values()]
    ranks: list[dict[str, Any]] = []
    for rank, count in at.items():
        numbers: dict[str, int] = {}
        last = []
        for index, m in enumerate(messages(role)[: count + (rank in (skips or {}))]):
            if index == (skips or {}).get(rank):
                continue
            group = names.index(m.group)
            numbers[str(group)] = numbers.get(str(group), 0) + 1
            op = {"receive": "all-gather", "send": "all-gather"}.get(m.op, m.op)
            kind = str(m.dtype).removeprefix("torch.")
            last.append([len(last), group, op, kind, m.sent, numbers[str(group)], -1, 0, 0, False])
        ranks.append({"rank": rank, "issued": len(last), "numbers": numbers, "last": last[-KEPT:]})
    file = folder / "events.jsonl"
    lines = [{"step": 1, "kind": "start"}, {"step": 9, "kind": "hang", "groups": groups, "ranks": ranks}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut')
    return file


def found(role: Rehearsal, file: Path) -> Finding:
    return judge(locate({0: role}, read_event(file)))


def the(role: Rehearsal, op: str, n: int) -> int:
    return [i for i, m in enumerate(messages(role)) if m.op == op][n]


def test_the_operation_that_a_rank_never_issued(tmp_path: Path, role: Rehearsal) -> None:
    number = the(role, "all-to-all", 5)
    at = {0: number + 1, 1: number + 1, 2: number, 3: number + 1}
    first, second, third, *_ = found(role, event(tmp_path, role, at)).lines
    assert first.startswith(f"rank 2 never issued operation {number} of the {len(messages(role))} of its step, in ")
    assert ": all-to-all, " in first and "moe/dispatch.py" in first and "layers." in first
    assert "waits for no message itself" in second
    (partner,) = (r for r in (0, 1, 3) if f"rank {r} wait" in third)
    assert partner == 3, "the other rank of its ep group"


def test_a_rank_that_skipped_one(tmp_path: Path, role: Rehearsal) -> None:
    number = the(role, "all-to-all", 3)
    at = {0: number + 1, 1: number + 1, 2: number + 1, 3: number + 1}
    lines = found(role, event(tmp_path, role, at, skips={2: number})).lines
    assert lines[0].startswith("rank 2 issued ") and f"where operation {number} of the " in lines[0]


def test_between_steps(tmp_path: Path, role: Rehearsal) -> None:
    """Validation sends more than the step, and is not compared with it."""
    count = len(messages(role))
    assert not found(role, event(tmp_path, role, dict.fromkeys(range(4), count))).stuck
    file = event(tmp_path, role, dict.fromkeys(range(4), count))
    line = json.loads(file.read_text().splitlines()[1])
    for one in line["ranks"]:
        one["issued"] += 100
    file.write_text(json.dumps(line))
    assert not found(role, file).stuck


def test_what_is_refused(tmp_path: Path, role: Rehearsal) -> None:
    def said(text: str) -> str:
        (tmp_path / "events.jsonl").write_text(text)
        with pytest.raises(ConfigError) as error:
            read_event(tmp_path / "events.jsonl")
        return str(error.value)

    assert "has no event of a hang" in said('{"step": 1, "kind": "start"}\n')
    assert "cannot be read (KeyError" in said('{"step": 1, "kind": "hang"}\n')
    assert "no rank has sent anything" in said('{"step": 1, "kind": "hang", "groups": [], "ranks": []}\n')
    file = event(tmp_path, role, dict.fromkeys(range(4), 40))
    file.write_text(file.read_text().replace('"float32"', '"float16"').replace('"int64"', '"int16"'))
    with pytest.raises(ConfigError, match="Are the recipe, overrides"):
        found(role, file)
