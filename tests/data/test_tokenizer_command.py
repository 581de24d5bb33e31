"""titanmoe tokenizer train: its folder is read here and by transformers alike, bad input is refused at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titanmoe.cli import main
from titanmoe.data.chat import open_chat_encoder
from titanmoe.data.tokenizer import open_tokenizer

TEXT = "".join(f"def half_{n}(value):\n    return value / 2  # ½ of {n}\n" for n in range(60))
CHAT = [
    {"role": "system", "content": "Short answers."},
    {"role": "user", "content": "half of 4?"},
    {"role": "assistant", "content": "value 2"},
    {"role": "user", "content": "and of 2?"},
    {"role": "assistant", "content": "½ of 2"},
]


def train(folder: Path, *options: str) -> int:
    return main(["tokenizer", "train", *options, "--out", str(folder)])


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text(TEXT)
    (tmp_path / "code.jsonl").write_text(json.dumps({"body": TEXT}) + "\n")
    assert train(tmp_path / "made", str(tmp_path / "code.py"), "--vocab-size", "288") == 0
    return tmp_path / "made"


def test_it_writes_any_text_in_few_tokens(trained, tmp_path, capsys):
    tokenizer = open_tokenizer(str(trained))
    other = "Größe: 東京 <|endoftext|>\n"
    (known, unknown) = tokenizer.encode_all([TEXT, other])
    assert len(known) < len(TEXT) / 2 and tokenizer.vocab_size == 288
    assert tokenizer.decode(known.tolist()) == TEXT and tokenizer.decode(unknown.tolist()) == other
    assert tokenizer.eos == 0 and 0 not in unknown
    assert train(tmp_path / "same", str(tmp_path / "code.jsonl"), "--field", "body", "--vocab-size", "288") == 0
    assert (tmp_path / "same/tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    assert "288 tokens, from 1 file with" in capsys.readouterr().out


def test_transformers_reads_it_and_renders_its_chats_alike(trained):
    transformers = pytest.importorskip("transformers")
    transformers_tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
    tokenizer = open_tokenizer(str(trained))
    assert (
        transformers_tokenizer.encode(TEXT) == tokenizer.encode_all([TEXT])[0].tolist()
        and transformers_tokenizer.eos_token_id == tokenizer.eos
    )
    tokens, weights = open_chat_encoder("", tokenizer).encode(CHAT)
    assistant_mask = weights > 0
    rendered = transformers_tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert (
        rendered["input_ids"] == tokens.tolist() and rendered["assistant_masks"] == assistant_mask.astype(int).tolist()
    )
    learned = [*tokenizer.encode_with_offsets("value 2").tokens_T.tolist(), tokenizer.eos]
    assert tokens[assistant_mask].tolist()[: len(learned)] == learned
    assert transformers_tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True).endswith(
        "4?<|assistant|>"
    )


def test_it_says_when_the_text_is_too_small(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("ab\n")
    assert train(tmp_path / "made", str(tmp_path / "a.txt"), "--vocab-size", "400") == 0
    assert "260 tokens" in (out := capsys.readouterr().out) and "fewer than --vocab-size 400" in out


def test_what_is_wrong_is_told_at_once_and_nothing_is_made(trained, tmp_path, capsys):
    def problems(*options: str, out: Path = tmp_path / "new") -> str:
        assert train(out, *options) == 2 and not (tmp_path / "new").exists()
        return capsys.readouterr().err

    before = (trained / "tokenizer.json").read_bytes()
    everything = problems(str(tmp_path / "missing"), "--vocab-size", "260", out=trained)
    assert "3 problems" in everything and "exists already" in everything and "alone are 260 tokens" in everything
    assert (trained / "tokenizer.json").read_bytes() == before
    assert "nothing to read" in problems("--vocab-size", "300") and "--vocab-size is missing" in problems("a")
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    assert "there is no text in" in problems(str(tmp_path / "empty.jsonl"), "--vocab-size", "300")
    assert "has no field 'text'" in problems(str(tmp_path / "code.jsonl"), "--vocab-size", "300")
