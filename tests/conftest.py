"""For every test: one thread, the project importable, deterministic property tests, no rank left over.

It does not import torch: when workers run the tests, the process that distributes them does not need it.
"""

import atexit
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, and for every process that a test starts: two threads per rank are ten times slower.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # a made-up name of a model must not be looked up on the hub
# As ranks on CPUs do (titanmoe/train/runtime.py): a thread that wakes up waits for a free core. This saves 7 % of the
# suite's time.
if hasattr(os, "SCHED_BATCH"):  # Linux
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# Hundreds of processes import the same modules. Without compiled files each compiles them anew, and pytest all asserts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# Compiled code by kind of processor: AVX-512 code reused under AVX2 ends in a segmentation fault.
CPU = "-".join(os.environ.get(name, "own") for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"))
for compiler in ("TORCHINDUCTOR", "TRITON"):
    folder = Path(tempfile.gettempdir(), f"titanmoe_tests_{os.getuid()}", CPU, compiler.lower())
    os.environ.setdefault(f"{compiler}_CACHE_DIR", str(folder))

from tests.support import no_garbage  # noqa: E402, F401, I001 - before all that is large

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

from tests.support import byte_pairs, slow_cases  # noqa: E402

PROPERTIES = {"deadline": None, "max_examples": 40, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("titanmoe", derandomize=True, **PROPERTIES)
settings.register_profile("varied", print_blob=True, **PROPERTIES)  # make slow, which prints its seed
settings.load_profile("titanmoe")
# It would read all modules for constants to try: three seconds, and examples that change with any other file.
providers.is_local_module_file = lambda path: False

LONG = (
    "test_parity", "test_session", "parallel/test_compiled", "rl/test_policy_trainer", "test_bench_scripts",
    "parallel/test_adapter_dropout", "rehearse/test_clean", "train/test_muon",
    "checkpoint_hf/test_fields", "ops/test_interpreter", "checkpoint/test_relayout", "data/test_chat_layouts",
    "parallel/test_unsharded", "checkpoint_hf/test_peft", "plan/test_memory", "parallel/test_vocabulary_pipeline",
    "models/test_linear_attention", "train/test_reference", "test_fine_tuning", "moe/test_compile",
    "rehearse/test_faults", "parallel/test_adapters", "train/test_validation", "test_fake_gpu",
    "plan/test_candidates", "ops/test_kernels_compile", "plan/test_dispatch_costs", "test_get_started",
    "watch/test_stragglers", "checkpoint_hf/test_blocks", "test_gpu_ranks", "train/test_distillation",
    "test_launch_scripts", "watch/test_hang", "train/test_restarts",
)  # fmt: skip
"""The files that take longest. They come first: the worker that got one of them last would be waited for."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):  # xdist, which would begin with the files that have most tests
        config.option.loadscopereorder = False
    if is_worker(config):  # it need not take apart all that it has imported: 3 CPU-seconds
        atexit.register(os._exit, 0)  # runs last, as one of the first


def is_worker(config: pytest.Config) -> bool:
    """Return whether this process is one of xdist's workers, whose exit status nobody reads."""
    return hasattr(config, "workerinput")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-of-each", action="store_true", help="of each parametrized test the first case alone")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    table = slow_cases.quick_tests()
    if whole_suite(config):
        config.stash[slow_cases.PROBLEMS] = slow_cases.table_problems(table, {item.nodeid for item in items})
    for item in items:
        if item.nodeid in table:
            item.add_marker(pytest.mark.slow)
    yield  # -m is applied
    if config.getoption("--one-of-each"):
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        items[:] = reversed(first.values())
    items.sort(key=lambda item: turn(item.nodeid))


def turn(nodeid: str) -> int:
    file = nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
    return LONG.index(file) if file in LONG else len(LONG)


def whole_suite(config: pytest.Config) -> bool:
    """Return whether nothing was picked by name."""
    picked = {"-k", "-m", "--lf"}.intersection(config.invocation_params.args)
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not picked


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End an xdist worker whose GPU has failed, so that a new one runs the next tests: here all of them would fail."""
    torch = sys.modules.get("torch")
    if item.get_closest_marker("gpu") and "PYTEST_XDIST_WORKER" in os.environ and torch and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not is_worker(session.config):
        gc.unfreeze()
    if ranks := sys.modules.get("tests.world"):
        ranks.shutdown()


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_pairs.write_tokenizer(tmp_path_factory.mktemp("bpe"))
