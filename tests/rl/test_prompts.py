"""Prompts of reinforcement learning: what is read from their files, and what is refused before ranks start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import parity
from tests.support import byte_pairs, processes
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.tokenizer import ByteTokenizer
from titanmoe.rl.policy_trainer import PromptLoader
from titanmoe.rl.prompt_records import check_prompts, read_prompts
from titanmoe.train.refusals import check_inputs_and_resolve

CHATML = str(processes.ROOT / "train_configs/chatml.jinja")
RL: dict[str, Any] = {
    "model.vocab_size": 320,
    "training.seq_len": 32,
    "rl.reward": "exact",
    "rl.prompts": ["prompts.jsonl"],
    "generation.max_tokens": 8,
    "checkpoint.enable": False,
    "job.name": "run",
}
SUMS = [{"prompt": f"{i} + 1 =", "solution": i + 1} for i in range(7)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(processes.ROOT))
    return tmp_path


def write(folder: Path, records: list[Any], name: str = "prompts.jsonl") -> None:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / name).write_text("\n".join(lines))


def config(changes: dict[str, Any] | None = None, ranks: int = 1) -> Config:
    return parity.read(RL | (changes or {}), ranks)


def test_texts_are_read_in_their_order_with_all_their_fields(folder: Path) -> None:
    write(folder, [*SUMS, "", {"prompt": "é", "solution": None, "more": [1]}])
    write(folder, [{"prompt": "", "solution": ""}], "second.jsonl")
    prompts = read_prompts(config({"rl.prompts": ["prompts.jsonl", "second.jsonl"]}))
    assert [one.number for one in prompts.trained] == list(range(9)) and not prompts.held_out
    assert [one.text for one in prompts.trained] == [*(record["prompt"] for record in SUMS), "é", ""]
    assert prompts.trained[7].record == {"prompt": "é", "solution": None, "more": [1]}
    assert prompts.trained[7].ids == [ByteTokenizer.bos, *"é".encode()]
    assert prompts.trained[8].ids == [ByteTokenizer.bos] and prompts.ends == {ByteTokenizer.eos}


def test_chats_end_with_the_question(folder: Path) -> None:
    asked = {"role": "user", "content": "2 + 2?"}
    for record in (
        {"prompt": [asked]},
        {"messages": [asked]},
        {"messages": [asked, {"role": "assistant", "content": "4"}]},  # as data of supervised fine-tuning has it
    ):
        write(folder, [record | {"solution": "4"}])
        (prompt,) = read_prompts(config({"data.chat_template": CHATML, "training.seq_len": 96})).trained
        assert prompt.text == "2 + 2?"
        text = ByteTokenizer().decode(prompt.ids)
        assert text == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"


def test_a_message_follows_a_turn_as_the_chat_template_writes_it(folder: Path) -> None:
    options = {"data.tokenizer": str(byte_pairs.write_tokenizer(folder)), "training.seq_len": 96}
    asked, said = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "5"}
    write(folder, [{"prompt": [asked], "solution": "4"}])
    prompts = read_prompts(config(options))
    (prompt,), chat = prompts.trained, prompts.chat
    end = chat.end_of_turn_token()
    completion = prompts.tokenizer.encode_all(["5"])[0].tolist()
    for role in ("user", "tool"):
        ids = prompts.encode_message(prompt, end, "<|im_end|>no", role)
        whole = chat.encode_prompt([asked, said, {"role": role, "content": "<|im_end|>no"}]).tolist()
        assert [*prompt.ids, *completion, end, *ids] == whole
        assert prompts.encode_message(prompt, completion[-1], "<|im_end|>no", role) == [end, *ids], (
            "ended by a stop word"
        )
    with pytest.raises(ValueError, match="does not write an assistant message once"):
        prompts.encode_message(prompt, end, "\ufdd2", "user")
    loop = "for message in messages"
    (folder / "some.jinja").write_text(Path(CHATML).read_text().replace(loop, f"{loop} if message.role != 'judge'"))
    prompts = read_prompts(config(options | {"data.chat_template": str(folder / "some.jinja")}))
    with pytest.raises(ValueError, match="writes nothing for a message of role 'judge'"):
        prompts.encode_message(prompts.trained[0], end, "no", "judge")
    write(folder, SUMS[:1])
    prompts = read_prompts(config(options))
    assert prompts.encode_message(prompts.trained[0], end, "<|im_end|>no", "user") == [
        *prompts.tokenizer.encode_all(["<|im_end|>no"])[0]
    ]


def test_every_nth_prompt_is_held_out_and_equal_ones_are_records_of_their_own(folder: Path) -> None:
    write(folder, [SUMS[0]] * 7)
    prompts = read_prompts(config({"rl.held_out": 3, "rl.eval_interval": 1}))
    assert [one.number for one in prompts.held_out] == [2, 5]
    assert [one.number for one in prompts.trained] == [0, 1, 3, 4, 6]
    write(folder, [*SUMS[:1] * 6, SUMS[1]])
    assert read_prompts(config()).digest != prompts.digest


def test_a_hundred_thousand_prompts_are_read_in_seconds(folder: Path) -> None:
    write(folder, ['{"prompt": "1 + 1 =", "solution": "2"}'] * 100_000)
    prompts = read_prompts(config({"rl.held_out": 2, "rl.eval_interval": 1}))
    assert len(prompts.held_out) == len(prompts.trained) == 50_000


def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own(folder: Path) -> None:
    write(folder, SUMS)
    loader = PromptLoader(config(), 0, 1)
    epochs = [[one.number for one in loader.take(7)] for _ in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len({*map(tuple, epochs)}) > 1
    again = PromptLoader(config(), 0, 1)
    assert [one.number for _ in range(4) for one in again.take(5)] == [n for epoch in epochs for n in epoch][:20]
    state = again.state_dict()
    resumed = PromptLoader(config(), 0, 1)
    resumed.load_state_dict(state)
    assert resumed.take(8) == again.take(8)
    write(folder, SUMS[::-1])
    with pytest.raises(ConfigError, match="the prompts of the run have changed since"):
        PromptLoader(config(), 0, 1).load_state_dict(state)


@pytest.mark.parametrize(
    ("records", "changes", "message"),
    [
        ([{"solution": 1}], {}, "prompts.jsonl:1 has no 'messages', or null"),
        ([{"prompt": 3, "solution": 1}], {}, "prompts.jsonl:1 has no 'messages', or null"),
        ([{"prompt": [], "solution": 1}], {}, "prompts.jsonl:1 has no message before the assistant's"),
        ([{"prompt": [3], "solution": 1}], {}, "prompts.jsonl:1 has messages that are not like"),
        ([{"messages": 3, "solution": 1}], {}, "prompts.jsonl:1 has messages that are not like"),
        ([{"messages": [{"role": "user", "content": "?"}]}], {}, "the byte tokenizer has no chat template of its own"),
        (["{", SUMS[0]], {}, "prompts.jsonl:1: Expecting property name"),
        (["[" * 10**5], {}, "prompts.jsonl:1: lists or objects are nested too deep"),
        ([[1]], {}, 'prompts.jsonl:1 is not like {"prompt": "..."}'),
        ([{"prompt": "\ud800", "solution": 1}], {}, "prompts.jsonl:1 has half of a surrogate pair"),
        ([{"prompt": "x" * 24, "solution": 1}], {}, "prompts.jsonl:1 has 25 tokens, more than training.seq_len - gen"),
        ([SUMS[0], {"prompt": ""}], {}, 'prompts.jsonl:2 has no "solution", which rl.reward = "exact" compares'),
        ([{"prompt": ""}], {"rl.reward": "regex"}, 'prompts.jsonl:1 has no "solution", which rl.reward = "regex"'),
        ([{"prompt": "", "solution": "("}], {"rl.reward": "regex"}, 'has a "solution" that is no regular expression'),
        ([], {}, "rl.prompts have 0 records, of which 0 are held out"),
        (SUMS, {"rl.held_out": 8, "rl.eval_interval": 1}, "rl.prompts have 7 records, of which 0 are held out"),
        (SUMS, {"rl.held_out": 1, "rl.eval_interval": 1}, "rl.prompts have 7 records, of which 7 are held out"),
        (SUMS, {"rl.prompts": ["none.jsonl"]}, "none.jsonl: No such file or directory"),
        (SUMS, {"rl.prompts": ["."]}, "Is a directory"),
        (SUMS, {"data.tokenizer": "missing"}, "tokenizer 'missing': there is no file"),
        (SUMS, {"model.vocab_size": 64}, "model.vocab_size = 64 is below the 259 of data.tokenizer"),
    ],
)
def test_prompts_that_cannot_be_completed_are_refused(
    records: list[Any], changes: dict[str, Any], message: str, folder: Path
) -> None:
    write(folder, records)
    with pytest.raises(ConfigError) as error:
        read_prompts(config(changes))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "prompts.jsonl:1 is empty, and the tokenizer has no begin mark"), ("a\ud800", "half of a surrogate pair")],
)
def test_a_tokenizer_without_a_begin_mark(prompt: str, message: str, folder: Path) -> None:
    write(folder, [{"prompt": prompt, "solution": ""}])
    with pytest.raises(ConfigError) as error:
        read_prompts(config({"data.tokenizer": str(byte_pairs.write_tokenizer(folder))}))
    assert message in str(error.value)


def test_a_prompt_that_fills_the_room_is_read(folder: Path) -> None:
    write(folder, [{"prompt": "x" * 23, "solution": 1}])
    assert len(read_prompts(config()).trained[0].ids) == 24


def test_five_problems_stand_for_all(folder: Path) -> None:
    write(folder, [[1]] * 9)
    with pytest.raises(ConfigError) as error:
        read_prompts(config())
    assert len(error.value.problems) == 6 and error.value.problems[-1] == "and 4 more lines like these"
    assert "error: 9 problems" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl.reward": ""}, "rl.prompts is set, but rl.reward is not"),
        ({"rl.prompts": []}, "rl.reward is set, but rl.prompts is empty"),
        ({"rl.completions": 1}, "rl.completions = 1 has no other completion to compare with"),
        ({"rl.max_turns": 2}, "rl.reward = 'exact' ends each completion at its first turn"),
        ({"generation.batch_size": 7}, "rl.completions = 8 do not fit into generation.batch_size = 7"),
        ({"generation.max_tokens": 32}, "generation.max_tokens = 32 leaves no room for prompts"),
        ({"rl.held_out": 2}, "rl.eval_interval = 0 and rl.held_out = 2: set both, or both to 0"),
        ({"rl.eval_interval": 2}, "rl.eval_interval = 2 and rl.held_out = 0: set both, or both to 0"),
        ({"rl.kl": 0.1}, "there are none: set lora.rank, or kl = 0"),
        (
            {"rl.replay": "old"},
            'rl.replay = "old" with rl.updates = 1 replays the experts that the routers choose anyway',
        ),
        ({"rl.replay": "R2"}, "is not one of off, old, rollout"),
        ({"rl.replay": True}, "is not one of off, old, rollout: it is called rollout now"),
        ({"rl.updates": 3, "checkpoint.enable": True, "checkpoint.interval": 4}, "no multiple of rl.updates = 3"),
        (
            {
                "rl.updates": 2,
                "checkpoint.enable": True,
                "checkpoint.interval": 4,
                "checkpoint.keep_best": "val_reward",
                "rl.eval_interval": 3,
                "rl.held_out": 2,
            },
            "rl.eval_interval = 3 is no multiple of rl.updates = 2",
        ),
        ({"training.objective": "dpo"}, "training.objective = 'dpo' cannot be used with [rl]"),
        ({"training.epochs": 2}, "training.epochs = 2 cannot be used with [rl]"),
        ({"model.mtp_depth": 1}, "model.mtp_depth = 1 cannot be used with [rl]"),
        ({"moe.jitter": 0.1}, "moe.jitter = 0.1 cannot be used with [rl]"),
        ({"moe.capacity_factor": 1.0}, "moe.capacity_factor = 1.0 cannot be used with [rl]"),
        ({"data.skip_steps": [1]}, "cannot be used with [rl]: use data.skip_steps = []"),
        (
            {"checkpoint.keep_best": "val_reward", "checkpoint.enable": True},
            "goes by val_reward, which nothing reports",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        config(changes)
    assert message in str(error.value)


def test_nothing_is_refused_of_a_run_of_another_kind() -> None:
    check_prompts(parity.read({"rl.completions": 1}, 1))


def test_all_that_is_wrong_is_said_at_once(folder: Path) -> None:
    write(folder, [{"prompt": "?"}])
    changes = {"rl.reward": "nowhere:f", "generation.parallelism.tp": 3, "data.tokenizer": "missing"}
    with pytest.raises(ConfigError) as error:
        check_inputs_and_resolve(config(changes, 4), lambda config: config)
    assert len(error.value.problems) >= 3
    for text in ("tokenizer 'missing'", "rl.reward = 'nowhere:f' cannot be used", "generation: parallelism.tp = 3"):
        assert text in str(error.value)


@pytest.mark.parametrize("degrees", [{"ep": 3}, {"tp": 8}, {"etp": 32}])
def test_a_mapping_that_the_model_cannot_have_is_refused(degrees: dict[str, int], folder: Path) -> None:
    write(folder, SUMS)
    with pytest.raises(ConfigError):
        check_prompts(config({"generation.parallelism": degrees}, 4))
    check_prompts(config({"generation.parallelism": {"tp": 2, "ep": 4}}, 4))


def test_the_command_refuses_before_ranks_start(folder: Path) -> None:
    write(folder, [{"prompt": "?"}])
    words = parity.arguments(parity.TINY | RL | {"metrics.console": "lines"})
    (folder / "recipe.toml").touch()
    done = processes.run(["-m", "titanmoe", "train", "recipe.toml", *words, "--ranks", "2"], cwd=folder)
    assert done.returncode == 2 and not done.stdout.strip()
    assert re.fullmatch(r'error: .*prompts.jsonl:1 has no "solution".*\n', done.stderr, re.DOTALL)
    assert not (folder / "runs").exists()
