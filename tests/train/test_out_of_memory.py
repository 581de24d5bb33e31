"""Out of memory: where, what held how much, what helps. The errors are PyTorch's own; the sizes are made up."""

from __future__ import annotations

import re
import traceback
from types import SimpleNamespace

import pytest
import torch

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.train import launch, out_of_memory
from titanmoe.train.out_of_memory import explain, holds, is_one, settings

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
    adamw = torch.optim.AdamW([weight])
    adamw.step()
    optimizer = SimpleNamespace(adamw=adamw)
    fold = derive(4, config.parallelism)
    return SimpleNamespace(
        config=config, fold=fold, device=torch.device("cpu"), parameters={"w": weight}, optimizer=optimizer, step=7
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
    assert is_one(error) is yes


def test_what_it_says():
    run = trainer()
    text = explain(cpu_error(), run, 3, run.config)
    first, held, helps, *rest = text.splitlines()
    assert first.startswith("rank 3 is out of memory: step 7, in starting: ") and "4611686018427387904 bytes" in first
    assert "weights 4 MiB, gradients 4 MiB, optimizer state 8 MiB, activations, gathered weights" in held
    assert re.search(r"of \d+\.\d\d GiB$", held) and helps == "what helps most:" and len(rest) == 3
    gpu = explain(raised(torch.OutOfMemoryError(CUDA)), None, 0, run.config)
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity" in gpu and "documentation" not in gpu


def test_what_is_held_is_counted():
    held = holds(trainer())
    assert held["weights"] == held["gradients"] == 4 << 20 and held["optimizer state"] == (8 << 20) + 4


def test_what_the_kernel_will_leave_no_time_to_say(monkeypatch):
    monkeypatch.setattr(out_of_memory, "_memory", lambda: 1 << 30)
    first, _, *rest = out_of_memory.advice(trainer()).splitlines()
    assert first.startswith("each rank holds weights 4 MiB, gradients 4 MiB, optimizer state 8 MiB; and activ")
    assert len(rest) == 3 and "local_batch_size" in rest[0]
    monkeypatch.setattr(out_of_memory, "_memory", lambda: 20 << 20)
    assert "more ranks" in out_of_memory.advice(trainer())


def test_the_part_of_the_step_is_read_from_the_traceback(monkeypatch):
    def where(*frames: tuple[str, str]) -> str:
        found = [traceback.FrameSummary(file, 1, name) for file, name in frames]
        monkeypatch.setattr(out_of_memory.traceback, "extract_tb", lambda trace: found)
        return out_of_memory._where(ValueError())

    package = "/x/titanmoe/"
    step = (package + "train/trainer.py", "train_step")
    assert where((package + "train/trainer.py", "__init__"), ("/torch/a.py", "f")) == "in building the model"
    assert (
        where(step, (package + "moe/layer.py", "forward"), (package + "moe/experts.py", "forward")) == "in the experts"
    )
    assert where(step, (package + "train/optimizer.py", "step"), ("/torch/o.py", "step")) == "in the optimizer's step"
    engine = ("/torch/autograd/graph.py", "_engine_run_backward")
    assert where(step, engine, (package + "parallel/attend.py", "backward")) == "in backward of attention"


def test_what_helps_depends_on_what_holds_most():
    run = trainer()
    passing = settings(run.config, run, {"weights": 1, "activations, gathered weights and buffers": 9, "of": 20})
    assert passing[0] == "training.local_batch_size = 2 (it is 4): activations shrink with it"
    assert passing[1].startswith('activation_checkpoint.mode = "full" (it is "none")')
    assert passing[2].startswith("parallelism.cp = 2")
    state = settings(run.config, run, {"weights": 9, "activations, gathered weights and buffers": 1, "of": 20})
    assert state[0].startswith("more ranks")


def test_the_trainer_that_ran_out_is_asked(monkeypatch, capsys, tmp_path):
    run = trainer()

    def train() -> int:
        raise MemoryError

    monkeypatch.setattr(launch, "read", lambda argv, world: run.config)
    monkeypatch.setattr(launch, "start", lambda config: SimpleNamespace(rank=0))
    monkeypatch.setattr(
        "titanmoe.train.trainer.Trainer", lambda config, runtime: SimpleNamespace(**vars(run), train=train)
    )
    monkeypatch.setattr(launch, "die_with_launcher", lambda: None)
    assert launch.main([]) == 1
    assert capsys.readouterr().err.startswith("error: rank 0 is out of memory: step 7, in ")
