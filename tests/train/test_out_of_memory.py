"""Out of memory: where, what held how much, what helps. The errors are PyTorch's own; the sizes are made up."""

from __future__ import annotations

import re
import traceback
from types import SimpleNamespace

import pytest
import torch

from tests import parity
from tests.support import fake_gpu, processes
from tests.support.fake_gpu import GPU, FakeGPU
from titanmoe.components import COMPONENTS
from titanmoe.config.load import read_draft
from titanmoe.config.schema import Config
from titanmoe.train import host_resources, out_of_memory
from titanmoe.train.optimizers.adamw import AdamW
from titanmoe.train.out_of_memory import advise_settings, explain, held_bytes, is_out_of_memory

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.00 GiB is "
    "free. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF. See documentation for Memory"
)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def cpu_error() -> BaseException:
    try:
        torch.empty(1 << 62, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError


def trainer(**changes: int) -> SimpleNamespace:
    config = Config()
    config.training.local_batch_size = 4
    weight = torch.nn.Parameter(torch.zeros(1 << 20))
    weight.grad = torch.zeros(1 << 20)
    optimizer = AdamW({"w": weight}, config.optimizer)
    optimizer.moments()
    return SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        parameters={"w": weight},
        gradients=SimpleNamespace(trained={"w": weight}),
        optimizer=optimizer,
        state=SimpleNamespace(step=7),
    )


@pytest.mark.parametrize(
    ("error", "yes"),
    [
        (cpu_error(), True),
        (MemoryError(), True),
        (torch.OutOfMemoryError(CUDA), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_the_errors_that_mean_it(error, yes):
    assert is_out_of_memory(error) is yes


def test_what_it_says():
    run = trainer()
    text = explain(cpu_error(), run, 3, run.config)
    first, held, helps, *rest = text.splitlines()
    assert first.startswith("rank 3 is out of memory: step 7, in a block: ") and "4611686018427387904 bytes" in first
    assert "weights 4 MiB, gradients 4 MiB, optimizer state 8 MiB, activations, gathered weights" in held
    assert re.search(r"of \d+\.\d\d GiB$", held) and helps == "what helps most:" and len(rest) == 3
    gpu = explain(raised(torch.OutOfMemoryError(CUDA)), None, 0, run.config)
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity" in gpu and "documentation" not in gpu


def test_what_is_held_is_counted():
    held = held_bytes(trainer())
    assert held["weights"] == held["gradients"] == 4 << 20 and held["optimizer state"] == (8 << 20) + 4


def test_what_the_kernel_will_leave_no_time_to_say(monkeypatch):
    monkeypatch.setattr(host_resources, "memory_limit", lambda: 1 << 30)
    run = trainer()
    first, _, *rest = out_of_memory.memory_advice(run, run.config).splitlines()
    assert first.startswith("each rank holds weights 4 MiB, gradients 4 MiB, optimizer state 8 MiB; and activ")
    assert len(rest) == 3 and "local_batch_size" in rest[0]
    monkeypatch.setattr(host_resources, "memory_limit", lambda: 20 << 20)
    assert "1. more ranks" in out_of_memory.memory_advice(run, run.config)


def test_the_part_of_the_step_is_read_from_the_traceback(monkeypatch):
    def where(*frames: tuple[str, str]) -> str:
        found = [traceback.FrameSummary(file, 1, name) for file, name in frames]
        monkeypatch.setattr(out_of_memory.traceback, "extract_tb", lambda trace: found)
        return out_of_memory._activity(ValueError(), "a block")

    package = "/x/titanmoe/"
    step = (package + "train/trainer.py", "train_step")
    assert where((package + "train/build.py", "build_training"), ("/torch/a.py", "f")) == "in building the model"
    experts = (package + "moe/layer.py", "forward"), (package + "moe/experts.py", "forward")
    assert where(step, *experts) == "in the MoE layer"
    assert where(step) == "in a block"
    update = (package + "train/optimizers/adamw.py", "step"), ("/torch/o.py", "step")
    assert where(step, *update) == "in the optimizer's step"
    engine = ("/torch/autograd/graph.py", "_engine_run_backward")
    assert where(step, engine, (package + "parallel/choose_attention.py", "backward")) == "in backward of attention"


def test_what_helps_depends_on_what_holds_most():
    config = trainer().config
    said, *passing = advise_settings(config, 4, 9, 20)
    assert said == "what helps most:" and len(passing) == 3
    assert passing[0] == "  1. training.local_batch_size = 2 (it is 4): activations shrink with it"
    assert passing[1].startswith('  2. activation_checkpoint.mode = "full" (it is "none")')
    assert passing[2].startswith("  3. parallelism.cp = 2")
    assert advise_settings(config, 9, 1, 0)[1].startswith("  1. more ranks")
    config.parallelism.pp = 2
    assert 'reshard_after_forward = "always"' in advise_settings(config, 4, 9, 20)[3]
    config.parallelism.pp, config.parallelism.experts.edp = 1, 1  # a copy of experts
    assert 'reshard_after_forward = "always"' in advise_settings(config, 4, 9, 20)[3]


def test_where_the_weights_alone_do_not_fit_only_what_shares_them_is_advised(monkeypatch):
    monkeypatch.setattr(host_resources, "memory_limit", lambda: 24 << 20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run = trainer()
    said, *ways = out_of_memory.memory_advice(run, run.config).splitlines()[1:]
    assert said == (
        "weights, gradients and optimizer state alone are 16 MiB a rank, and it has 12 MiB: smaller batches, "
        "recomputation and cp cannot help; what does:"
    )
    assert ways[0].startswith("  1. more ranks, on more GPUs or machines") and "cp =" not in "".join(ways)
    run.config.parallelism.dp_replicate = 2
    assert "  1. parallelism.dp_replicate = 1 (it is 2)" in explain(cpu_error(), run, 0, run.config)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert "what helps most:" in out_of_memory.memory_advice(run, run.config)
    # Before there are weights, their number is known.
    monkeypatch.setattr(host_resources, "memory_limit", lambda: 1 << 20)
    config = read_draft(["--config", "debug", "--training.device=cpu"], COMPONENTS).config
    early = explain(cpu_error(), None, 0, config)
    assert re.search(r"in starting: .*\nweights, gradients and optimizer state alone are \d+ MiB a rank, and it", early)
    assert "optimizer.offload" not in early


def test_moments_that_are_kept_in_the_hosts_memory_are_not_counted_on_a_gpu():
    config, gpu = Config(), torch.device("cuda")
    assert sum(out_of_memory._state_bytes(5, 5, config, gpu).values()) == 20
    config.optimizer.offload = True
    assert sum(out_of_memory._state_bytes(5, 5, config, gpu).values()) == 10
    assert sum(out_of_memory._state_bytes(5, 5, config, torch.device("cpu")).values()) == 20


def test_the_memory_of_the_host_is_the_least_limit_around_the_process(monkeypatch, tmp_path):
    known = host_resources.memory_limit()
    monkeypatch.setattr(host_resources, "CGROUPS", tmp_path)
    (tmp_path / "job/step").mkdir(parents=True)
    (tmp_path / "memory/other").mkdir(parents=True)
    real = host_resources._lines

    def lines(file: str) -> list[str]:
        groups = ["9:cpu:/other", "4:cpu,memory:/other", "0::/job/step"]
        return groups if file == "/proc/self/cgroup" else real(file)

    monkeypatch.setattr(host_resources, "_lines", lines)
    (tmp_path / "job/step/memory.max").write_text("max\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert host_resources.memory_limit() >= known > 0
    (tmp_path / "job/memory.max").write_text("2000\n")
    assert host_resources.memory_limit() == 2000
    (tmp_path / "memory/other/memory.limit_in_bytes").write_text("1000")
    assert host_resources.memory_limit() == 1000


RUNS_OUT = """
import sys
from titanmoe.components import COMPONENTS
from titanmoe.train import launch
from titanmoe.train.trainer import Trainer

class RunsOut(Trainer):
    def train_step(self):
        if self.training.state.step == 1:
            bytearray(1 << 62)
        return super().train_step()

sys.exit(launch.main(sys.argv[1:], COMPONENTS, trainer=lambda config, training: RunsOut(training)))
"""


def test_a_rank_that_runs_out_in_a_step_says_what_it_held(tmp_path):
    changes = {"model.num_layers": 1, "training.steps": 3, "data.source": "synthetic", "metrics.console": "lines"}
    words = parity.arguments(parity.TINY | changes | {"job.dump_folder": str(tmp_path)})
    run = processes.run(["-c", RUNS_OUT, *words])
    assert run.returncode == 1 and "step 1/3" in run.stdout and "Traceback" not in run.stderr
    first, held, *_ = run.stderr[run.stderr.index("error: ") :].splitlines()
    assert first.startswith("error: rank 0 is out of memory: step 1, in ")
    assert re.match(r"held: weights \d+ MiB, gradients \d+ MiB, optimizer state \d+ MiB, activations", held), held


def test_on_a_gpu_what_the_allocator_has_and_what_others_have():
    with FakeGPU():
        held = out_of_memory.held_bytes(SimpleNamespace(**vars(trainer()) | {"device": GPU}))
    reserved, room = fake_gpu.RESERVED, fake_gpu.ROOM
    assert held["of"] == room and held["other programs and libraries on this GPU"] == room - fake_gpu.FREE - reserved
    own = sum(held[name] for name in ("weights", "gradients", "optimizer state"))
    assert own > 0 and held[out_of_memory.OTHER_MEMORY] == reserved - own
