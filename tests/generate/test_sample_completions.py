"""Prompts that are completed during a run: as the plain model completes them, and the run is one without them."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import parity, reference, world
from tests.checkpoint import runs
from tests.generate import saved
from tests.launcher.test_launch import started
from tests.support.live_bytes import LiveBytes
from titanmoe.config import ConfigError
from titanmoe.data.tokenizer import ByteTokenizer
from titanmoe.generate import prompts
from titanmoe.generate.sample_completions import SampleCompletions
from titanmoe.report.page import page
from titanmoe.report.read_run import read_runs
from titanmoe.train.refusals import check_inputs_and_resolve

CHATML = Path(__file__).parents[2] / "train_configs/chatml.jinja"
MOST = 6
PROMPTS = ["a", "héllo\n", "black quartz judge"]
TEXTS = {
    "data.source": "files",
    "model.vocab_size": 320,
    "training.seq_len": 32,
    "training.steps": 4,
    "validation.interval": 2,
    "validation.steps": 1,
    "validation.held_out": 2,
    "validation.samples": {"prompts": PROMPTS, "max_tokens": MOST},
    "checkpoint.interval": 2,
    "checkpoint.keep_last": 0,
    "optimizer.lr": 0.01,
    "lr_schedule.decay": "none",
}
MAPPINGS: dict[str, dict[str, Any]] = {
    "pp2 ep2": {"parallelism.pp": 2, "parallelism.experts.ep": 2, "pipeline.schedule": "1F1B"},
    "cp2 ep4": {"parallelism.cp": 2, "parallelism.experts.ep": 4, "moe.aux_loss": 0.01},
    "tp2 etp2, adapters": {"parallelism.tp": 2, "parallelism.experts.etp": 2, "lora.rank": 2, "lora.experts_rank": 2},
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(8):
        (folder / f"{i}.txt").write_text("sphinx of black quartz " * (3 + i))
    return folder


def train(folder: str, changes: dict[str, Any], completions: bool) -> dict[str, torch.Tensor]:
    """Train from wherever the folder's run is; return weights and selection biases, whole."""
    seams = {"samples": SampleCompletions} if completions else {}
    trainer = parity.make_trainer(runs.RUN | TEXTS | {"job.dump_folder": folder} | changes, **seams)
    trainer.train()
    training = trainer.training
    return parity.whole(training.parameters | training.buffers, training.runtime.rank, training.fold)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def completions_of(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return {line["step"]: line["samples"] for line in lines(folder, "events.jsonl") if line["kind"] == "samples"}


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_a_run_with_completions_is_one_without_to_the_bit(mapping: str, texts: Path, tmp_path: Path) -> None:
    """Check a resumed run too, and that completions are the most probable tokens of the plain model."""
    changes = MAPPINGS[mapping] | {"data.paths": [str(texts)]}
    plain = world.run(4, train, str(tmp_path / "plain"), changes, False)[0]
    beside = world.run(4, train, str(tmp_path / "beside"), changes, True)[0]
    world.run(4, train, str(tmp_path / "resumed"), changes | {"training.steps": 2}, True)
    resumed = world.run(4, train, str(tmp_path / "resumed"), changes, True)[0]
    for other in (beside, resumed):
        assert plain.keys() == other.keys() and all(torch.equal(plain[name], x) for name, x in other.items())
    for name in ("loss", "grad_norm", "val_loss"):
        wanted = [line.get(name) for line in lines(tmp_path / "plain", "metrics.jsonl")]
        for run in ("beside", "resumed"):
            assert [line.get(name) for line in lines(tmp_path / run, "metrics.jsonl")] == wanted
    found = completions_of(tmp_path / "beside")
    assert list(found) == [2, 4] and found == completions_of(tmp_path / "resumed")

    config, tokenizer = parity.read(runs.RUN | TEXTS | changes, 4), ByteTokenizer()
    bias = {name: plain.pop(name) for name in list(plain) if name.endswith("expert_bias")}
    weights = reference.with_adapters(config, plain, 0)
    for line, prompt in zip(found[4], PROMPTS, strict=True):
        prompt_ids = row = [tokenizer.bos, *prompt.encode()]
        for _ in range(MOST):
            row = [*row, int(saved.plain_logits(config, weights, bias, row)[-1, : tokenizer.vocab_size].argmax())]
        made = row[len(prompt_ids) :]
        made = made[: made.index(tokenizer.eos)] if tokenizer.eos in made else made
        wanted = {"prompt": prompt, "completion": tokenizer.decode(made), "tokens": len(made)}
        assert line == wanted | {"end": "length" if len(made) == MOST else "eos"}


def bytes_of_completions(folder: str, changes: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes that a completion leaves in memory, most that it takes at a time, and those of the copied weights."""
    trainer = parity.make_trainer(runs.RUN | TEXTS | {"job.dump_folder": folder} | changes, samples=SampleCompletions)
    completions = trainer.training.samples
    completions.state.step = 2
    gc.disable()  # as in a run
    try:
        with LiveBytes(shard.tensor for _, shard in trainer.training.shards.values()) as live:
            assert completions.after_step().keys() == {"samples", "samples_s"}
            left = live.now
    finally:
        gc.enable()
    model = parity.read(runs.RUN | TEXTS | changes, 1).model
    copied = sum(x.numel() for x in reference.initial_weights(model, 0).values())
    trainer.training.loader.close()
    return left, live.peak, copied * 8


def test_the_copy_is_gone_after_a_completion(texts: Path, tmp_path: Path) -> None:
    changes = saved.MODELS["deepseek_v3"] | {"data.paths": [str(texts)], "model.vocab_size": 320, "model.dim": 64}
    ((left, peak, copied),) = world.run(1, bytes_of_completions, str(tmp_path), changes)
    assert left < 0.01 * copied and copied < peak < 1.5 * copied


def test_completions_are_shown(texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Look for completions in the header, the console, the report and TensorBoard, after every second validation."""
    changes = {"data.paths": [str(texts)], "validation.samples.every": 2, "metrics.tensorboard": True}
    changes |= {"training.steps": 9, "validation.interval": 2, "metrics.console": "lines"}
    world.run(1, train, str(tmp_path), changes, True)
    assert list(completions_of(tmp_path)) == [4, 8, 9]
    metrics = lines(tmp_path, "metrics.jsonl")
    assert [line["step"] for line in metrics if "samples_s" in line] == [4, 8, 9]
    (event,) = [line for line in lines(tmp_path, "events.jsonl") if line["kind"] == "samples" and line["step"] == 9]
    assert event["text"].startswith("3 prompts completed\n  a\n    > ")
    html = page(read_runs([tmp_path / "run"]), {})
    assert "<h2>Completions of the prompts</h2>" in html and "black quartz judge\n    &gt; " in html
    (file,) = (tmp_path / "run/tensorboard").iterdir()
    assert b"    3 prompts completed\n" in file.read_bytes()


def test_the_command_completes_prompts(texts: Path, tmp_path: Path) -> None:
    """And refuses one that is too long before it starts ranks."""
    changes = TEXTS | {"data.paths": [str(texts)], "training.steps": 2}
    done = started(tmp_path, forks=True, **changes).wait()
    assert done.returncode == 0 and "\nstep 2  SAMPLES: 3 prompts completed\n  a\n    > " in done.stdout, done.stderr
    done = started(tmp_path, forks=True, **changes | {"validation.samples": {"prompts": ["a" * 32]}}).wait()
    assert done.returncode == 2 and "more than training.seq_len = 32: shorten it" in done.stderr
    assert "2 ranks" not in done.stdout


def test_prompts_are_read_as_texts_or_chats(tmp_path: Path) -> None:
    records = ["one", {"prompt": "two"}, {"prompt": [{"role": "user", "content": "three"}]}]
    records += [{"messages": [{"role": "user", "content": "four"}, {"role": "assistant", "content": "left out"}]}]
    records += [{"conversations": [{"from": "human", "value": "five"}, {"from": "gpt", "value": "left out"}]}]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, records)))
    changes = TEXTS | {"data.paths": [str(tmp_path)], "training.seq_len": 128, "validation.samples": {}}
    changes |= {"validation.samples.path": str(tmp_path / "asked.jsonl"), "validation.samples.prompts": ["zero"]}
    numbers = ["zero", "one", "two", "three", "four", "five"]

    def decoded(changes: dict[str, Any]) -> tuple[list[str], list[str]]:
        samples = prompts.read_samples(parity.read(changes, 1))
        assert all(prompt.ids[0] == ByteTokenizer.bos and prompt.ids[1] < 256 for prompt in samples.prompts)
        return [prompt.text for prompt in samples.prompts], [
            samples.tokenizer.decode(prompt.ids) for prompt in samples.prompts
        ]

    def in_chatml(text: str) -> str:
        return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    template = {"data.chat_template": str(CHATML), "data.format": "chat"}
    assert decoded(changes | template) == (numbers, [in_chatml(text) for text in numbers])
    as_text = numbers[:3] + [in_chatml(text) for text in numbers[3:]]
    assert decoded(changes | template | {"validation.samples.format": "text"}) == (numbers, as_text)
    (tmp_path / "asked.jsonl").write_text('"one"')
    assert decoded(changes) == (["zero", "one"], ["zero", "one"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation.interval": 0}, "validation.interval = 0 makes none: set it, such as 100"),
        ({"data.source": "synthetic", "data.paths": []}, "has no tokenizer to read them with: leave the prompts out"),
        ({"validation.samples.top_p": 0.5}, "temperature = 0 samples nothing"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str, texts: Path) -> None:
    with pytest.raises(ConfigError) as error:
        parity.read(TEXTS | {"data.paths": [str(texts)]} | changes, 1)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation.samples.prompts": ["a" * 32]}, "prompts[0] has 33 tokens, more than training.seq_len = 32"),
        ({"validation.samples.path": "no.jsonl"}, "no.jsonl: No such file"),
        ({"validation.samples.path": "empty.jsonl"}, "empty.jsonl has no prompts: give it lines of JSON"),
        ({"validation.samples.path": "bad.jsonl"}, 'bad.jsonl:1: is no prompt: write "a text"'),
        ({"validation.samples.path": "bad.jsonl"}, "bad.jsonl:2: has no message before the assistant's"),
        ({"validation.samples.path": "bad.jsonl"}, "bad.jsonl:3: has no 'messages', or null"),
        ({"validation.samples.format": "chat"}, "the byte tokenizer has no chat template of its own: name a Jinja"),
        ({"data.tokenizer": "missing"}, "tokenizer 'missing': there is no file"),
        ({"model.family": "tests.generate.test_cache_bytes:FORGETFUL"}, "it cannot generate; leave the prompts out"),
    ],
)
def test_what_cannot_be_completed_is_refused_before_ranks_start(
    changes: dict[str, Any], message: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.jsonl").write_text('3\n{"messages": [{"role": "assistant", "content": "a"}]}\n{"text": "a"}')
    config = parity.read(TEXTS | {"data.paths": [str(texts)]} | changes, 1)
    with pytest.raises(ConfigError) as error:
        check_inputs_and_resolve(config, lambda config: config)
    assert message in str(error.value)
