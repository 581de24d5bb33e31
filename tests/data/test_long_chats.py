"""Chats longer than a sample: left out, cut after a whole assistant message or refused, counted, and never learned
without their questions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import parity, world
from tests.support.byte_pairs import CHATML
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.data.documents import MemoryDocuments
from titanmoe.data.loader import Loader
from titanmoe.data.pack import BestFitPacker, empty_arrays
from titanmoe.data.pack_chats import ChatPacker
from titanmoe.report.page import write_page
from titanmoe.report.read_run import read_runs
from titanmoe.tokens import IGNORE
from titanmoe.train.checks import NumericalFault

SEQ_LEN = 20


def chats(*turns: Sequence[int]) -> MemoryDocuments:
    """Return chats of questions and assistant messages of these lengths, in turn, each after a first token; only the
    latter are labels. Tokens count up, from 100 times the chat's number.
    """
    tokens, counted, starts = [], [], [0]
    for number, lengths in enumerate(turns):
        mask = [False, *(k % 2 == 1 for k, length in enumerate(lengths) for _ in range(length))]
        tokens += range(100 * number, 100 * number + len(mask))
        counted += mask
        starts.append(len(tokens))
    return MemoryDocuments("chats", np.array(tokens), np.array(starts), np.array(counted))


SOME = chats((3, 4), (5, 6, 5, 4), (5, 6, 5, 5), (19, 3), (4, 2, 6, 5, 2, 9))
"""Chats of 7, 20, 21, 22 and 28 positions. In those of 21 and 28 an assistant message ends after 11 and 17."""


def trained(packer: BestFitPacker) -> dict[int, tuple[int, int]]:
    """Return for each chat how many positions and how many labels an epoch has of it."""
    out: dict[int, tuple[int, int]] = {}
    for segments in packer.first_epoch():
        row = empty_arrays(1, SEQ_LEN, True)
        packer.fill(segments, row, 0)
        for document in range(len(segments.pairs_G)):
            own = row.document_NS[0] == document
            number = int(row.tokens_NS[0][own][0]) // 100
            assert number not in out and row.tokens_NS[0][own][0] % 100 == 0  # from its beginning, once
            out[number] = int(own.sum()), int((row.labels_NS[0][own] != IGNORE).sum())
    return out


def test_long_chats_are_left_out() -> None:
    packer = ChatPacker(SOME, SEQ_LEN, 0, "drop")
    assert trained(packer) == {0: (7, 4), 1: (20, 10)} and packer.per_epoch == 2
    assert packer.note == (
        "chats: 3 of 5 chats are longer than seq_len = 20: 3 left out (data.long_chats), 72.4% of all tokens are lost; "
        "seq_len = 28, 28 and 28 would keep 95, 99 and 100 % of all"
    )
    assert packer.name != BestFitPacker.name and not packer.refusal()  # counts of sequences are kept by this name


def test_long_chats_are_cut_after_the_last_assistant_message_that_fits() -> None:
    packer = ChatPacker(SOME, SEQ_LEN, 0, "cut")
    assert trained(packer) == {0: (7, 4), 1: (20, 10), 2: (11, 6), 4: (17, 7)}
    assert ": 1 left out, 2 truncated after an assistant message (data.long_chats), " in packer.note
    assert packer.num_lost_positions == 21 - 11 + 22 + 28 - 17
    edge = ChatPacker(
        chats((5, 15, 4, 4), (5, 16, 4, 4)), SEQ_LEN, 0, "cut"
    )  # an assistant message ends with the sample, or after
    assert edge.keep_L.tolist() == [20, 0]


def test_where_many_do_not_fit_the_note_says_which_seq_len_would_keep_how_many() -> None:
    turns = [(3, 4)] * 190 + [(9 + n, 20) for n in range(10)]  # of 7, and of 29 to 38 positions
    few, many = (ChatPacker(chats(*some), SEQ_LEN, 0, "drop").note for some in (turns, turns[1:]))
    assert few.endswith("of all tokens are lost; the longest needs seq_len = 38")  # 5 % of the chats
    lengths = sorted([7] * 189 + [*range(29, 39)])
    keep = [next(n for n in range(40) if sum(x <= n for x in lengths) >= part * 199) for part in (0.95, 0.99, 1)]
    assert many.endswith("lost; seq_len = {}, {} and {} would keep 95, 99 and 100 % of all".format(*keep))
    assert len({*keep}) == 3 and keep[2] == 38


def test_chats_that_fit_are_packed_as_ever() -> None:
    fitting = chats((3, 4), (5, 6, 5, 4), (2, 2))
    packers = [ChatPacker(fitting, SEQ_LEN, 7, "drop"), BestFitPacker(fitting, SEQ_LEN, 7)]
    ours, plain = ([(p.start_G.tolist(), p.pairs_G.tolist()) for p in packer.take(9)] for packer in packers)
    assert ours == plain and packers[0].note == "" and packers[0].name == BestFitPacker.name


def test_many_chats_of_which_most_are_long_still_give_endless_sequences() -> None:
    many = chats(*[(30, 3)] * 3000, (3, 4))
    packer = ChatPacker(many, SEQ_LEN, 0, "drop")
    assert [segments.pairs_G.tolist() for segments in packer.take(5)] == [[7]] * 5 and packer.count(3) == [1, 1, 1]


def test_what_leaves_nothing_is_refused() -> None:
    assert ChatPacker(SOME, SEQ_LEN, 0, "refuse").refusal() == (
        '3 of 5 chats are longer than training.seq_len = 20, and data.long_chats = "refuse": seq_len = 28, 28 '
        'and 28 would keep 95, 99 and 100 % of all; or set long_chats = "drop" or "cut"'
    )
    too_long = chats((30, 4), (40, 2))
    assert "none fits training.seq_len = 20" in ChatPacker(too_long, SEQ_LEN, 0, "drop").refusal()
    assert "not one has an assistant message that fits" in ChatPacker(too_long, SEQ_LEN, 0, "cut").refusal()


def recipe(folder: Path, words: Sequence[int], **changes: Any) -> Config:
    """Return a recipe of chats with assistant messages of these lengths."""
    talks = [[{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "y" * n}] for n in words]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    (folder / "chatml.jinja").write_text(CHATML)
    own = {"data.source": "files", "data.paths": [str(folder / "chats.jsonl")], "data.format": "chat"}
    own |= {"data.chat_template": str(folder / "chatml.jinja"), "job.dump_folder": str(folder)}
    own |= {"model.vocab_size": 320, "training.seq_len": 128, "training.global_batch_size": 1}
    return parity.read(own | {key.replace("__", "."): value for key, value in changes.items()}, 1)


def test_a_run_says_what_is_lost_and_goes_on_only_with_the_same_samples(tmp_path: Path) -> None:
    loader = Loader(recipe(tmp_path, [10, 300, 20, 400]), 0, 1)
    assert loader.header_rows()["packing"] == 'best_fit, long_chats = "drop"'
    assert loader.header_rows()["long chats"].startswith(
        "chats.jsonl: 2 of 4 chats are longer than seq_len = 128: 2 left out"
    )
    assert all((batch.labels_BS != IGNORE).any() for _ in range(6) for batch in loader.next_step())
    other = Loader(recipe(tmp_path, [10, 300, 20, 400], data__long_chats="cut"), 0, 1)
    with pytest.raises(ConfigError, match=r"data\.packing was 'best_fit, long_chats = \"drop\"' when the state"):
        other.load_state_dict(loader.state_dict())
    with pytest.raises(
        ConfigError, match=r"chats\.jsonl \(data\.paths\): 1 of 2 chats .* data\.long_chats = \"refuse\""
    ):
        Loader(recipe(tmp_path, [10, 300], data__long_chats="refuse"), 0, 1)
    with pytest.raises(
        ConfigError, match=r"(?s)fewer than training.global_batch_size = 2.*1 of 2 chats are longer than"
    ):
        Loader(recipe(tmp_path, [10, 300], training__global_batch_size=2), 0, 1)
    with pytest.raises(ConfigError, match=r"chats\.jsonl \(data\.paths\): of 2 chats none fits training\.seq_len"):
        Loader(recipe(tmp_path, [300, 300]), 0, 1)
    stream = Loader(recipe(tmp_path, [10, 300], data__packing="stream"), 0, 1)
    assert "an assistant message may be without its question" in stream.header_rows()["cut chats"]


class Unlabelled(Loader):
    """Chats of which no token is a label after the first `labelled` steps."""

    labelled = 1

    def next_step(self) -> list[Any]:
        batches = super().next_step()
        if self.consumed <= self.labelled:
            return batches
        return [batch._replace(labels_BS=torch.full_like(batch.labels_BS, IGNORE)) for batch in batches]


class AlwaysUnlabelled(Unlabelled):
    labelled = 0


def run(config: Config, loader: type[Loader]) -> str:
    runtime = parity.runtime_here()
    try:
        parity.build_trainer(config, runtime, garbage=parity.no_collection, loader=loader).train()
    except NumericalFault as error:
        return str(error)
    return ""


def test_steps_without_labels_and_lost_chats_are_events_and_a_run_without_labels_is_no_success(tmp_path: Path) -> None:
    config = recipe(tmp_path, [10, 300], training__steps=6, job__name="some")
    assert world.run(1, run, config, Unlabelled) == [""]
    written = [json.loads(line) for line in (tmp_path / "some/events.jsonl").read_text().splitlines()]
    events = [(event["step"], event["kind"]) for event in written]
    assert events == [(0, "start"), (0, "data"), (2, "no labels"), (3, "no labels"), (5, "no labels")]
    assert "1 of 2 chats are longer than seq_len = 128: 1 left out" in written[1]["text"]
    assert "its loss is 0 and nothing is learned from it" in written[2]["text"]
    assert written[4]["text"].endswith("; so had 3 of the 4 steps before")
    (page,) = write_page(read_runs([tmp_path / "some"]), tmp_path / "report").read_text().split("</html>")[:1]
    assert "1 of 2 chats are longer than seq_len = 128" in page
    config = recipe(tmp_path, [10, 300], training__steps=3, job__name="none")
    (ending,) = world.run(1, run, config, AlwaysUnlabelled)
    assert ending.startswith("none of 3 steps had a label, so nothing was learned")
