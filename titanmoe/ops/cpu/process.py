"""How a rank on CPUs shares the machine with the others: threads, waiting, memory. Without torch where it can be."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def prepare(local_world: int) -> None:
    """local_world: ranks on this machine."""
    share_cores(local_world)
    leave_cores_to_others()
    keep_pages()


def share_cores(local_world: int) -> None:
    """One thread per core over all ranks: more wait for each other (2 per core were measured 10 times slower)."""
    if local_world > 1 and "OMP_NUM_THREADS" not in os.environ:
        import torch

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_world))


def leave_cores_to_others() -> None:
    """Have the threads of this rank wait for a free core when they wake up, and not push others off theirs.

    Where ranks share cores, gloo's thread would often wake up in place of the one that holds the lock it needs, and
    try that lock until its own time is up: a sum over 4 ranks on 2 cores takes a quarter of the time without this. A
    policy that was chosen for this process (chrt) stays.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_pages() -> None:
    """Let glibc keep freed memory: every step allocates the same gigabytes again.

    By default each large tensor is a mapping of its own, whose pages the kernel clears at first touch: 40 % of the
    CPU time of a step with 316M parameters. A setting in the environment takes precedence.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
