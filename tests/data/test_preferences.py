"""Pairs of completions, as TRL writes them: what they become, what is refused, and how they are packed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanmoe.cli import main
from titanmoe.config import ConfigError
from titanmoe.data.batch import COMPLETION, PAIRS
from titanmoe.data.documents import MemoryDocuments
from titanmoe.data.held_out import split_held_out
from titanmoe.data.loader import Loader
from titanmoe.data.pack import empty_arrays, extra_field_specs
from titanmoe.data.pack_preferences import PreferencePacker
from titanmoe.data.token_shards import ShardDocuments
from titanmoe.data.tokenizer import open_tokenizer
from titanmoe.tokens import IGNORE


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED = [said("user", "the fox?"), said("assistant", "which"), said("user", "the brown one")]
COMPLETIONS = {"chosen": [said("assistant", "jumps")], "rejected": [said("assistant", "over")]}
TEXTS = [
    {"prompt": "the quick", "chosen": " brown fox", "rejected": " dog"},
    {"chosen": "the quick brown fox", "rejected": "the quick dog"},
]
CHATS = [
    {"prompt": ASKED, **COMPLETIONS},
    {name: [*ASKED, *completion] for name, completion in COMPLETIONS.items()},
    {"prompt": "the fox?"} | {name: [*ASKED, *completion] for name, completion in COMPLETIONS.items()},
]


def write(file: Path, records: list[dict[str, Any]]) -> str:
    if file.suffix == ".parquet":
        table = pytest.importorskip("pyarrow").Table.from_pylist(records)
        pytest.importorskip("pyarrow.parquet").write_table(table, file)
    else:
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def tokenize(*words: str) -> int:
    return main(["tokenize", *words, "--format", "preference", "--workers", "1"])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("records", [TEXTS, CHATS], ids=["texts", "messages"])
def test_explicit_and_implicit_prompts_give_the_same_two_documents(
    records: list[dict[str, Any]], suffix: str, tmp_path: Path, bpe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = records[:2] if suffix == ".parquet" else records  # a column has one type
    tokenizer, out = open_tokenizer(str(bpe)), tmp_path / "out"
    assert tokenize(write(tmp_path / f"pairs{suffix}", records), "--tokenizer", str(bpe), "--out", str(out)) == 0
    assert f" tokens in {len(records)} preference pairs and 1 shard\nthe completions': " in capsys.readouterr().out
    documents = ShardDocuments(out)
    ends = pairwise(documents.starts[:].tolist())
    both = [(documents.read(*these).tolist(), documents.label_mask(*these).tolist()) for these in ends]
    made = [both[n : n + 2] for n in range(0, len(both), 2)]
    assert documents.completions_per_prompt == 2 and made == made[:1] * len(records)
    manifest = out / "manifest.json"
    manifest.write_text(manifest.read_text().replace("completions_per_prompt", "answers"))  # as earlier versions
    assert ShardDocuments(out).completions_per_prompt == 2

    def text(tokens: list[int]) -> str:
        return tokenizer._plain.decode(tokens, skip_special_tokens=False)

    counted = [text([t for t, counts in zip(*document, strict=True) if counts]) for document in made[0]]
    texts = isinstance(records[0]["chosen"], str)
    completions, end = ([" brown fox", " dog"], "<|endoftext|>") if texts else (["jumps", "over"], "<|im_end|>\n")
    assert counted == [completion + end for completion in completions]
    assert all(text(tokens).endswith("<|endoftext|>") for tokens, _ in made[0])
    assert main(["data", "verify", str(out)]) == 0


BAD = [
    ({"prompt": "a", "rejected": "c"}, "has no chosen completion ('chosen' is missing or empty)"),
    ({"prompt": "a", "chosen": "b"}, "has no rejected completion ('rejected' is missing or empty)"),
    ({"prompt": "a", "chosen": "", "rejected": "c"}, "has no chosen completion"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "both completions are the same, so neither is better"),
    ({"chosen": "ab", "rejected": "abc"}, "the chosen completion is a prefix of the other one: add a prompt"),
    (
        {"prompt": "a", "chosen": "b", "rejected": [said("assistant", "c")]},
        "one completion is a text and the other a list",
    ),
    (
        {"prompt": ASKED, "chosen": "b", "rejected": "c"},
        "the prompt is a list of messages, and the completions are texts: write all three alike",
    ),
    ({"prompt": "a", "chosen": 3, "rejected": "c"}, "'chosen' is a number: write a text or a list of messages"),
    (CHATS[0], "the record has messages, and there is no chat template: name a Jinja file with data.chat_template"),
]


def test_bad_pairs_are_refused_all_at_once_or_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "pairs.jsonl", [TEXTS[0], *(record for record, _ in BAD)])
    assert tokenize(file, "--out", str(tmp_path / "refused")) == 2
    said = capsys.readouterr().err
    for line, (_, why) in enumerate(BAD, 2):
        assert f"pairs.jsonl:{line}: {why}" in said
    assert tokenize(file, "--out", str(tmp_path / "skipped"), "--bad-lines", "skip") == 0
    assert f"left out: {len(BAD)} bad lines" in capsys.readouterr().out


class Pairs(MemoryDocuments):
    completions_per_prompt = 2


def pairs(*lengths: tuple[int, int, int], alike: int = 0) -> Pairs:
    """For each the length of the prompt and of both completions, which are equal up to `alike` tokens."""
    tokens, counts, starts = [], [], [0]
    for n, (prompt, *completions) in enumerate(lengths):
        for side, completion in enumerate(completions):
            tokens += [n] * prompt + [100 + 10 * side * (place >= alike) for place in range(completion)]
            counts += [False] * prompt + [True] * completion
            starts.append(len(tokens))
    return Pairs("pairs", np.array(tokens), np.array(starts), np.array(counts))


def test_both_completions_of_a_pair_are_in_one_sequence() -> None:
    documents = pairs(*[(2 + n % 3, 1 + n % 5, 1 + n % 4) for n in range(100)])
    packer = PreferencePacker(documents, 32, seed=0)
    sequences = list(packer.first_epoch())
    out, seen = empty_arrays(len(sequences), 32, True, extra_field_specs(documents)), []
    for n, segments in enumerate(sequences):
        packer.fill(segments, out, n)
        completion, labelled = out.extra_fields[COMPLETION][n], out.labels_NS[n] != IGNORE
        assert completion[labelled].max() + 1 == 2 * out.extra_fields[PAIRS][n]
        for number in range(2 * out.extra_fields[PAIRS][n]):
            (prompt,) = {*out.tokens_NS[n][(completion == number) & out.valid_NS[n]].tolist()} - {100, 110}
            assert {*out.labels_NS[n][(completion == number) & labelled].tolist()} == {100 + 10 * (number % 2)}
            seen.append((prompt, number % 2))
    assert sorted(seen) == [(n, side) for n in range(100) for side in (0, 1)] and packer.note == ""
    assert packer.count(2)[0] == len(sequences) < 45


def test_what_does_not_fit_is_cut_or_left_out_and_counted() -> None:
    documents = pairs((4, 3, 3), (4, 20, 3), (4, 20, 20), (20, 3, 3), (9, 2, 30))
    packer = PreferencePacker(documents, 20, seed=0)
    assert packer.length_P2.tolist() == [[6, 6], [14, 6], [10, 10], [0, 0], [10, 10]]
    assert packer.note == (
        "pairs: of 5, 1 left out, whose completions are empty or equal once truncated, "
        "3 with a truncated completion (seq_len 20); seq_len = 48, 48 and 48 would keep 95, 99 and 100 % of all"
    )
    assert sum(len(segments.pairs_G) for segments in packer.first_epoch()) == 8
    assert PreferencePacker(pairs((4, 20, 20), alike=10), 20, seed=0).num_left_out == 1  # what is left is the same
    assert PreferencePacker(pairs((20, 3, 3)), 20, seed=0).per_epoch == 0


def test_pairs_are_held_out_whole() -> None:
    documents = pairs(*[(2, 1, 1)] * 10)
    rest, held_out = split_held_out(documents, 3, 5)
    assert (len(rest), len(held_out), rest.completions_per_prompt) == (14, 6, 2)
    assert held_out.read(0, 18).tolist() == [t for n in (2, 5, 8) for side in (100, 110) for t in (n, n, side)]


def test_the_header_says_what_does_not_fit_and_a_source_of_which_nothing_does_is_refused(tmp_path: Path) -> None:
    from tests.parity import read

    long = {"prompt": "x" * 40, "chosen": "a", "rejected": "b"}
    own = {"data.source": "files", "data.format": "preference", "training.objective": "dpo", "model.vocab_size": 320}
    own |= {"job.dump_folder": str(tmp_path), "training.seq_len": 48, "training.global_batch_size": 1}
    file = write(tmp_path / "some.jsonl", [long, TEXTS[0]])
    loader = Loader(read(own | {"data.paths": [file]}, 1), 0, 1)
    assert loader.header_rows()["pairs"].startswith(
        "some.jsonl: of 2, 1 left out, whose completions are empty or equal once truncated"
    )
    file = write(tmp_path / "none.jsonl", [long])
    with pytest.raises(ConfigError, match=r"none\.jsonl .* has no pair that fits training\.seq_len = 48: raise it"):
        Loader(read(own | {"data.paths": [file]}, 1), 0, 1)
