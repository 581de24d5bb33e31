"""What holds for every test: one thread, the project importable, deterministic properties, all ranks ended."""

import os
import sys
from pathlib import Path

# Before torch is imported, and for every process that a test starts: two threads per rank are ten times slower.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

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
