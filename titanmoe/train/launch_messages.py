"""What a rank and the launcher that started it tell each other around a run, and the user before its first step.

* `titanmoe train` passes the config that it has read and checked to its ranks in a file, so that they neither read the
  recipe nor apply the laws again. Under torchrun each of them does.
* A rank that fails leaves a note, and `titanmoe train` prints the one message of a failed run. Under torchrun nobody
  reads it, and the rank prints its message itself.
* Until the first step a line of the terminal says what the run is waiting for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from titanmoe.config import ConfigError, exit_with
from titanmoe.config.fields import build, flat
from titanmoe.config.kinds import Parts
from titanmoe.config.schema import Config

ERASE = "\r\x1b[K"


def show_status(what: str) -> None:
    """Show what the run waits for on a terminal's last line, on rank 0 alone; "" removes the line."""
    if os.environ.get("RANK", "0") != "0" or os.environ.get("TERM") == "dumb":
        return
    with contextlib.suppress(OSError, ValueError):  # a console that fails, or is closed, must not end the run
        if sys.stdout.isatty():
            sys.stdout.write(f"{ERASE}{what} ..." if what else ERASE)
            sys.stdout.flush()


CONFIG_FILE = "TITANMOE_CONFIG"
"""The environment variable with the name of the file that hands the config on."""


class Checked(NamedTuple):
    """What the launcher hands on to its ranks."""

    config: Config
    """As the recipe and the command line say, with nothing derived: a restart may have other ranks."""
    ranks: int
    """The number of ranks that it was checked for."""
    source: str
    """Where it comes from, for a message."""
    scores: str = ""
    """What the ranks count (titanmoe.train.reference) in place of training: of "labels", or of the "likeliest" ids."""


@contextmanager
def hand_on_config(checked: Checked) -> Iterator[Path]:
    """Write the file for as long as ranks may be started."""
    with tempfile.NamedTemporaryFile("w", prefix="titanmoe-", suffix=".json", encoding="utf-8") as file:
        json.dump(checked._replace(config=flat(checked.config))._asdict(), file)
        file.flush()
        yield Path(file.name)


def read_handed_config(parts: Parts) -> Checked | None:
    """Return what the launcher handed on; None where none has."""
    if not (file := os.environ.get(CONFIG_FILE)):
        return None
    values = json.loads(Path(file).read_text(encoding="utf-8"))
    return Checked(build(values["config"], parts), values["ranks"], values["source"], values["scores"])


NOTE_FILE = "TITANMOE_FAILURE"
"""The environment variable with the name of the file for a failed rank's note."""
SPARE = "TITANMOE_FAILURE_SPARE"
"""The environment variable with a folder in memory, for what does not fit on the disk of the logs."""
ADVICE = ".memory"
"""The suffix of the file with the text of `leave_advice`."""
OF_OTHERS = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (closed|timeout)|timed out|nccl communicator|"
    r"remote process|peer",
    re.IGNORECASE,
)
"""Matches the message of an error of torch.distributed if another rank is gone or does not answer."""


def leave_note(
    text: str,
    consequence: bool = False,
    alike: bool = False,
    during: Mapping[int, str] | None = None,
    following: Iterable[int] = (),
) -> bool:
    """Return whether there is a launcher that can read it. consequence: another rank failed before this one. alike: all
    ranks say the same. during: which part of the step ranks were in that cannot say so themselves. following:
    ranks of this machine that end because of what this note says, whatever they end with."""
    if not (file := os.environ.get(NOTE_FILE)):
        return False
    note = {"message": text, "timestamp": time.time()}  # torch's names, which its agent reads
    note |= {"consequence": consequence, "alike": alike, "during": during or {}, "following": list(following)}
    return _write(Path(file), json.dumps(note))


def _write(file: Path, text: str) -> bool:
    """Write a file, completely or not at all, in memory if its disk is full; return whether that was possible."""
    for place in places(file):
        new = place.with_name(f"{place.name}.new")
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(place)
            return True
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
    return False


def places(file: Path) -> list[Path]:
    """Return where a rank's note, or its advice, may be: in the folder of the logs, or in memory."""
    spare = os.environ.get(SPARE)
    return [file, Path(spare, file.name)] if spare else [file]


@contextlib.contextmanager
def notes_in_memory() -> Iterator[None]:
    """Give the ranks that this process starts a folder in memory for notes that their disk has no room for."""
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK | os.X_OK) else None
    try:
        folder = tempfile.TemporaryDirectory(prefix="titanmoe-", dir=where)
    except OSError:  # no room there either
        yield
        return
    with folder as os.environ[SPARE]:
        try:
            yield
        finally:
            del os.environ[SPARE]


def leave_advice(make: Callable[[], str]) -> None:
    """For the case that the kernel kills this rank for lack of memory, which leaves it no time to say anything."""
    if file := os.environ.get(NOTE_FILE):
        _write(Path(f"{file}{ADVICE}"), make())


def refuse(error: ConfigError) -> NoReturn:
    """A user's mistake: exit code 2, said once."""
    if leave_note(str(error), alike=True):
        sys.exit(2)
    exit_with(error.problems, error.source)


def leave_traceback(error: BaseException) -> None:
    """The error and where it was raised; the log has the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/titanmoe/" in frame.filename] or frames
    place = f" ({ours[-1].filename}:{ours[-1].lineno}, in {ours[-1].name})" if ours else ""
    reason = str(error).strip().partition("\n")[0]
    leave_note(f"{type(error).__name__}{': ' if reason else ''}{reason}{place}", caused_by_others(error))


def caused_by_others(error: BaseException) -> bool:
    """Whether another rank caused this error, or one that it was raised from: torch's pipeline wraps errors."""
    if error.__cause__ is not None and caused_by_others(error.__cause__):
        return True
    distributed = type(error).__name__.startswith("Dist") or isinstance(error, RuntimeError | ConnectionError)
    return distributed and OF_OTHERS.search(str(error)) is not None
