"""titanmoe generate, as a user calls it: on a run's checkpoint and on a Hugging Face folder."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import parity, world
from tests.checkpoint import runs
from tests.checkpoint_hf import models
from tests.generate import saved
from tests.support import processes
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.cli import main
from titanmoe.data.tokenizer import open_tokenizer

ROOT = Path(__file__).parents[2]
TEXT = {"model.vocab_size": 320, "model.num_kv_heads": 4, "moe.capacity_factor": 0.5}
GREEDY = ["--temperature", "0", "--max-tokens", "8"]
FOLDED = ["--parallelism.tp", "2", "--parallelism.experts.ep", "2", "--etp", "2"]


def command(*words: object) -> tuple[int, str, str]:
    """On a rank, whose process group is there already."""
    from titanmoe.train import runtime

    rank, size = dist.get_rank(), dist.get_world_size()
    start, stop = runtime.start, runtime.stop
    runtime.start = lambda config: runtime.Runtime(rank, rank, size, torch.device("cpu"))
    runtime.stop = lambda: None
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["generate", *map(str, words)])
    finally:
        runtime.start, runtime.stop = start, stop
    return code, out.getvalue(), err.getvalue()


def ask(*words: object, ranks: int = 1) -> tuple[int, str, str]:
    (first, *others) = world.run(ranks, command, *words)
    assert all(other == (first[0], "", "") for other in others)
    return first


def lines(*words: object, ranks: int = 1) -> list[dict[str, Any]]:
    code, out, err = ask(*words, "--json", ranks=ranks)
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run of two steps, trained under a mapping that no test uses."""
    folder = tmp_path_factory.mktemp("trained")
    world.run(4, runs.go, str(folder), TEXT | {"parallelism.pp": 2, "parallelism.experts.ep": 2}, 1)
    return folder / "run"


def test_greedy_text_of_a_run_is_what_the_plain_model_finds_most_probable(run: Path) -> None:
    prompts = ["a", "héllo\n", ""]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    completions = lines("--checkpoint", run, *words, *GREEDY, "--dtype", "float64")
    assert [(line["number"], line["prompt"]) for line in completions] == list(enumerate(prompts))

    path = run / "checkpoints/step-00000001"
    weights = {name: Checkpoint(path).read(name) for name in Checkpoint(path).tensors}
    weights = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")}
    bias = {name: tensor for name, tensor in weights.items() if name.endswith("expert_bias")}
    config = parity.read(TEXT, 1)
    for line, prompt in zip(completions, prompts, strict=True):
        row = [256, *prompt.encode()]
        assert line["prompt_tokens"] == row
        want: list[int] = []
        for _ in range(8):
            logits = saved.plain_logits(config, weights, bias, row + want)[-1, :259]
            if (token := int(logits.argmax())) == 257:
                break
            want.append(token)
        assert line["tokens"] == want
        assert line["end"] == ("length" if len(want) == 8 else "eos")
        assert line["text"] == bytes(token for token in want if token < 256).decode("utf-8", "replace")

    assert lines("--checkpoint", run, *words, *GREEDY, "--dtype", "float64", *FOLDED, ranks=4) == completions
    (alone,) = lines("--checkpoint", path, "--prompt", prompts[1], *GREEDY, "--dtype", "float64")
    assert alone == completions[1] | {"number": 0}


def test_draws_depend_on_the_seed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("x\nx\n\n")
    words = "--checkpoint", run, "--prompts", tmp_path / "prompts", "--temperature", 2, "--max-tokens", 6
    first = lines(*words, "--seed", 1)
    assert first == lines(*words, "--seed", 1, "--batch-size", 1)
    assert [line["tokens"] for line in lines(*words, "--seed", 2)] != [line["tokens"] for line in first]
    assert first[0]["tokens"] != first[1]["tokens"]  # equal prompts are still different prompts
    assert [line["prompt"] for line in first] == ["x", "x", ""]
    (sampled,) = lines(*words[:2], "--prompt", "x", *words[4:], "--seed", 1, "--top-k", 1)
    (most_probable,) = lines(*words[:2], "--prompt", "x", "--temperature", 0, "--max-tokens", 6)
    assert sampled == most_probable


def test_completions_and_stop_words(run: Path) -> None:
    words = "--checkpoint", run, "--prompt", "x", "--temperature", 2, "--max-tokens", 9, "--batch-size", 2
    first, *others = lines(*words, "--completions", 3)
    assert [first["completion_number"], *(line["completion_number"] for line in others)] == [0, 1, 2]
    assert len({line["text"] for line in others} | {first["text"]}) == 3
    (alone,) = lines(*words)
    assert alone == {name: value for name, value in first.items() if name != "completion_number"}
    word = alone["text"][1]
    (stopped,) = lines(*words, "--stop", word, "--stop", "not in the text")
    assert stopped["end"] == "stop" and stopped["text"] == alone["text"][: alone["text"].index(word) + 1]
    assert ask(*words, "--completions", 2)[1].count("--- 1, ") == 2


def test_plain_and_streamed_output(run: Path) -> None:
    words = "--checkpoint", run, "--prompt", "ab", "--max-tokens", 16, "--seed", 5, "--temperature", 1
    (line,) = lines(*words)
    code, out, err = ask(*words)
    assert (code, out) == (0, f"ab{line['text']}\n")
    assert f"{run} (step 1): {len(line['tokens'])} tokens after 1 prompt in" in err
    assert "x cpu; cache on a rank: 512 bytes per token\n" in err
    assert "note: sequences get up to 19 tokens; the model was trained on 16" in err
    assert ask(*words, "--stream")[:2] == (0, out)
    _, out, _ = ask(*words, "--prompt", "c")
    assert out.startswith(f"--- 1, {len(line['tokens'])} tokens, ended by {line['end']}\nab{line['text']}\n--- 2, ")


def test_a_question_is_written_by_the_chat_template(run: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("half of 4? half of 2?\n" * 20)
    assert main(["tokenizer", "train", f"{tmp_path}/text", "--vocab-size", "270", "--out", f"{tmp_path}/made"]) == 0
    words = "--checkpoint", run, "--tokenizer", tmp_path / "made", "--chat", "--prompt", "half <|user|>", *GREEDY
    (line,) = lines(*words)
    tokenizer = open_tokenizer(str(tmp_path / "made"))
    ids = tokenizer.encode_with_offsets("<|user|>half <|user|><|assistant|>").tokens_T.tolist()
    assert line["prompt_tokens"] == ids and ids[-2:] == [2, 3]  # a mark in a message is a mark, as in training
    assert ask(*words)[:2] == (0, f"half <|user|>\n{line['text']}\n")
    assert "has no chat template" in ask("--checkpoint", run, "--chat", "--prompt", "a")[2]


def test_mistakes_are_reported_at_once(run: Path, tmp_path: Path) -> None:
    words = ["--checkpoint", run, "--prompt", "a", "--prompt", "b"]
    code, out, err = ask(*words, "--temperature", 0, "--top-k", 3, "--max-tokens", 0, "--top-p", 2, "--stream")
    assert (code, out) == (2, "") and err.startswith("error: 4 problems")
    for part in ("--max-tokens = 0", "--top-p = 2.0", "--top-k, --top-p would have no effect", "there are 2: give one"):
        assert part in err
    err = ask(*words[:4], "--temperature", 0, "--completions", 2, "--stop", "", "--stream")[2]
    for part in (
        "--completions 2 with --temperature 0",
        "--completions 2 is for prompts without --stream",
        '--stop ""',
    ):
        assert part in err
    code, _, err = ask(*words, "--parallelism.cp", 2, "--parallelism.pp", 2, "--tp", 3, "--ep", 16)
    assert code == 2
    for part in ("pp = 1", "cp = 1", "parallelism.tp = 3 does not divide model.num_heads = 8", "experts.ep = 16 does"):
        assert part in err
    assert ask("--checkpoint", run)[2].startswith("error: no prompt: give --prompt TEXT")
    assert "no such folder" in ask("--checkpoint", tmp_path / "none", "--prompt", "a")[2]
    assert "contains no checkpoint" in ask("--checkpoint", tmp_path, "--prompt", "a")[2]
    # A folder of weights that was truncated by a copy.
    broken = tmp_path / "step-00000001"
    broken.mkdir()
    for file in (run / "checkpoints/step-00000001").iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[: None if file.suffix == ".json" else 100])
    assert "bytes but was written with" in ask("--checkpoint", broken, "--prompt", "a")[2]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, Any]:
    """A model of transformers, with a tokenizer of the words w0, w1, ..., the last of which ends a text."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    model = models.make("deepseek_v3")
    folder = models.save(model, tmp_path_factory.mktemp("published"))
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "w63"}')
    return folder, model


def test_a_hugging_face_folder_continues_as_in_transformers(published: tuple[Path, Any]) -> None:
    folder, model = published
    prompts = [[5, 9, 33], [1, 2, 3, 4, 5, 6, 7, 8, 9], [60]]
    words = [word for prompt in prompts for word in ("--prompt", " ".join(f"w{i}" for i in prompt))]
    completions = lines("--checkpoint", folder, *words, *GREEDY, "--dtype", "float32")
    for line, prompt in zip(completions, prompts, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=8,
            eos_token_id=63,
            pad_token_id=63,
        )
        want = [token for token in whole[0, len(prompt) :].tolist() if token != 63]
        assert (line["prompt_tokens"], line["tokens"]) == (prompt, want)
        assert line["text"] == "".join(f" w{token}" for token in want)
    code, _, err = ask("--checkpoint", folder, "--prompt", "a", "--tokenizer", "bytes")
    assert code == 2 and "the tokenizer has 259 tokens and the model of" in err and "only 64" in err
    _, _, err = ask("--checkpoint", folder, "--prompt", " ")
    assert "prompt 1 is empty, and the tokenizer has no begin mark" in err


def test_the_command_itself(run: Path) -> None:
    """A process of its own, which joins no others."""
    code = "from titanmoe.cli import command; command()"
    words = ["generate", "--checkpoint", str(run), "--prompt", "a", "--max-tokens", "4", "--json"]
    done = processes.run(["-c", code, *words])
    assert done.returncode == 0, done.stderr
    assert [json.loads(done.stdout)] == lines("--checkpoint", run, "--prompt", "a", "--max-tokens", 4)
