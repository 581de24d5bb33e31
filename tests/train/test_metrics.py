import json
import math
from pathlib import Path

import pytest
import torch

from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.models.count import flops_per_token, parameters
from titanmoe.train import metrics
from titanmoe.train.folder import claim
from titanmoe.train.metrics import Metrics, as_json, peak_flops
from titanmoe.train.runtime import Runtime

VALUES = {"loss": 5.5, "grad_norm": 1.25, "lr": 3e-4, "tokens": 1000.0, "imbalance": 1.5, "layers.3.imbalance": 1.5}


@pytest.fixture
def config(tmp_path) -> Config:
    config = Config()
    config.job.dump_folder, config.job.name = str(tmp_path), "run"
    config.training.steps = 4
    config.metrics.tensorboard = False
    return config


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that a test moves."""
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    return now


def make(config: Config, rank: int = 0) -> Metrics:
    runtime = Runtime(rank=rank, local_rank=rank, world=4, device=torch.device("cpu"))
    flops = flops_per_token(config.model, config.training.seq_len)
    folder = claim(config)[0] if rank == 0 else Path(config.job.dump_folder)
    return Metrics(config, runtime, derive(4, config.parallelism), parameters(config.model), flops, folder)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rates_cover_the_time_since_the_last_line_and_the_first_step_stands_apart(config, clock, capsys):
    config.metrics.log_every = 2
    config.metrics.peak_tflops = 1e-3
    told = make(config)
    for step, seconds in enumerate((50.0, 1.0, 4.0, 1.0), 1):
        clock[0] += seconds
        told.log(step, VALUES)
    told.close()

    first, second, last = lines(told.folder)
    assert [line["step"] for line in (first, second, last)] == [1, 2, 4]
    assert (first["step_time_s"], first["tokens_per_s"]) == (50.0, 20.0)
    assert (second["step_time_s"], second["tokens_per_s"]) == (1.0, 1000.0)
    assert (last["step_time_s"], last["tokens_per_s"]) == (2.5, 400.0)
    assert last["mfu"] == pytest.approx(400.0 * told.flops_per_token / (4 * 1e9))
    assert last["memory_gib"] > 0.05
    assert {name: last[name] for name in VALUES} == VALUES

    printed = capsys.readouterr().out.splitlines()
    steps = [line for line in printed if line.startswith("step ")]
    assert "ETA" not in steps[0] and "first step took 50.0 s" in printed[printed.index(steps[0]) + 1]
    assert steps[1].endswith("ETA 0:00:02")
    for part in (
        "step 2/4",
        "loss 5.5000",
        "grad norm 1.250",
        "lr 3.00e-04",
        "1,000 tokens/s",
        "MFU",
        "imbalance 1.50",
    ):
        assert part in steps[1]


def test_a_validation_is_always_told_and_its_time_is_in_no_other_figure(config, clock, capsys):
    config.metrics.log_every = 4
    told = make(config)
    for step in range(1, 4):
        clock[0] += 1.0
        told.log(step, VALUES)
    clock[0] += 1.0 + 5.0
    config.training.steps = 9
    told.log(5, VALUES | {"val_loss": 2.0, "val_perplexity": math.exp(2), "val_best": 1.5, "val_s": 5.0})
    clock[0] += 1.0
    told.log(6, VALUES | {"val_loss": 1.25, "val_perplexity": math.exp(1.25), "val_best": 1.25, "val_s": 0.0})
    told.close()
    _, line, _ = lines(told.folder)
    assert line["step"] == 5 and line["val_best"] == 1.5
    assert (line["step_time_s"], line["tokens_per_s"]) == (0.75, 1000.0)  # 3 s for 3 steps of 1,000 tokens, to step 5
    shown = capsys.readouterr().out
    assert "val loss 2.0000 (best 1.5000)  perplexity 7.39" in shown and "val loss 1.2500 (the best)" in shown


def test_the_banner_names_model_mapping_and_batch_and_never_hides_forced_balance(config, capsys):
    config.parallelism.tp, config.parallelism.experts.ep = 2, 4
    config.training.local_batch_size, config.training.global_batch_size = 4, 16
    config.moe.force_balance = True
    told = make(config)
    told.log(1, VALUES)
    told.close()
    printed = capsys.readouterr().out
    for part in (
        "895,552 parameters",
        "305,728 active",
        "dp_shard 2 x tp 2",
        "ep 4",
        "4 ranks on CPU",
        "= 4,096 tokens",
    ):
        assert part in printed
    assert "2 data ranks x 2 microbatches of 4" in printed
    assert printed.count("FORCED BALANCE") == 2


def test_other_ranks_write_nothing(config, capsys):
    told = make(config, rank=1)
    told.log(1, VALUES)
    told.close()
    assert not list(Path(config.job.dump_folder).iterdir())
    assert not capsys.readouterr().out


def test_json_stays_strict_when_a_value_is_not_finite():
    line = as_json({"step": 3, "loss": math.nan, "grad_norm": math.inf, "lr": 0.1})
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 3,
        "loss": None,
        "grad_norm": None,
        "lr": 0.1,
        "nonfinite": {"loss": "nan", "grad_norm": "inf"},
    }


def test_tensorboard_holds_the_same_numbers(config):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config.metrics.tensorboard = True
    told = make(config)
    told.log(1, VALUES)
    told.close()
    events = EventAccumulator(str(told.folder / "tensorboard"))
    events.Reload()
    assert events.Scalars("loss")[0].value == 5.5
    assert events.Scalars("imbalance/layer 3")[0].value == 1.5


def test_peaks_of_known_gpus():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.5e12
    assert peak_flops("NVIDIA H200", "bfloat16") == 989.5e12
    assert peak_flops("NVIDIA GB200", "bfloat16") == 2500e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float16") == 312e12
    assert peak_flops("NVIDIA H200", "float32") is None
    assert peak_flops("Some GPU", "bfloat16") is None
