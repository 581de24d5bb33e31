"""A run's tokenizer goes with it: from the shards into its checkpoints, and from there to `generate` and exports."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests import world
from tests.checkpoint import runs
from tests.generate.test_generate_command import ask, lines
from tests.support.byte_pairs import CHATML
from titanmoe.cli import main
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config, Data
from titanmoe.data.open_documents import open_documents
from titanmoe.data.tokenizer import open_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog; " * 20
FILES = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]


def tokenize(folder: Path, name: str = "tokenizer") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(TEXT)
    assert main(["tokenizer", "train", f"{folder}/text.txt", "--vocab-size", "300", "--out", f"{folder}/{name}"]) == 0
    words = [f"{folder}/text.txt", "--tokenizer", f"{folder}/{name}", "--workers", "1"]
    assert main(["tokenize", *words, "--out", f"{folder}/shards"]) == 0
    return folder / "shards"


def test_shards_carry_it_into_checkpoints_and_these_to_text_and_exports(tmp_path: Path) -> None:
    shards = tokenize(tmp_path)
    assert sorted(file.name for file in (shards / "tokenizer").iterdir()) == FILES
    identity = open_tokenizer(str(tmp_path / "tokenizer")).identity
    text = (shards / "tokenizer/tokenizer.json").read_bytes()
    changes = {"data.source": "files", "data.paths": [str(shards)], "model.vocab_size": 320}
    changes |= {"moe.bias_update_rate": 0.0}  # or there is no such Hugging Face model
    (went,) = world.run(1, runs.go, str(tmp_path), changes, 1)
    assert went.loader["tokenizer"] == identity
    for folder in (shards, tmp_path / "tokenizer"):
        shutil.rmtree(folder)
    code, out, err = ask("--checkpoint", tmp_path / "run", "--prompt", "the quick", "--max-tokens", 2)
    assert code == 0 and out.startswith("the quick") and "note: the model was trained on tokens of another" not in err
    _, _, err = ask("--checkpoint", tmp_path / "run", "--prompt", "a", "--max-tokens", 1, "--tokenizer", "bytes")
    assert f"note: the model was trained on tokens of another tokenizer ({identity})" in err
    assert main(["convert", "--to-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    assert [(tmp_path / "hf" / name).exists() for name in FILES] == [True] * 3
    assert (tmp_path / "hf/tokenizer.json").read_bytes() == text


def test_files_that_changed_or_are_no_tokenizers_are_not_copied(tmp_path: Path) -> None:
    shards = tokenize(tmp_path)
    config = replace(Config(), data=Data(source="files", paths=[str(shards)]))
    stored = open_documents(config, str(shards)).stored_tokenizer
    assert list(stored.files()) == sorted(stored.digests, key=lambda name: (name != "tokenizer.json", name))
    (shards / "tokenizer/tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json has changed since the shards were made"):
        stored.files()
    with pytest.raises(ConfigError, match=r"'\.\./secret' is no file of a tokenizer"):
        stored._replace(digests={"../secret": "0"}).files()
    (shards / "tokenizer/tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        stored.files()


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_the_template_that_a_run_was_trained_with_goes_along_too(tmp_path: Path, bpe: Path) -> None:
    """In place of the tokenizer's own, also where the first source has no chats."""
    from transformers import AutoTokenizer

    (tmp_path / "text.txt").write_text(TEXT)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    settings = {"eos_token": "<|endoftext|>", "chat_template": CHATML}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    words = [f"{tmp_path}/text.txt", "--tokenizer", str(tokenizer), "--workers", "1", "--out", f"{tmp_path}/shards"]
    assert main(["tokenize", *words]) == 0
    said = [{"role": "user", "content": "the fox?"}, {"role": "assistant", "content": "the lazy dog"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * 20)
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    changes = {"data.source": "files", "data.paths": [f"{tmp_path}/{name}" for name in ("shards", "chats.jsonl")]}
    changes |= {"data.format": "chat", "data.chat_template": f"{tmp_path}/own.jinja", "data.tokenizer": str(tokenizer)}
    changes |= {"model.vocab_size": 320, "moe.bias_update_rate": 0.0, "training.seq_len": 32}
    world.run(1, runs.go, str(tmp_path), changes, 1)
    (tmp_path / "own.jinja").unlink()

    assert main(["convert", "--to-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    exported = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = exported.apply_chat_template(said[:1], add_generation_prompt=True, tokenize=False)
    assert text == "user: the fox? assistant: "
    ids = exported.apply_chat_template(said[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    for folder in ("run", "hf"):
        words = ["--chat", "--prompt", "the fox?", "--max-tokens", "1"]
        (line,) = lines("--checkpoint", tmp_path / folder, *words)
        assert line["prompt_tokens"] == ids
