"""The last message of a failed run: which rank it is from, what it says, which exit code."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from titanmoe.config import ConfigError
from titanmoe.launcher.agent import AgentLog, LaunchResult, RankLogs
from titanmoe.launcher.failure_message import (
    RankFailure,
    count_oom_kills,
    failure_message,
    first_failure,
    phases_of_late_ranks,
    ranks_ended_by_hang,
)
from titanmoe.launcher.train_command import exit_status
from titanmoe.train import launch_messages


def failed(
    folder: Path, rank: int, exitcode: int, when: float = 0.0, note: dict | None = None, log: str = ""
) -> RankFailure:
    entry = RankFailure(
        rank=rank,
        exitcode=exitcode,
        timestamp=when,
        log=folder / f"rank{rank}.log",
        note_file=folder / f"rank{rank}.json",
    )
    entry.log.write_text(log)
    if note:
        entry.note_file.write_text(json.dumps({"timestamp": when, "consequence": False} | note))
    return entry


LOST = {"message": "RuntimeError: Connection closed by peer", "consequence": True}


def test_the_cause_comes_before_its_consequences(tmp_path):
    lost = failed(tmp_path, 0, 1, 5.0, LOST)
    stopped = failed(tmp_path, 1, -signal.SIGTERM, 4.0)
    later = failed(tmp_path, 2, 1, 7.0, {"message": "ValueError: later"})
    killed = failed(tmp_path, 3, -signal.SIGKILL, 6.0)
    assert first_failure([lost, stopped, later, killed]) is killed
    assert first_failure([lost, stopped, later]) is later
    assert first_failure([lost, failed(tmp_path, 4, 1, 3.0, LOST)]).rank == 4
    no = {"message": "no", "alike": True}
    assert first_failure([failed(tmp_path, rank, 2, float(9 - rank), no) for rank in (2, 0, 1)]).rank == 0


def test_what_the_last_message_says(tmp_path):
    refusal = failed(tmp_path, 0, 2, note={"message": "error: 1 problem in a.toml\n\n  1. no"})
    assert failure_message(refusal, 4) == "error: 1 problem in a.toml\n\n  1. no"
    own = failed(tmp_path, 3, 2, note={"message": "error: a.txt: no such file"})
    assert failure_message(own, 4) == "rank 3: error: a.txt: no such file"
    wrong = failed(tmp_path, 3, 1, note={"message": "ValueError: no (router.py:7, in forward)"})
    assert failure_message(wrong, 4) == (
        "error: rank 3 failed first, with exit code 1: ValueError: no (router.py:7, in forward)\n"
        f"its log: {tmp_path}/rank3.log (empty)"
    )
    nan = {"message": "step 7: loss nan", "alike": True}  # which rank says it does not matter
    assert failure_message(failed(tmp_path, 2, 1, note=nan), 4) == "error: step 7: loss nan"
    assert failure_message(failed(tmp_path, 2, 1, note=nan, log="w"), 4).endswith(
        f"loss nan\nits log: {tmp_path}/rank2.log"
    )
    assert failure_message(wrong, 1).startswith("error: the run failed, with exit code 1: ValueError")
    silent = failed(tmp_path, 1, 7, log="\n".join(map(str, range(20))))
    assert failure_message(silent, 2).splitlines()[1:] == [
        *(f"  {n}" for n in range(12, 20)),
        f"its log: {tmp_path}/rank1.log",
    ]
    killed = failed(tmp_path, 1, -signal.SIGKILL)
    assert "rank 1 was killed by SIGKILL: from outside, or by the kernel for lack of memory" in failure_message(
        killed, 2
    )
    (tmp_path / "rank1.json.memory").write_text("each rank holds much")
    assert failure_message(killed, 2, out_of_memory=True).splitlines() == [
        "error: rank 1 was killed by the kernel (SIGKILL), because this machine, or this container, was out of memory",
        "each rank holds much",
        f"its log: {tmp_path}/rank1.log (empty)",
    ]
    assert "rank 1 died of SIGSEGV" in failure_message(failed(tmp_path, 1, -signal.SIGSEGV), 2)


def test_a_killed_rank_is_said_to_be_where_the_others_saw_it_last(tmp_path):
    part = "step 43, forward and backward: backward of layer 2, microbatch 0"
    note = {"message": "hang: rank 1 on node is late", "alike": True, "during": {1: part}}
    watch = failed(tmp_path, 0, 1, 5.0, note)
    other = failed(tmp_path, 2, 1, 5.0, LOST)
    parts = phases_of_late_ranks([watch.note_file, tmp_path / "rank1.json", other.note_file])
    assert parts == {1: part}
    killed = replace(failed(tmp_path, 1, -signal.SIGKILL), during=parts[1])
    (tmp_path / "rank1.json.memory").write_text("each rank holds much")
    assert failure_message(killed, 4).splitlines()[1] == f"it was in {part}"
    assert failure_message(killed, 4, out_of_memory=True).splitlines()[1:3] == [
        f"it was in {part}",
        "each rank holds much",
    ]
    assert f"died of SIGSEGV\nit was in {part}" in failure_message(replace(killed, exitcode=-signal.SIGSEGV), 4)


def test_a_rank_that_the_watch_killed_is_not_said_to_have_been_out_of_memory(tmp_path):
    """Whatever the clocks say: torch notes the end of a killed rank in whole seconds, before the report."""
    note = {"message": "hang: rank 1 on node is late", "alike": True, "during": {1: "step 3"}, "following": [1, 2]}
    watch = failed(tmp_path, 0, 1, 5.7, note)
    assert ranks_ended_by_hang([watch.note_file, tmp_path / "rank1.json"]) == {1, 2}
    stopped = replace(failed(tmp_path, 1, -signal.SIGKILL, 5.0), during="step 3", ended_by_hang=True)
    failures = [stopped, failed(tmp_path, 2, 1, 5.0, LOST), watch]
    code, text = exit_status(LaunchResult(failures=failures, world=3), 2, saves=True, out_of_memory=True)
    assert (code, text) == (1, "error: hang: rank 1 on node is late")


def test_exit_codes_are_kept(tmp_path):
    def code(*exitcodes: int, **more) -> tuple[int, str]:
        failures = [failed(tmp_path, rank, exitcode, float(rank)) for rank, exitcode in enumerate(exitcodes)]
        return exit_status(
            LaunchResult(failures=failures, world=2, **more), 1, saves=more.get("signal") == 2, out_of_memory=False
        )

    assert code() == (0, "")
    assert code(3)[0] == 3 and code(-signal.SIGKILL)[0] == 137
    # asked to stop: quiet, whatever became of the ranks
    assert code(130, 130, signal=2) == (130, "")
    assert code(143, 143, signal=15) == (143, "stopped; nothing was saved, because checkpoint.enable = false")
    assert code(-9, -9, signal=2, killed=True) == (130, "ended at once; checkpoints that were complete are there")
    assert code(signal=2) == (130, "")


def test_a_save_that_fails_while_it_stops_is_reported(tmp_path):
    full = failed(tmp_path, 0, 1, note={"message": "step-00000003: the disk is full"})
    code, text = exit_status(LaunchResult(signal=2, failures=[full]), 1, saves=True, out_of_memory=False)
    assert code == 1 and "the disk is full" in text


def test_a_node_that_only_lost_another_says_where_to_look(tmp_path):
    lost = failed(tmp_path, 5, 1, note=LOST)
    assert (
        "look for the cause in the logs of the other nodes"
        in exit_status(LaunchResult(failures=[lost], world=8), 2, False, False)[1]
    )
    assert "other nodes" not in exit_status(LaunchResult(failures=[lost], world=8), 1, False, False)[1]


# ---- what a rank leaves


def test_a_rank_leaves_its_reason_for_the_launcher_alone(tmp_path, monkeypatch):
    file = tmp_path / "left.json"
    monkeypatch.delenv(launch_messages.NOTE_FILE, raising=False)
    assert not launch_messages.write_failure_note("x")
    monkeypatch.setenv(launch_messages.NOTE_FILE, str(file))
    with pytest.raises(SystemExit) as end:
        launch_messages.exit_refused(ConfigError(["no"], "a.toml"))
    note = json.loads(file.read_text())
    assert end.value.code == 2 and note["message"].startswith("error: 1 problem in a.toml") and not note["consequence"]
    try:
        raise ValueError("what went wrong\nand more")
    except ValueError as error:
        launch_messages.write_error_note(error)
    assert json.loads(file.read_text())["message"].startswith(f"ValueError: what went wrong ({__file__}:")


def test_what_the_disk_of_the_logs_has_no_room_for_is_kept_in_memory(tmp_path, monkeypatch):
    wrong, write = failed(tmp_path, 3, 1), Path.write_text

    def write_text(file: Path, *args: object, **kwargs: object) -> int:
        if file.parent == tmp_path:
            file.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return write(file, *args, **kwargs)

    monkeypatch.setenv(launch_messages.NOTE_FILE, str(wrong.note_file))
    monkeypatch.setattr(Path, "write_text", write_text)
    with launch_messages.notes_in_memory():
        spare = Path(os.environ[launch_messages.NOTES_FOLDER])
        launch_messages.write_memory_advice(lambda: "each rank holds much")
        killed = replace(wrong, exitcode=-signal.SIGKILL)
        assert failure_message(killed, 4, out_of_memory=True).splitlines()[1] == "each rank holds much"
        assert launch_messages.write_failure_note("the disk is full", alike=True)
        assert failure_message(wrong, 4) == "error: the disk is full"
        RankLogs(tmp_path).reify({0: {"RANK": "3"}})
        assert [file.name for file in spare.iterdir()] == ["rank3.json.memory"], "not told of the next attempt"
    assert not spare.exists() and launch_messages.NOTES_FOLDER not in os.environ
    assert not launch_messages.write_failure_note("nobody can read this"), "so that the rank prints it"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank3.log"], "nothing is left unfinished"


def test_the_agent_does_not_fill_the_screen_where_its_log_cannot_be_written(capsys):
    for file in ("/dev/full", "/dev/null/agent.log"):
        log = AgentLog(file, delay=True)
        log.handle(logging.LogRecord("torch", logging.ERROR, "", 1, "failed (exitcode: 1)", (), None))
        with contextlib.suppress(OSError):
            log.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "caused"),
    [
        (RuntimeError("[../third_party/gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5"), True),
        (RuntimeError("rank 1 raised KeyError: 'weights'"), True),
        (RuntimeError("Timed out waiting 120000ms for recv operation to complete"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("a peer of the realm"), False),
    ],
)
def test_errors_that_only_follow_those_of_other_ranks(error, caused):
    assert launch_messages.caused_by_other_rank(error) is caused


def test_each_rank_has_a_log_and_rank_0_the_terminal(tmp_path):
    logs = RankLogs(tmp_path / "logs")
    env: dict[int, dict[str, str]] = {0: {"RANK": "8"}, 1: {"RANK": "9"}}
    destination = logs.reify(env)
    assert destination.stdouts == {0: "", 1: f"{tmp_path}/logs/rank9.out"}
    assert (
        destination.stderrs[0].endswith("logs/rank8.log")
        and env[1][launch_messages.NOTE_FILE] == f"{tmp_path}/logs/rank9.json"
    )
    assert logs.reify(env).stderrs[1].endswith("logs/attempt2/rank9.log")
    Path(destination.stderrs[0]).touch()
    Path(destination.stderrs[1]).write_text("why")
    Path(env[1][launch_messages.NOTE_FILE] + launch_messages.ADVICE_SUFFIX).write_text("memory")
    logs.tidy()
    assert [file.name for file in (tmp_path / "logs").rglob("*")] == ["rank9.log"]


def test_a_refusal_leaves_no_logs_and_no_new_folder(tmp_path):
    (tmp_path / "runs").mkdir()
    logs = RankLogs(tmp_path / "runs/launch/debug")
    logs.make_folder()
    env: dict[int, dict[str, str]] = {0: {"RANK": "0"}}
    found = logs.reify(env)
    Path(found.stderrs[0]).touch()
    Path(found.error_files[0]).write_text("{}")
    (logs.folder / "agent.log").write_text("rank 0 failed (exitcode: 2)")
    logs.tidy(refused=True)
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]


def test_notes_of_an_earlier_start_in_the_same_folder_are_removed(tmp_path):
    env: dict[int, dict[str, str]] = {0: {"RANK": "0"}}
    note = Path(RankLogs(tmp_path).reify(env).error_files[0])
    note.write_text("{}")
    RankLogs(tmp_path).reify(env)
    assert not note.exists()


def test_kills_by_the_kernel_are_counted_where_it_reports_them():
    assert count_oom_kills() >= 0
