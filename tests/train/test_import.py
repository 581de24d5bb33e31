"""titanmoe itself is quick to import: what a start waits for is torch."""

import subprocess
import sys

RUN = "titanmoe.train.launch, titanmoe.train.trainer"
ADDED = f"""
import importlib, sys, time
for name in sys.argv[1:]:
    importlib.import_module(name)
used = time.process_time()
import {RUN}
print(time.process_time() - used)
"""
NAMES = f"import sys, {RUN}; print(*sys.modules)"


def python(code: str, *args: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *args], check=True, capture_output=True, text=True).stdout


def test_titanmoe_adds_little_to_the_import_of_torch() -> None:
    names = python(NAMES).split()
    assert [name for name in names if "moe.kernels" in name] == ["titanmoe.moe.kernels"]  # none of them, without need
    given = [name for name in names if name.split(".")[0].startswith("torch")]
    # CPU time, and one good try of three: other work on the machine must not fail it.
    assert any(float(python(ADDED, *given)) < 0.3 for _ in range(3))
