"""data.share_prefixes: pairs of completions with their prompt there once, from the documents of both."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import parity
from tests.support.masks import dense_mask
from titanmoe.config import ConfigError
from titanmoe.data.batch import COMPLETION, PAIRS
from titanmoe.data.documents import MemoryDocuments
from titanmoe.data.loader import Loader
from titanmoe.data.pack import BatchArrays, empty_arrays, extra_field_specs
from titanmoe.data.pack_preferences import PreferencePacker
from titanmoe.mask import spans
from titanmoe.tokens import IGNORE


def documents(sizes: list[tuple[int, int, int]]) -> MemoryDocuments:
    """Tokens of prompts and both completions. All begin with a 1; the last token of each completion is its end, 2."""
    draw, tokens, counted, starts = np.random.default_rng(0), [], [], [0]
    for prompt, *completions in sizes:
        stem = [1, *draw.integers(3, 30, prompt - 1).tolist()]
        for n, completion in enumerate(completions):
            tokens += [*stem, 40 + n, *draw.integers(3, 30, completion - 2).tolist(), 2]
            counted += [False] * prompt + [True] * completion
            starts.append(len(tokens))
    out = MemoryDocuments("pairs", np.array(tokens), np.array(starts), np.array(counted))
    out.completions_per_prompt = 2
    return out


def packed(corpus: MemoryDocuments, seq_len: int, share: bool) -> tuple[PreferencePacker, BatchArrays]:
    packer = PreferencePacker(corpus, seq_len, 0, share)
    count = packer.count(1)[0]
    out = empty_arrays(count, seq_len, True, extra_field_specs(corpus), share)
    for n, segments in enumerate(packer.take(count)):
        packer.fill(segments, out, n)
    return packer, out


SIZES = [(9, 3, 4), (5, 6, 2), (1, 4, 3), (12, 2, 2), (7, 5, 5)]


def completions_of(out: BatchArrays, share: bool) -> list[tuple[list[int], ...]]:
    """Tokens, labels and positions of what the last position of each completion sees, in their order."""
    found = []
    for n in range(len(out.tokens_NS)):
        completion, length = out.extra_fields[COMPLETION][n], out.tokens_NS.shape[1]
        until = torch.from_numpy(out.until_NS[n : n + 1]) if share else None
        seen = dense_mask(spans(until), length)[0].numpy() if share else None
        for one in range(2 * out.extra_fields[PAIRS][n]):
            own = np.flatnonzero((completion == one) & out.valid_NS[n])
            if share:
                own = np.flatnonzero(seen[own[-1]])
            found.append(tuple(x[n, own].tolist() for x in (out.tokens_NS, out.labels_NS, out.position_NS)))
    return sorted(found)


def test_each_completion_sees_what_it_did_with_a_prompt_of_its_own() -> None:
    corpus = documents(SIZES)
    (_, apart), (packer, shared) = (packed(corpus, 32, share) for share in (False, True))
    assert completions_of(shared, True) == completions_of(apart, False)
    saved = sum(prompt - 1 for prompt, *_ in SIZES)
    assert packer.pairs == apart.valid_NS.sum() - saved == shared.valid_NS.sum()
    padding = np.where(shared.valid_NS, 0, shared.until_NS - np.arange(1, 33))
    assert not padding.any(), "padding sees itself alone"
    assert (shared.labels_NS != IGNORE).sum() == (apart.labels_NS != IGNORE).sum()


def test_a_pair_is_cut_where_what_it_shares_does_not_fit() -> None:
    """Pairs of 8 + 2 * 7 positions, where 8 + 2 * 5 fit with a shared prompt: the longer completion is truncated."""
    packer, out = packed(documents([(9, 3, 12)]), 16, share=True)
    assert packer.note == (
        "pairs: of 1, 1 with a truncated completion (seq_len 16); "
        "seq_len = 23, 23 and 23 would keep 95, 99 and 100 % of all"
    )
    assert out.valid_NS.all() and packer.pairs == 16
    completion = out.extra_fields[COMPLETION][0]
    assert [int((out.labels_NS[0][completion == n] != IGNORE).sum()) for n in (0, 1)] == [3, 5]
    packer, _ = packed(documents([(9, 3, 3), (20, 3, 3)]), 16, share=True)
    assert packer.num_left_out == 1


@pytest.mark.parametrize(
    ("changes", "message"), [({}, "is for preference pairs"), ({"data.balance_work": True}, "set either to false")]
)
def test_what_it_does_not_fit_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parity.read({"data.share_prefixes": True} | changes, 1)


def test_a_run_does_not_go_on_with_other_sequences(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Which number comes after {n}?", "chosen": f" {n + 1}", "rejected": f" {n}"} for n in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"training.objective": "dpo", "data.source": "files", "data.paths": [str(file)]}
    recipe |= {"data.format": "preference", "training.seq_len": 128, "job.dump_folder": str(tmp_path)}
    recipe |= {"model.vocab_size": 259, "training.global_batch_size": 1}
    shared, apart = (Loader(parity.read(recipe | {"data.share_prefixes": share}, 1), 0, 1) for share in (True, False))
    assert shared.header_rows()["packing"] == "best_fit, prefixes shared"
    (batch,), (other,) = shared.next_step(), apart.next_step()
    assert batch.until_BS is not None and other.until_BS is None
    assert batch.extra_fields[PAIRS] > other.extra_fields[PAIRS]
    with pytest.raises(ConfigError, match="'best_fit' when the state was saved and is 'best_fit, prefixes shared' now"):
        shared.load_state_dict(apart.state_dict())
