"""Files through which a rank and its launcher exchange the config and failure notes, and the startup status line.

* `titanmoe train` passes the config that it has read and checked to its ranks in a file; they do not check it again.
  Under torchrun every rank reads and checks the recipe.
* A rank that fails writes a note, and `titanmoe train` prints one message for the failed run. Under torchrun the rank
  prints the message itself.
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

from titanmoe.checkpoint.safe_files import CheckpointError
from titanmoe.config import ConfigError, exit_with
from titanmoe.config.component_kinds import Components
from titanmoe.config.fields import build, flatten
from titanmoe.config.load import format_problems
from titanmoe.config.schema import Config
from titanmoe.this_process import is_rank_0

ERASE = "\r\x1b[K"


def exit_code_of(run: Callable[[], int]) -> int:
    """Return what `run`, the work of a command, returns; 2 after rank 0 has printed what is wrong; 130 if interrupted.

    What is wrong is the message of a ConfigError or CheckpointError.
    """
    try:
        return run()
    except ConfigError as error:
        text = str(error)
    except CheckpointError as error:
        text = format_problems([str(error)])
    except KeyboardInterrupt:
        text = ""
    show_status("")
    if not text:
        return 130
    if is_rank_0():
        print(text, file=sys.stderr, flush=True)
    return 2


def show_status(what: str) -> None:
    """Show what the run is waiting for on the last line of rank 0's terminal, if it has one; "" removes the line."""
    if not is_rank_0() or os.environ.get("TERM") == "dumb":
        return
    with contextlib.suppress(OSError, ValueError):  # a console that fails, or is closed, must not end the run
        if sys.stdout.isatty():
            sys.stdout.write(f"{ERASE}{what} ..." if what else ERASE)
            sys.stdout.flush()


CONFIG_FILE = "TITANMOE_CONFIG"
"""Environment variable with the name of the file with the launcher's config."""


class CheckedConfig(NamedTuple):
    """Config that the launcher has checked and passes to its ranks."""

    config: Config
    """Config of the recipe and the command line, with nothing derived: a restart may have another number of ranks."""
    ranks: int
    """Number of ranks that the config was checked for."""
    source: str
    """Name of the recipe, for messages."""
    scores: str = ""
    """Log-probabilities to compute (titanmoe.train.reference): of "labels", or of the "top-k" ids; "" to train."""


@contextmanager
def pass_config(checked: CheckedConfig) -> Iterator[Path]:
    """Write the checked config to a temporary file, yield its path, and remove it when the context ends.

    The caller sets the variable CONFIG_FILE (TITANMOE_CONFIG) to it in the environment of the ranks that it starts.
    """
    with tempfile.NamedTemporaryFile("w", prefix="titanmoe-", suffix=".json", encoding="utf-8") as file:
        json.dump(checked._replace(config=flatten(checked.config))._asdict(), file)
        file.flush()
        yield Path(file.name)


def read_passed_config(components: Components) -> CheckedConfig | None:
    """Return the config that the launcher has passed by `pass_config`; None if this process has no such launcher."""
    if not (file := os.environ.get(CONFIG_FILE)):
        return None
    values = json.loads(Path(file).read_text(encoding="utf-8"))
    return CheckedConfig(build(values["config"], components), values["ranks"], values["source"], values["scores"])


NOTE_FILE = "TITANMOE_FAILURE"
"""Environment variable with the name of the file for a failed rank's note."""
NOTES_FOLDER = "TITANMOE_FAILURE_SPARE"
"""Environment variable with a folder in memory, for notes that do not fit on the disk of the logs."""
ADVICE_SUFFIX = ".memory"
"""Suffix of the file with the text of `write_memory_advice`."""
PEER_FAILURE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (closed|timeout)|timed out|nccl communicator|"
    r"remote process|peer|^rank \d+ raised ",
    re.IGNORECASE,
)
"""Pattern of messages of torch.distributed when another rank is gone or does not answer, and of `on_all_ranks`."""


def write_failure_note(
    text: str,
    consequence: bool = False,
    alike: bool = False,
    during: Mapping[int, str] | None = None,
    following: Iterable[int] = (),
) -> bool:
    """Write a file that tells the launcher why this rank failed; return whether it was written.

    False without a launcher that reads it, too.

    Args:
        text: the message for the user.
        consequence: whether another rank failed before this one.
        alike: whether all ranks write the same text.
        during: phase of the step that other ranks were in, by rank, for ranks that cannot write it themselves.
        following: ranks of this machine that end because of the failure in this note.
    """
    if not (file := os.environ.get(NOTE_FILE)):
        return False
    note = {"message": text, "timestamp": time.time()}  # torch's names, which its agent reads
    note |= {"consequence": consequence, "alike": alike, "during": during or {}, "following": list(following)}
    return _write(Path(file), json.dumps(note))


def _write(file: Path, text: str) -> bool:
    """Write a file completely or not at all, in NOTES_FOLDER if its disk is full; return whether it was written."""
    for place in note_paths(file):
        new = place.with_name(f"{place.name}.new")
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(place)
            return True
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
    return False


def note_paths(file: Path) -> list[Path]:
    """Return where a rank's failure note may be: `file`, and if NOTES_FOLDER is set, one in memory for a full disk."""
    spare = os.environ.get(NOTES_FOLDER)
    return [file, Path(spare, file.name)] if spare else [file]


@contextlib.contextmanager
def notes_in_memory() -> Iterator[None]:
    """Create a folder in memory for the failure notes of the ranks started in this context; remove it at the end.

    Ranks write there if the disk of the logs is full; the environment variable NOTES_FOLDER names the folder. Without
    /dev/shm it is a temporary folder; if that has no room either, there is none.
    """
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK | os.X_OK) else None
    try:
        folder = tempfile.TemporaryDirectory(prefix="titanmoe-", dir=where)
    except OSError:  # no room there either
        yield
        return
    with folder as os.environ[NOTES_FOLDER]:
        try:
            yield
        finally:
            del os.environ[NOTES_FOLDER]


def write_memory_advice(make: Callable[[], str]) -> None:
    """Write the advice that `make` returns, which the launcher prints if the kernel kills this rank for lack of memory.

    Without a launcher that reads it, `make` is not called.
    """
    if file := os.environ.get(NOTE_FILE):
        _write(Path(f"{file}{ADVICE_SUFFIX}"), make())


def exit_refused(error: ConfigError) -> NoReturn:
    """Print the problems of a refused config, or write them for a launcher, which prints them once, and exit (2)."""
    if write_failure_note(str(error), alike=True):
        sys.exit(2)
    exit_with(error.problems, error.source)


def write_error_note(error: BaseException) -> None:
    """Write a failure note of one line: the error, and the last frame of titanmoe's code that it passed.

    It counts as a consequence if another rank caused the error. Does nothing if no launcher reads it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/titanmoe/" in frame.filename] or frames
    place = f" ({ours[-1].filename}:{ours[-1].lineno}, in {ours[-1].name})" if ours else ""
    reason = str(error).strip().partition("\n")[0]
    write_failure_note(f"{type(error).__name__}{': ' if reason else ''}{reason}{place}", caused_by_other_rank(error))


def caused_by_other_rank(error: BaseException) -> bool:
    """Return whether an error looks like the consequence of another rank's failure, such as a closed connection.

    The type and message of the error or of its cause decide, so a time-out of a collective counts too.
    """
    if error.__cause__ is not None and caused_by_other_rank(error.__cause__):
        return True
    distributed = type(error).__name__.startswith("Dist") or isinstance(error, RuntimeError | ConnectionError)
    return distributed and PEER_FAILURE.search(str(error)) is not None
