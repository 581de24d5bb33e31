"""What holds for every test: one thread, the project importable, deterministic properties, all ranks ended."""

import os
import sys
import tempfile
from pathlib import Path

# Before torch is imported, and for every process that a test starts: two threads per rank are ten times slower.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# Compiled code by kind of processor: code for AVX-512 found again under AVX2 ends in a segmentation fault.
CPU = "-".join(os.environ.get(name, "own") for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"))
for compiler in ("TORCHINDUCTOR", "TRITON"):
    folder = Path(tempfile.gettempdir(), f"titanmoe_tests_{os.getuid()}", CPU, compiler.lower())
    os.environ.setdefault(f"{compiler}_CACHE_DIR", str(folder))

import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests import world  # noqa: E402

torch.set_num_threads(1)
settings.register_profile(
    "titanmoe", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("titanmoe")


def pytest_sessionfinish() -> None:
    world.shutdown()
