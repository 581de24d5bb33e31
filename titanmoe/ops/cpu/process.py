"""How the ranks on one machine share its CPUs: threads, scheduling, memory. Imports torch only where it must.

Called by titanmoe.train.runtime at the start of a rank.
"""

from __future__ import annotations

import ctypes
import os
import sys

from titanmoe.this_process import usable_cores

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def configure_process(local_world: int) -> None:
    """Set threads, scheduling policy and memory allocator of this process, one of a machine's `local_world` ranks."""
    limit_threads(local_world)
    use_batch_scheduling()
    reuse_freed_memory()


def limit_threads(local_world: int) -> None:
    """Set torch's threads so that the `local_world` ranks of this machine together have one per core.

    Does nothing for a single rank, or if OMP_NUM_THREADS is set. With more threads than cores, threads wait for each
    other: 2 per core were measured 10 times slower.
    """
    if local_world > 1 and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, usable_cores() // local_world))


def use_batch_scheduling() -> None:
    """Set the scheduling policy SCHED_BATCH: threads that wake up wait for a free core instead of preempting others.

    Where ranks share cores, gloo's thread would often wake up in place of the one that holds the lock it needs, and try
    that lock until its own time is up: a sum over 4 ranks on 2 cores takes a quarter of the time without this. A policy
    that was chosen for this process (chrt) stays.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def reuse_freed_memory() -> None:
    """Let glibc reuse freed memory instead of returning it to the kernel: steps allocate the same tensors.

    By default each large tensor is a mapping of its own, whose pages the kernel clears at first touch: 40 % of the CPU
    time of a step with 316M parameters. A MALLOC_ setting in the environment takes precedence.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
