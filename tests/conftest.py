"""For every test: one thread, the project importable, deterministic property tests, no rank left over, the cost
counted.

It does not import torch: when workers run the tests, the process that distributes them does not need it.
"""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported, and for every process that a test starts: two threads per rank are ten times slower.
os.environ["OMP_NUM_THREADS"] = "1"
# As ranks on CPUs do (titanmoe/train/runtime.py): a thread that wakes up waits for a free core. This saves 7 % of the
# suite's time.
if hasattr(os, "SCHED_BATCH"):  # Linux
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# Compiled code by kind of processor: AVX-512 code reused under AVX2 ends in a segmentation fault.
CPU = "-".join(os.environ.get(name, "own") for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"))
for compiler in ("TORCHINDUCTOR", "TRITON"):
    folder = Path(tempfile.gettempdir(), f"titanmoe_tests_{os.getuid()}", CPU, compiler.lower())
    os.environ.setdefault(f"{compiler}_CACHE_DIR", str(folder))

from tests import no_garbage  # noqa: E402, F401, I001 - before all that is large

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

from tests import cost, wider  # noqa: E402

settings.register_profile(
    "titanmoe", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("titanmoe")
# It would read all modules for constants to try: three seconds, and examples that change with any other file.
providers.is_local_module_file = lambda path: False

METER, BILL = cost.Meter(), cost.Bill()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-of-each", action="store_true", help="of each parametrized test the first case alone")


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    table = wider.stand_ins()
    if cost.whole_suite(config):
        config.stash[wider.PROBLEMS] = wider.problems(table, {item.nodeid for item in items})
    for item in items:
        if item.nodeid in table:
            item.add_marker(pytest.mark.slow)
    if config.getoption("--one-of-each"):
        items[:] = {item.nodeid.partition("[")[0]: item for item in reversed(items)}.values()
    items.sort(key=lambda item: cost.turn(item.nodeid))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    METER.read()  # imports are not part of any test's cost


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    if call.when == "teardown":
        item.user_properties.append((cost.PROPERTY, METER.read()))
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    BILL.add(report)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if cost.whole_suite(config):
        terminalreporter.section("cost")
        for line in [*BILL.lines(cost.read_budget()), *BILL.beyond(cost.read_budget())]:
            terminalreporter.line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()
    if ranks := sys.modules.get("tests.world"):
        ranks.shutdown()
    in_a_worker = hasattr(session.config, "workerinput")
    if os.environ.get("CI") and not in_a_worker and cost.whole_suite(session.config):
        session.exitstatus = session.exitstatus or bool(BILL.beyond(cost.read_budget()))
