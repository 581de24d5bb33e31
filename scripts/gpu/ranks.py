"""Run a check as the ranks of a small world, each of which is a process that is killed after a time limit.

A rank writes its phases and finally its figures into a file, so that a killed rank still shows where it was. Processes
are forked, so they import nothing: the process that calls `run` must not have used the GPU.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanmoe.comm.collectives import Group

SPARE = 3.0
"""The seconds before the limit at which a rank prints its stack, and that the others have once a rank has ended."""


class OverHost:
    """Functional collectives that copy tensors to the host, because gloo's for CUDA tensors crash in torch 2.11."""

    def __init__(self, device: torch.device):
        self.device = device

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        operation = getattr(torch.ops._c10d_functional, name)
        if name == "wait_tensor":
            return lambda result: operation(result).to(self.device)
        return lambda x, *options: operation(x.cpu(), *options)


class Unsupported(Exception):
    """Error if this machine or this version of torch refuses what a check needs."""


@dataclass
class Rank:
    """A rank's device, group and report, which every check takes as its argument.

    Args:
        device: The device of the rank's tensors.
        group: The world's group, which has a name even if it has one rank.
        report: The JSON file of the rank's phase, and finally of its figures, which `run` reads.
    """

    device: torch.device
    group: Group
    report: Path

    def write(self, **content: Any) -> None:
        """Replace the content of the report file with these fields, at once for a reader."""
        temporary = self.report.with_suffix(".new")
        temporary.write_text(json.dumps(content))
        temporary.replace(self.report)

    def reached(self, phase: str) -> None:
        """Wait for the device, then report the name of the phase that begins now."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.write(phase=phase)

    @contextmanager
    def forbidding_host_syncs(self) -> Iterator[None]:
        """Make torch raise an error where the host waits for the GPU, within this context. On CPUs it does nothing."""
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def work(
    check: Callable[[Rank], dict[str, Any]],
    device: str,
    folder: Path,
    rank: int,
    ranks: int,
    seconds: float,
    environment: dict[str, str],
) -> None:
    """Run a check in this forked process as one rank, report its figures or error in a file, and end the process.

    Its exit status is 0 even after an error. The process group is gloo's, on a GPU too.

    Args:
        check: the check, which returns its figures.
        device: "cuda" or "cpu".
        folder: folder of the ranks' reports, RANK.json.
        rank: number of this rank.
        ranks: number of ranks.
        seconds: time limit; SPARE seconds before it the stack is printed.
        environment: more environment variables.
    """
    faulthandler.dump_traceback_later(max(1.0, seconds - SPARE))
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"} | environment
    here = Rank(torch.device("cuda:0" if device == "cuda" else device), Group("", ranks, rank), folder / f"{rank}.json")
    try:
        if device == "cuda" and not torch.cuda.is_available():
            raise Unsupported(f"PyTorch {torch.__version__} finds no GPU")
        here.reached("start of the process group")
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
        here.group = Group(dist.group.WORLD.group_name, ranks, rank)
        here.write(figures=check(here))
    except Unsupported as error:
        here.write(unsupported=str(error))
    except BaseException as error:
        traceback.print_exc()
        here.write(error=f"{type(error).__name__}: {first_line(error)}")
    sys.stderr.flush()
    os._exit(0)  # a rank whose peer has gone would wait in a destructor


def run(
    check: Callable[[Rank], dict[str, Any]], device: str, ranks: int, seconds: float, environment: dict[str, str]
) -> dict[str, Any]:
    """Run a check on several ranks, each a new process, and return its outcome.

    Args:
        check: The check, called on each rank.
        device: "cuda" or "cpu".
        ranks: The number of ranks.
        seconds: The time limit.
        environment: More environment variables of the ranks.

    Returns:
        A dict with one key: "figures", what the check returned on rank 0; or "unsupported" or "error", the text of the
        rank that wrote it first, because a rank that ends makes the others fail. A late or dead rank is an error.
    """
    with tempfile.TemporaryDirectory(prefix="ranks_") as name:
        folder, fork = Path(name), multiprocessing.get_context("fork")
        processes = [
            fork.Process(target=work, args=(check, device, folder, rank, ranks, seconds, environment))
            for rank in range(ranks)
        ]
        end, first = time.monotonic() + seconds, True
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            time.sleep(0.05)
            if first and not all(process.is_alive() for process in processes):
                end, first = min(end, time.monotonic() + SPARE), False
        late = [process.is_alive() for process in processes]
        for process in processes:
            process.kill()
            process.join(5)  # a kernel that never ends can hold up the end of its process
        files = [folder / f"{rank}.json" for rank in range(ranks)]
        reports = [json.loads(file.read_text()) if file.exists() else {"phase": "start"} for file in files]
        by_time = sorted((file.stat().st_mtime_ns, rank) for rank, file in enumerate(files) if file.exists())
    for kind in ("unsupported", "error"):
        if texts := [reports[rank][kind] for _, rank in by_time if kind in reports[rank]]:
            return {kind: texts[0]}
    for rank, one in enumerate(reports):
        if "phase" in one:
            why = "not done in time" if late[rank] else f"exit status {processes[rank].exitcode}"
            return {"error": f"rank {rank}: {why}, in: {one['phase']}"}
    return reports[0]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without its type, truncated to 300 characters."""
    return str(error).strip().partition("\n")[0][:300]
