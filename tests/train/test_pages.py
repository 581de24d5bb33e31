"""The memory that a step frees is reused by the next one: no page is cleared twice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FILL = """
import ctypes, resource, sys
from titanmoe.ops.cpu.process import keep_pages
if sys.argv[1] == "kept":
    keep_pages()
libc, at = ctypes.CDLL(None), ctypes.c_void_p()

def fill():
    assert libc.posix_memalign(ctypes.byref(at), ctypes.c_size_t(64), ctypes.c_size_t(2**26)) == 0
    ctypes.memset(at, 1, 2**26)
    libc.free(at)

faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(32):
    fill()
before = faults()
for _ in range(8):
    fill()
print(faults() - before)
"""
"""With the C library's own functions, as torch calls them for a tensor: importing it takes four CPU-seconds.

Before version 2.38, glibc puts what alignment leaves over beside a tensor into a cache of 7 pieces per size, and the
freed tensor is too short for the next one until that cache is full: the first rounds do not count.
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_memory_that_was_freed_is_touched_without_page_faults() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def faults(how: str) -> int:
        run = [sys.executable, "-c", FILL, how]
        return int(subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout)

    pages = 2**26 // os.sysconf("SC_PAGE_SIZE")
    assert faults("left") > 7 * pages and faults("kept") < pages
