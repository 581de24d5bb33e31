"""The memory that a step frees is reused by the next one: no page is cleared twice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FILL = """
import resource, sys, torch
from titanmoe.train.runtime import _keep_pages
if sys.argv[1] == "kept":
    _keep_pages()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(2**24)
before = faults()
for _ in range(16):
    torch.ones(2**24)
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_memory_that_was_freed_is_touched_without_page_faults() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def faults(how: str) -> int:
        run = [sys.executable, "-c", FILL, how]
        return int(subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout)

    pages = 2**26 // os.sysconf("SC_PAGE_SIZE")
    # A small object may take freed memory once or twice, so that the next tensor goes elsewhere.
    assert faults("left") > 14 * pages and faults("kept") < 3 * pages
