"""A rehearsed move of weights: the same messages as on real ranks, within its bound, and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import world
from tests.checkpoint import relayouts
from tests.checkpoint.test_relayout import INTERLEAVED, PAIRS, TIED
from tests.checkpoint.test_resume import mapping
from tests.rehearse.test_rehearse_command import SMALL, refused, rehearse
from titanmoe.rehearse import rehearsed_relayout
from titanmoe.rehearse.rehearsed_relayout import Destination, rehearse_relayout

ROUND = 5000
CASES = {name: PAIRS[name] for name in ("to a model that generates", "adapters on a frozen base", "data ranks to etp")}
CASES["virtual stages, tied"] = (
    4,
    mapping(pp=2, ep=2) | INTERLEAVED | TIED,
    mapping(tp=2, ep=4) | {"model.num_layers": 4} | TIED,
)


@pytest.mark.parametrize("name", CASES)
def test_messages_are_those_of_real_ranks(name: str, tmp_path: Path) -> None:
    size, before, after = CASES[name]
    real = world.run(size, relayouts.move, str(tmp_path / "saved"), before, after, ROUND)
    destination = Destination(relayouts.read(after, size), "generate" in after)
    moves, verdict = rehearse_relayout(relayouts.read(before, size), destination, size, "cpu", ROUND)
    assert verdict.text == "safe in host order"
    for move, rank in zip(moves, real, strict=True):
        sent, received = (sum(side) for side in zip(*rank.messages, strict=True))
        assert (move.needed, move.sent, move.received) == (rank.needed, sent, received)
        assert (move.rounds, move.messages) == (len(rank.messages), max(map(sum, rank.messages)))


def test_a_rank_with_other_rounds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfOtherRounds(rehearsed_relayout.MessagePlan):
        def __init__(self, *args: Any):
            super().__init__(*args)
            self.rounds += self.group.rank == 1

    monkeypatch.setattr(rehearsed_relayout, "MessagePlan", OfOtherRounds)
    before, after = (relayouts.read(mapping(**degrees), 2) for degrees in ({"ep": 2}, {"tp": 2}))
    _, verdict = rehearse_relayout(before, Destination(after, False), 2, "cpu")
    assert not verdict.safe and "rank 1" in verdict.text


STAGES = ["--ranks", "4", "--parallelism.pp", "2", "--parallelism.tp", "1", "--parallelism.experts.ep", "2"]
STAGES += [*SMALL, "--model.num_layers", "2", "--training.global_batch_size", "16"]


@pytest.mark.parametrize("words", ["tp=2 ep=4 dtype=bfloat16", "parallelism.pp=1 parallelism.experts.ep=4"])
def test_bytes_and_memory_are_printed_for_every_rank(words: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "move.json"
    assert rehearse(*STAGES, "--relayout", words, "--json", str(file)) == 0
    text, report = capsys.readouterr().out, json.loads(file.read_text())
    assert "move of the weights on 4 ranks, as on h100" in text and "Order of messages: safe in host order" in text
    needed, sent = (sum(rank[name] for rank in report["ranks"]) for name in ("needed", "sent"))
    assert 0 < needed <= sent <= 1.05 * needed
    assert f"{sent / needed:.3f} times what ranks need and do not hold" in text
    for rank in report["ranks"]:
        assert 0 < rank["messages"] <= 2 * 2**28 < 2 * 2**28 + rank["weights"]


def test_what_cannot_be_moved_is_named(capsys: pytest.CaptureFixture) -> None:
    for words, message in (
        ("pp=2 tp=2", "so generating needs pp = 1"),
        ("tp=3", "parallelism.tp = 3 does not divide"),
        ("tp=two", '--relayout "tp=two" has tp=two'),
        ("", '--relayout "" names no mapping'),
        ("tp=2 parallelism.tp=2", "has parallelism.tp=2"),
        ("model.vocab_size=640", "has shape (320, 64) in the source and (640, 64) in the destination"),
    ):
        assert message in refused(capsys, *STAGES, "--relayout", words)
