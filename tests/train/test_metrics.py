import errno
import io
import json
import math
import os
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.support import fake_gpu
from tests.support.fake_gpu import GPU, FakeGPU
from tests.support.full_disk import fail_writes
from titanmoe.components import COMPONENTS
from titanmoe.config import load
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.train import console, metrics, report_targets, runtime
from titanmoe.train.alarms import LoadAlarm, warn_of_no_balancing
from titanmoe.train.build import build_metrics
from titanmoe.train.metrics import Metrics, as_json, peak_flops
from titanmoe.train.run_folder import claim_folder, rewind
from titanmoe.train.runtime import Runtime
from titanmoe.train.timing import Clock

LOAD = [100.0, 300.0, 0.0, 0.0]
VALUES = {
    "loss": 5.5,
    "grad_norm": 1.25,
    "lr": 3e-4,
    "tokens": 1000.0,
    "flops": 2e9,
    "imbalance": 1.5,
    "layers.3.imbalance": 1.5,
}


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
    folder = claim_folder(config.job, config.checkpoint)[0] if rank == 0 else Path(config.job.dump_folder)
    return begun(config, folder, rank=rank)


def begun(config: Config, folder: Path, world: int = 4, step: int = 0, rank: int = 0) -> Metrics:
    runtime = Runtime(rank=rank, local_rank=rank, world=world, device=torch.device("cpu"))
    run = build_metrics(config, runtime, derive(world, config.parallelism), Clock(runtime.device))
    run.begin(folder, step)
    return run


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_rates_cover_the_time_since_the_last_line_and_the_first_step_stands_apart(config, clock, capsys):
    config.metrics.log_every = 2
    config.metrics.peak_tflops = 1e-3
    run = make(config)
    for step, seconds in enumerate((50.0, 1.0, 4.0, 1.0), 1):
        clock[0] += seconds
        run.log(step, VALUES)
    run.close()

    first, second, last = lines(run.folder)
    assert [line["step"] for line in (first, second, last)] == [1, 2, 4]
    assert (first["step_time_s"], first["tokens_per_s"]) == (50.0, 20.0)
    assert (second["step_time_s"], second["tokens_per_s"]) == (1.0, 1000.0)
    assert (last["step_time_s"], last["tokens_per_s"]) == (2.5, 400.0)
    assert last["mfu"] == pytest.approx(2 * 2e9 / 5 / (4 * 1e9))
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


def test_an_evaluation_without_a_loss_is_reported_too(config, clock):
    """Evaluations of reinforcement learning and completions of prompts have no "val_loss"."""
    config.metrics.log_every, config.training.steps = 10, 20
    run = make(config)
    for step, seconds in enumerate([{}, {"val_s": 3.0, "val_reward": 0.5}, {"samples_s": 4.0}, {}], 1):
        clock[0] += 1.0 + sum(value for name, value in seconds.items() if name.endswith("_s"))
        run.log(step, VALUES | seconds)
    run.close()
    assert [(line["step"], line["step_time_s"]) for line in lines(run.folder)] == [(1, 1.0), (2, 1.0), (3, 1.0)]


def test_a_validation_is_always_reported_and_its_time_is_in_no_other_figure(config, clock, capsys):
    config.metrics.log_every, config.training.steps = 4, 9
    run = make(config)
    for step in range(1, 4):
        clock[0] += 1.0
        run.log(step, VALUES)
    clock[0] += 1.0 + 5.0
    run.log(5, VALUES | {"val_loss": 2.0, "val_perplexity": math.exp(2), "val_best": 1.5, "val_s": 5.0})
    clock[0] += 1.0
    run.log(6, VALUES | {"val_loss": 1.25, "val_perplexity": math.exp(1.25), "val_best": 1.25, "val_s": 0.0})
    clock[0] += 1.0
    run.log(7, VALUES | {"val_loss": 50.0, "val_perplexity": math.exp(50), "val_best": 1.25, "val_s": 0.0})
    run.close()
    _, line, _, _ = lines(run.folder)
    assert line["step"] == 5 and line["val_best"] == 1.5
    assert (line["step_time_s"], line["tokens_per_s"]) == (0.75, 1000.0)  # 3 s for 3 steps of 1,000 tokens, to step 5
    shown = capsys.readouterr().out
    assert "val loss 2.0000 (best 1.5000)  perplexity 7.39" in shown and "val loss 1.2500 (the best)" in shown
    assert "perplexity 5.18e+21" in shown


def test_the_banner_names_model_mapping_and_batch_and_never_hides_forced_balance(config, capsys):
    config.parallelism.tp, config.parallelism.experts.ep = 2, 4
    config.training.local_batch_size, config.training.global_batch_size = 4, 16
    config.moe.force_balance = True
    run = make(config)
    run.log(1, VALUES)
    run.close()
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
    run = make(config, rank=1)
    run.log(1, VALUES)
    run.close()
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


def test_tensorboard_begins_with_the_losses_and_holds_the_same_numbers_in_groups(config):
    """It sorts groups by their names' characters, and capitals come first."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config.metrics.tensorboard = True
    run = make(config)
    run.log(1, VALUES | {"layers.3.load": LOAD, "val_loss": 4.0})
    run.event(1, "spike", "loss 9")
    run.close()
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert events.Scalars("train/loss")[0].value == 5.5
    assert events.Scalars("layers imbalance/layer 3")[0].value == 1.5
    tags = events.Tags()["scalars"]
    assert sorted(tags)[:3] == ["Loss/smoothed", "Loss/train", "Loss/validation"]
    assert {"train/loss_smoothed", "validation/val_loss", "speed/tokens_per_s", "memory/memory_gib"} <= set(tags)
    assert "experts/imbalance" in tags
    (image,) = events.Images("load/layer 3")
    assert (image.width, image.height) == (400, 160)
    assert events.Tags()["distributions"] or events.Histograms("load over its mean/layer 3")
    config_text, spike = (events.Tensors(f"{name}/text_summary")[0].tensor_proto for name in ("config", "events/spike"))
    assert b"[parallelism.experts]" in config_text.string_val[0] and spike.string_val == [b"loss 9"]


def test_loads_have_a_file_of_their_own_and_never_swell_the_lines(config):
    config.training.steps, config.metrics.experts_every = 7, 3
    run = make(config)
    for step in range(1, 8):
        run.log(step, VALUES | {"layers.3.load": LOAD})
    run.close()
    found = [json.loads(line) for line in (run.folder / "experts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [1, 3, 6, 7]
    assert found[0]["load"] == {"3": [100, 300, 0, 0]}
    assert all("layers.3.load" not in line for line in lines(run.folder))


def test_loads_are_left_out_on_demand_and_thin_in_a_long_run(config):
    config.metrics.experts_every = 0
    run = make(config)
    run.log(1, VALUES | {"layers.3.load": LOAD})
    run.close()
    assert (run.folder / "experts.jsonl").read_text() == ""
    config.metrics.experts_every, config.training.steps, config.metrics.log_every = -1, 1500, 100
    run = make(config)
    for step in range(1, 11):
        run.log(step, VALUES | {"layers.3.load": LOAD})
    run.close()
    assert len((run.folder / "experts.jsonl").read_text().splitlines()) == 4  # 1, 3, 6, 9


def test_times_of_the_parts_are_per_step(config):
    class Clock:
        def take(self, steps: int) -> dict[str, float]:
            return {"data": 6.0 / steps}

    config.metrics.log_every = 3
    run = make(config)
    run.clock = Clock()
    for step in (1, 2, 3, 4):
        run.log(step, VALUES)
    run.close()
    assert [line["time.data"] for line in lines(run.folder)] == [6.0, 3.0, 6.0]


def test_events_name_the_machine_a_spike_and_what_is_reported(config, capsys):
    config.training.steps, config.metrics.log_every = 40, 10
    run = make(config)
    for step in range(1, 31):
        run.log(step, VALUES | {"loss": 9.0 if step == 25 else 3.0})
    run.event(30, "stop", "loss nan")
    run.close()
    start, spike, stop = (json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines())
    assert (start["step"], start["kind"], start["environment"]["torch"]) == (0, "start", torch.__version__)
    assert (spike["step"], spike["kind"]) == (25, "spike")  # a step between two lines
    assert stop["text"] == "loss nan" and stop["time"].endswith("+00:00")
    assert "step 25  SPIKE: loss 9.0000" in capsys.readouterr().out


def test_a_restart_says_what_has_changed_and_the_run_ends_with_a_line(config, clock, capsys):
    config.checkpoint.enable, config.parallelism.tp = True, 2
    run = make(config)
    clock[0] += 61
    run.log(1, VALUES)
    run.log(2, VALUES | {"loss": 4.5})
    run.close()
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == (
        "ended      step 2 of 4 after 0:01:01: loss 5.5000 at step 1 -> 4.5000; no checkpoint was completed; "
        f"a page of it: titanmoe report {run.folder}"
    )
    assert "none: nothing keeps the experts evenly busy" in printed
    begun(config, run.folder, world=2, step=2).close()
    start, restart = (json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines())
    assert start["environment"]["attention"] == "dp_shard 2 x tp 2" and start["environment"]["command"]
    assert restart["text"] == (
        "continues after step 2; ranks 4 -> 2; attention dp_shard 2 x tp 2 -> tp 2; experts edp 4 -> edp 2"
    )


def test_the_header_says_what_is_saved_and_the_last_line_what_was(config, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    run = make(config)
    run.log(4, VALUES)
    checkpoints = run.folder / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "latest").write_text("step-00000004\n")
    run.close()
    *header, _, _, done = capsys.readouterr().out.splitlines()
    (saves,) = (line for line in header if line.startswith("checkpoint "))
    about = f"to {checkpoints} (the last 3 kept, about 10.7 MB each)"
    assert saves.split(maxsplit=1)[1].strip() == f"saves every 500 steps and at the end {about}"
    assert done.startswith("done       step 4 of 4") and f"; saved as {checkpoints}/step-00000004; " in done

    config.checkpoint.keep_every, config.checkpoint.keep_best = 1000, "val_loss"
    text = console.describe_saving(config.checkpoint, run.header.checkpoint_bytes, run.folder).plain
    assert "(the last 3, every 1,000th step and the best by val_loss kept, about" in text
    config.checkpoint.interval = config.checkpoint.keep_last = 0
    config.checkpoint.folder = str(run.folder)
    text = console.describe_saving(config.checkpoint, run.header.checkpoint_bytes, run.folder).plain
    assert text == f"saves at the end to {run.folder}/run (all kept, about 10.7 MB each)"
    monkeypatch.setattr(console.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=5e6))
    text = console.describe_saving(config.checkpoint, run.header.checkpoint_bytes, run.folder).plain
    assert text.endswith("each): only 5 MB are free there")

    config.checkpoint.enable = False
    run = make(config)
    run.log(4, VALUES)
    run.close()
    printed = capsys.readouterr().out
    assert "saves nothing (checkpoint.enable = false)" in printed
    assert printed.splitlines()[-1].count("; nothing was saved (checkpoint.enable = false); ") == 1
    assert "red" in str(console.describe_saving(config.checkpoint, run.header.checkpoint_bytes, run.folder).style)


def test_a_loss_that_flies_away_is_in_the_lines_the_events_and_the_last_lines(config, capsys):
    config.training.steps, config.optimizer.lr = 30, 3.0
    run = make(config)
    for step in range(1, 31):
        run.log(step, VALUES | {"loss": 5.5 if step == 1 else 165.0 / step + 8})
    run.close()
    *lines, wrong, done = capsys.readouterr().out.splitlines()
    told = [line for line in lines if line.startswith("step ")]
    assert [("LOSS TOO HIGH" in line) for line in told].index(True) == 3
    assert told[2].startswith("step 3  DIVERGENCE: since step 2 the loss is far too high, up to 90.5: ")
    assert wrong.startswith("done, but since step 2 the loss is far too high, up to 90.5: it was 5.5 at the first step")
    assert ": lower optimizer.lr (3) or raise lr_schedule.warmup_steps" in wrong
    assert done.startswith("           step 30 of 30 after ")
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "divergence"] == [3]


@pytest.mark.parametrize("every", [1, 4])
def test_the_smoothed_loss_and_what_is_wrong_with_it_go_on_when_a_run_resumes(config, every):
    config.training.steps, config.metrics.log_every = 60, every
    values = [6.0 if step < 5 else 9.0 - 0.02 * step for step in range(1, 61)]

    def go(run: Metrics, steps: range) -> tuple[float, bool]:
        for step in steps:
            run.log(step, VALUES | {"loss": values[step - 1]})
        run.close()
        return run._average, bool(run._divergence.text)

    whole = go(make(config), range(1, 41))
    config.job.name = "resumed"
    run = make(config)
    go(run, range(1, 37))
    rewind(run.folder, 36)
    again = begun(config, run.folder, step=36)
    average, wrong = go(again, range(37, 41))
    assert whole[1] and average == pytest.approx(whole[0], rel=1e-12 if every == 1 else 0.01)
    assert wrong or every > 1, "known from before, without sixteen more steps"


def test_experts_that_die_and_routing_that_collapses_are_events(config, capsys):
    config.training.steps = 60
    run = make(config)
    for step in range(1, 56):
        layers = {
            "layers.3.load": [100.0, 100.0 if step < 3 else 0.0, 100.0, 100.0],
            "layers.5.load": [350.0, 10, 10, 10],
        }
        run.log(step, VALUES | layers)
    run.close()
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    found = {event["step"]: event["text"] for event in events if event["kind"] == "collapse"}
    assert sorted(found) == [50, 52], "each once, when it has lasted"
    assert found[52].startswith("layer 3: expert 1 got under 1% of the mean load for 50 steps; moe.bias_update_rate")
    assert found[50].startswith(
        "layer 5: the busiest expert had over 2 times the mean load for 50 steps, now 3.7 times"
    )
    assert "step 52  COLLAPSE: layer 3" in capsys.readouterr().out


def test_a_busy_expert_is_reported_after_fifty_steps_and_a_collapse_after_ten():
    for loads, step, text in (
        (
            [13.0, 1, 1, 1, 1, 1, 1, 1],
            50,
            "layer 0: the busiest expert had over 4 times the mean load for 50 steps, now 5.2",
        ),
        ([800.0, 1, 1, 0, 0, 0, 0, 0], 10, "layer 0: all tokens have chosen the same expert for 10 steps, 8.0 times"),
    ):
        watch = LoadAlarm(8, 1)
        reported = {n: texts for n in range(1, 61) if (texts := list(watch.check({0: loads})))}
        assert list(reported)[:1] == [step] and any(line.startswith(text) for line in reported[step])
    even = LoadAlarm(4, 4)  # every token visits every expert
    assert not any(list(even.check({0: [9.0] * 4})) for _ in range(60))


def test_an_expert_that_recovers_is_reported_again_when_it_dies_again():
    watch = LoadAlarm(4, 2)
    reported = [list(watch.check({0: [9.0, 9.0, 9.0, 0.0 if step % 60 else 9.0]})) for step in range(120)]
    assert [step for step, texts in enumerate(reported) if texts] == [50, 110]


@pytest.mark.parametrize("field", ["aux_loss", "aux_loss_sequence", "aux_loss_global", "bias_update_rate"])
def test_a_run_without_any_balancing_says_so(config, field):
    assert warn_of_no_balancing(config.model, config.moe).startswith("none: nothing keeps the experts evenly busy")
    setattr(config.moe, field, 0.01)
    assert warn_of_no_balancing(config.model, config.moe) == ""


def test_the_config_lies_in_the_folder_and_is_a_recipe(config):
    run = make(config)
    run.close()
    again = load(["--config", str(run.folder / "config.toml")], COMPONENTS, lambda config: [])
    assert again == config


def test_weights_and_biases_get_the_same_and_one_run_stays_one(config, monkeypatch):
    seen = []

    class Run:
        def __getattr__(self, name):
            return lambda *args, **named: seen.append((name, args, named))

    fake = types.ModuleType("wandb")
    fake.init = lambda **named: seen.append(("init", (), named)) or Run()
    fake.Histogram = lambda values: ("histogram", values)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config.metrics.wandb, config.checkpoint.enable = "titan", True
    for _ in range(2):
        run = make(config)
        run.log(1, VALUES | {"layers.3.load": LOAD})
        run.event(1, "spike", "loss 9")
        run.event(1, "save", "step-00000001")
        run.close()
    names = [name for name, _, _ in seen]
    assert names == ["init", "define_metric", "define_metric", "log", "alert", "finish"] * 2
    first, again = (named for name, _, named in seen if name == "init")
    assert first["project"] == "titan" and first["id"] == again["id"] and first["resume"] == "allow"
    assert first["config"]["model"]["family"] == "mixtral"
    logged = next(args[0] for name, args, _ in seen if name == "log")
    assert logged["train/loss"] == 5.5 and logged["step"] == 1
    assert logged["load/layer 3"] == ("histogram", LOAD)


def test_peaks_of_known_gpus():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.5e12
    assert peak_flops("NVIDIA H200", "bfloat16") == 989.5e12
    assert peak_flops("NVIDIA GB200", "bfloat16") == 2500e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float16") == 312e12
    assert peak_flops("NVIDIA H200", "float32") is None
    assert peak_flops("Some GPU", "bfloat16") is None


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("loss", "train/loss"),
        ("val_loss", "validation/val_loss"),
        ("val_s", "time/val_s"),
        ("data_wait_s", "time/data_wait_s"),
        ("data.epoch.books", "data/epoch.books"),
        ("time.dispatch", "time/dispatch"),
        ("layers.3.imbalance", "layers imbalance/layer 3"),
        ("aux_loss", "experts/aux_loss"),
        ("z_loss", "more/z_loss"),  # not of this run
    ],
)
def test_tensorboard_puts_a_figure_where_a_person_looks(name: str, tag: str) -> None:
    from titanmoe.train import report_targets

    assert report_targets.chart_name(name, ["aux_loss"]) == tag


# ---- logs that cannot be written


def logged(folder: Path) -> list[str]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if event["kind"] == "log"]


def test_a_full_disk_pauses_metrics_and_their_return_is_reported(config, clock, capsys, monkeypatch):
    config.training.steps = 9
    run = make(config)
    run.log(1, VALUES)
    file = run.folder / "metrics.jsonl"
    file.rename(run.folder / "before")
    run._file.close()
    with monkeypatch.context() as full:
        fail_writes(full, file)
        for step in (2, 3, 4):
            run.log(step, VALUES)
        clock[0] += 31
        run.log(5, VALUES)  # fails again: no second warning, and a longer pause
        clock[0] += 31
        run.log(6, VALUES)
    clock[0] += 31
    run.log(7, VALUES)
    run.log(8, VALUES)
    run.close()
    assert [line["step"] for line in lines(run.folder)] == [7, 8]
    assert logged(run.folder) == [
        f"{file}: No space left on device: the run goes on without it and tries again in 30 s, then less often",
        f"{file}: works again; 5 lines were lost",
    ]
    shown = capsys.readouterr().out
    assert "step 2  LOG: " in shown and "step 7  LOG: " in shown
    assert all(f"step {n}/9" in shown for n in range(1, 9)), "the console is another place"


def test_failing_events_are_reported_on_the_console(config, clock, capsys, monkeypatch):
    run = make(config)
    file = run.folder / "events.jsonl"
    run._events.close()
    file.unlink()
    with monkeypatch.context() as full:
        fail_writes(full, file)
        run.event(1, "save", "step-00000001")
    clock[0] += 31
    run.event(2, "save", "step-00000002")
    run.close()
    assert "LOG: " + str(file) + ": No space left on device" in capsys.readouterr().out
    assert logged(run.folder) == [f"{file}: works again; 2 lines were lost"]  # the warning was one


def test_a_config_that_cannot_be_written_does_not_end_the_run(config, monkeypatch):
    folder = Path(config.job.dump_folder, "run")
    fail_writes(monkeypatch, folder / "config.toml")
    run = make(config)
    run.log(1, VALUES)
    run.close()
    assert logged(run.folder) == [f"{folder}/config.toml: No space left on device"]
    assert [line["step"] for line in lines(run.folder)] == [1]


def test_a_console_that_cannot_be_written_does_not_end_the_run(config, monkeypatch):
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.delenv("RANK", raising=False)
    run = make(config)
    run.log(1, VALUES)
    runtime.print_rank_0("saved")
    run.close()
    assert [line["step"] for line in lines(run.folder)] == [1]
    assert logged(run.folder)[0].startswith("the console: No space left on device")


def test_tensorboard_that_fails_is_reopened(config, clock, monkeypatch):
    config.metrics.tensorboard, config.training.steps = True, 9
    run = make(config)
    log = report_targets.TensorBoardWriter.log

    def fail(self: report_targets.TensorBoardWriter, report: object) -> None:
        raise RuntimeError("worker is gone")

    monkeypatch.setattr(report_targets.TensorBoardWriter, "log", fail)
    run.log(1, VALUES)
    run.log(2, VALUES)
    monkeypatch.setattr(report_targets.TensorBoardWriter, "log", log)
    clock[0] += 31
    run.log(3, VALUES)
    run.close()
    first, last = logged(run.folder)
    assert first.startswith("TensorBoard: RuntimeError: worker is gone: the run goes on")
    assert last.startswith("TensorBoard: works again; ")
    assert len(list((run.folder / "tensorboard").iterdir())) == 2


def test_a_gpu_has_a_name_a_peak_and_a_memory():
    with FakeGPU():
        name = metrics.device_name(GPU)
        assert metrics.peak_flops(name, "bfloat16") == 989.5e12
        assert metrics.memory_gib(GPU) == fake_gpu.RESERVED / 2**30
