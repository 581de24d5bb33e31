"""Where a run's lines go: pauses after a failure, whole lines, and what a resumed run keeps."""

from __future__ import annotations

import errno
import os

import pytest

from titanmoe.train import report_targets
from titanmoe.train.report_targets import LineFile, RetriedWriter
from titanmoe.train.run_folder import rewind


def test_a_pause_grows_to_ten_minutes_and_starts_short_again(monkeypatch):
    now, fails, tried = [0.0], [True], []
    monkeypatch.setattr(report_targets.time, "monotonic", lambda: now[0])

    class Target:
        def close(self) -> None: ...

    def write(target: Target) -> None:
        tried.append(now[0])
        if fails[0]:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    out = RetriedWriter("x", Target, lambda text: None)
    for now[0] in range(0, 4000, 10):
        out.put(write)
    assert tried[:5] == [0, 30, 90, 210, 450] and tried[-1] - tried[-2] == 600
    now[0], fails[0] = now[0] + 600, False
    out.put(write)
    assert out.lost == 0
    fails[0], tried[:] = True, []
    for now[0] in range(5000, 5040, 10):
        out.put(write)
    assert tried == [5000, 5030]


def test_an_outlet_that_cannot_be_opened_at_the_start_is_tried_again(monkeypatch):
    now, warnings, lines = [0.0], [], []
    monkeypatch.setattr(report_targets.time, "monotonic", lambda: now[0])

    class Target:
        def __init__(self) -> None:
            if not now[0]:
                _full()

        def close(self) -> None: ...

    out = RetriedWriter("x", Target, warnings.append)
    out.open()
    for now[0] in (1, 29, 31):
        out.put(lambda _: lines.append(now[0]))
    assert lines == [31]
    assert [text.partition(":")[2].split(";")[0].split(":")[0] for text in warnings] == [
        " No space left on device",
        " works again",
    ]


def test_what_the_user_can_fix_at_once_ends_the_start():
    def make() -> report_targets.ReportTarget:
        raise ImportError("no module named wandb")

    with pytest.raises(ImportError):
        RetriedWriter("x", make, lambda text: None).open()


def test_a_line_that_does_not_fit_leaves_nothing_behind(tmp_path, monkeypatch):
    file, write = LineFile(tmp_path / "lines"), os.write
    file.write("first")
    monkeypatch.setattr(report_targets.os, "write", lambda fd, data: write(fd, data[:3]) if len(data) > 3 else _full())
    with pytest.raises(OSError, match="No space"):
        file.write("second")
    monkeypatch.undo()
    file.write("third")
    file.close()
    assert (tmp_path / "lines").read_text() == "first\nthird\n"


def _full() -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_resumed_run_drops_lines_that_nobody_can_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n' + b"[" * 9999 + b"\n\xff\xfe\n" + b'{"step": 2}\n')
    rewind(tmp_path, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
