"""Kernels in Triton's interpreter. python -m tests.ops.interpret OPTIONS: pytest with it."""

from __future__ import annotations

import os
import sys

import pytest


def interpret() -> None:
    """For this process, before it imports a kernel. Triton, which looks for the interpreter when it is imported, is
    imported again: torch's compiler has done so already.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]:
        del sys.modules[name]


if __name__ == "__main__":
    interpret()
    sys.exit(pytest.main(sys.argv[1:]))
