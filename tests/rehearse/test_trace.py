"""Dumps of torch's flight recorder compared with the step that they should show: from a real run, and made by hand."""

from __future__ import annotations

import functools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.rehearse import hung
from tests.rehearse.small import config_of
from tests.rehearse.test_command import refused
from titanmoe.cli import main
from titanmoe.config import ConfigError
from titanmoe.rehearse.hang import Finding, judge, locate
from titanmoe.rehearse.record import Message
from titanmoe.rehearse.trace import DTYPES, OPS, read_dump, read_dumps
from titanmoe.rehearse.world import Rehearsal, rehearse


def test_a_real_rank_that_hangs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    env = dict(os.environ) | {"TORCH_FR_BUFFER_SIZE": "2000", "OMP_NUM_THREADS": "1"}
    ranks = [processes.Started(["-m", "tests.rehearse.hung", tmp_path, rank], env) for rank in range(hung.WORLD)]
    ended = [rank.wait(120) for rank in ranks]
    assert not any(rank.returncode for rank in ended), [rank.stderr for rank in ended]
    dumps = [str(tmp_path / f"trace_rank_{rank}") for rank in range(hung.WORLD)]
    options = ["rehearse", "--world", "4", "--hardware", "cpu", *hung.recipe(), "--json", str(tmp_path / "found.json")]
    assert main([*options, "--trace", *dumps]) == 1
    first, second, third, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("rank 2 never issued operation ") and " of its step, in rows ep over ranks 0,1,2,3" in first
    assert "all-to-all" in first and "moe/dispatch.py" in first and first.endswith("of layers.1")
    assert "it waits for no message itself" in second
    assert third == "    ranks 0, 1, 3 wait for it:"
    assert json.loads((tmp_path / "found.json").read_text())["trace"]["lines"][0] == first


# ---- made by hand in the form of NCCL's dumps

NAMES = {"all-gather": "_all_gather_base", "reduce-scatter": "_reduce_scatter_base"}
NAMES |= {op: name for name, op in OPS.items() if op not in NAMES and name not in ("all_reduce_barrier",)}
NAMES |= {"all-to-all": "all_to_all"}
KINDS = {ours: name for name, ours in DTYPES.items()} | {"bfloat16": "BFloat16"}


@functools.cache
def stages() -> dict[int, Rehearsal]:
    changes = {"parallelism.pp": 2, "parallelism.experts.ep": 2, "training.global_batch_size": 4}
    config = config_of(changes, 4, "h100")
    return {stage: rehearse(config, 4, 2 * stage, "h100", steps=2) for stage in range(2)}


def entry(m: Message, rank: int, number: int, count: int, done: bool) -> dict[str, Any]:
    role = stages()[rank // 2]
    group = role.groups[m.group]
    ranks = next(part for part in group.parts if rank in part)
    kind, me = str(m.dtype).removeprefix("torch."), ranks.index(rank)
    ends = {"send": f" {me}->{m.peer}", "receive": f" {me}<-{m.peer}"}
    sizes = [[max(m.sent, m.received if m.op == "receive" else 0) // m.dtype.itemsize]]
    return {
        "record_id": number,
        "process_group": (f"{group.lane} {ranks}", group.lane),
        "collective_seq_id": count,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{NAMES[m.op]}{ends.get(m.op, '')}",
        "input_sizes": sizes,
        "input_dtypes": [KINDS.get(kind, kind)],
        "output_sizes": sizes,
        "output_dtypes": [KINDS.get(kind, kind)],
        "state": "completed" if done else "scheduled",
        "retired": done,
        "frames": [],
    }


def dump(folder: Path, rank: int, at: int, done: int | None = None, keep: int = 10**6, before: int = 1) -> Path:
    """at: how many operations of the last step it has issued; `done` of them are done. keep: the recorder's size."""
    messages = stages()[rank // 2].log.messages
    entries, counts, config = [], {}, {}
    issued = [*messages * before, *messages[:at]]
    for number, m in enumerate(issued):
        counts[m.group] = counts.get(m.group, 0) + 1
        over = number < before * len(messages) + (at if done is None else done)
        one = entry(m, rank, len(entries), counts[m.group], over and m.batch < 0)
        entries.append(one)
        name = one["process_group"][0]
        config[name] = {
            "name": name,
            "desc": m.group,
            "ranks": name[name.index("(") :].replace("(", "[").replace(")", "]"),
        }
        if m.batch >= 0 and (number + 1 == len(issued) or issued[number + 1].batch != m.batch):
            end = {"profiling_name": "nccl:coalesced", "state": "completed" if over else "scheduled"}
            entries.append(one | end | {"record_id": len(entries)})
    file = folder / f"nccl_trace_rank_{rank}"
    file.write_bytes(pickle.dumps({"version": "2.10", "pg_config": config, "entries": entries[-keep:]}, 2))
    return file


def found(*files: Path) -> Finding:
    return judge(locate(stages(), read_dumps(files)))


def the(op: str, stage: int, n: int = 0) -> int:
    messages = stages()[stage].log.messages
    return [i for i, m in enumerate(messages) if m.op == op][n]


def hangs(folder: Path, **more: int) -> list[Path]:
    """Rank 3 never issues the third all-to-all of its step."""
    number, waits = the("all-to-all", 1, 2), the("receive", 0)
    files = [dump(folder, 3, number, **more), dump(folder, 2, number + 1, number, **more)]
    return [*files, *(dump(folder, rank, waits + 1, waits, **more) for rank in (0, 1))]


@pytest.mark.parametrize("keep", [10**6, 24])
def test_who_never_issued_what(tmp_path: Path, keep: int) -> None:
    """Also from a dump that no longer holds the start of the step."""
    first, _, third, *waits = found(*hangs(tmp_path, keep=keep)).lines
    number, whole = the("all-to-all", 1, 2), len(stages()[1].log.messages)
    assert first.startswith(
        f"rank 3 never issued operation {number} of the {whole} of its step, in rows ep over ranks 2,3"
    )
    assert "all-to-all" in first and third == "    ranks 0, 1, 2 wait for it:"
    assert "send with rank 2" in waits[0] and "send with rank 3" in waits[1] and "rank 2 in" in waits[2]


def test_a_rank_that_issued_something_else_or_left_no_dump(tmp_path: Path) -> None:
    files = hangs(tmp_path)
    said = "\n".join(found(*files[1:]).lines)
    assert "rank 3 left no dump" in said and "ranks 0, 1, 2 wait for it" in said
    number = the("all-to-all", 1, 2)
    data = pickle.loads(dump(tmp_path, 3, number + 1, number).read_bytes())
    data["entries"][-1]["profiling_name"] = "nccl:all_reduce"
    files[0].write_bytes(pickle.dumps(data))
    first = found(*files).lines[0]
    assert first.startswith("rank 3 issued all-reduce of ") and f"where operation {number} of" in first


def test_nobody_waits(tmp_path: Path) -> None:
    whole = [len(stages()[stage].log.messages) for stage in range(2)]
    assert not found(*(dump(tmp_path, rank, whole[rank // 2]) for rank in range(4))).stuck


def test_between_steps(tmp_path: Path) -> None:
    """Rank 1 has not begun the next step, and rank 0 waits in its first operation."""
    files = [dump(tmp_path, 0, 1, 0), dump(tmp_path, 1, 0)]
    first, *_ = found(*files).lines
    assert first.startswith("rank 1 never issued the next step: operation 0 of ")


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo never",)


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def said(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError) as error:
            read_dump(tmp_path / name)
        return str(error.value)

    assert "it contains" in said("evil_1", pickle.dumps(Evil())) and "which no flight recorder writes" in said(
        "evil_1", pickle.dumps({"pg_config": {}, "entries": [Evil()]})
    )
    for data in (b"", b"{}", b"[]", b"\x80\x02.", pickle.dumps([1]), pickle.dumps({"pg_config": {}, "entries": [{}]})):
        assert "is not a dump of torch's flight recorder" in said("x_1", data)
    assert "holds no operations" in said("x_1", pickle.dumps({"pg_config": {}, "entries": []}))
    assert "its name does not end in a rank," in said("trace", b"")
    assert "cannot read" in refused(capsys, "--world", "4", "--trace", str(tmp_path / "none_3"))
    assert "leave out --all-roles" in refused(capsys, "--world", "4", "--all-roles", "--trace", "x")
    few = dump(tmp_path, 3, the("all-to-all", 1, 2), keep=3)
    with pytest.raises(ConfigError, match="too few to place it"):
        found(few)
