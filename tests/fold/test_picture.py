"""The picture: what it must show, in at most 100 columns, for any mapping and for large worlds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.fold.test_rank_groups import folds
from titanmoe.config.schema import Experts, Model, Parallelism
from titanmoe.fold.degrees import derive
from titanmoe.fold.legal_mappings import legal_stages
from titanmoe.fold.picture import WIDTH, draw, list_mappings, span


def plain(world: int, node: int = 8, model: Model | None = None, **degrees) -> str:
    return draw(derive(world, Parallelism(**degrees)), node, model).plain


def test_both_views_of_every_stage():
    text = plain(16, pp=2, cp=2, tp=2, experts=Experts(ep=4))
    lines = [" ".join(line.replace("─", " ").replace("├", " ").replace("┤", " ").split()) for line in text.split("\n")]
    assert "STAGE 0: 8 ranks, 0-7" in lines
    assert "STAGE 1: 8 ranks, 8-15" in lines
    assert lines.count("node node 0") == lines.count("node node 1") == 1
    assert "rank 0 1 2 3 4 5 6 7" in lines
    assert "rank 8 9 10 11 12 13 14 15" in lines
    assert lines.count("dp_shard samples dp0 dp1") == 2
    assert lines.count("cp chunk of sequence cp0 cp1 cp0 cp1") == 2
    assert lines.count("tp slice of matrices tp0 tp1 tp0 tp1 tp0 tp1 tp0 tp1") == 2
    assert lines.count("edp set of experts edp0 edp1") == 2
    assert lines.count("ep experts held ep0 ep1 ep2 ep3 ep0 ep1 ep2 ep3") == 2
    assert "pp 0,8 1,9 2,10 3,11 4,12 ... activations, every microbatch all cross" in lines
    assert "ep 0-3 4-7 8-11 12-15 routed tokens, every MoE layer inside a node" in lines
    assert lines[-2:] == [
        "Folded: ranks 0-3 together hold every expert once (ep 4 x etp 1);",
        "to attention the same ranks are cp 2 x tp 2.",
    ]


def test_bars_cover_the_ranks_that_share():
    rows = plain(8, tp=2, experts=Experts(ep=2, etp=4), model=Model(num_experts=8)).split("\n")
    ranks = next(row for row in rows if row.startswith("  rank"))
    expert_row = next(row for row in rows if row.startswith("    ep "))
    for rank, experts in enumerate(["0-3", "0-3", "0-3", "0-3", "4-7", "4-7", "4-7", "4-7"]):
        start, end = (
            expert_row.rfind("├", 0, ranks.index(f" {rank} ") + 2),
            expert_row.find("┤", ranks.index(f" {rank} ")),
        )
        assert experts in expert_row[start:end]


def test_replicas_number_their_samples_apart():
    text = plain(8, dp_replicate=2, dp_shard=4)
    row = next(line for line in text.split("\n") if "samples" in line)
    assert row.split()[2:] == [f"dp{rank}" for rank in range(8)]


def test_a_bar_continues_across_node_boundaries():
    text = plain(16, tp=16)
    assert "all cross (slow)" in text
    rows = [line for line in plain(32, tp=16).split("\n") if "samples" in line]
    assert [(row.count("├"), row.count("┤"), row.count("dp")) for row in rows] == [(1, 0, 2), (0, 1, 2)] * 2


def test_large_worlds_say_what_they_leave_out():
    text = plain(1024, pp=8, tp=8, experts=Experts(ep=8))
    assert len(text.split("\n")) < 60
    assert "... 112 more ranks, to rank 127, in the same pattern" in text
    assert "... stages 1 to 7 are alike, each 128 ranks further on" in text
    assert len(plain(16384, pp=16, cp=4, tp=8, experts=Experts(ep=64)).split("\n")) < 60


def test_a_single_rank():
    assert plain(1).count("one rank does it all") == 2


@given(folds(), st.integers(1, 80))
def test_never_wider_than_a_page(fold, node):
    for model in (None, Model(num_experts=fold.ep * 16)):
        lines = draw(fold, node, model).plain.split("\n")
        assert max(map(len, (line.rstrip() for line in lines))) <= WIDTH


def test_spans():
    assert [span(group) for group in ((3,), (4, 5), (0, 8), (0, 2, 4, 6), (0, 2, 4, 6, 8), range(99))] == [
        "3", "4-5", "0,8", "0,2,4,6", "0,2,..,8", "0-98"
    ]  # fmt: skip


def test_listing_names_every_view_once():
    lines = [line.plain for line in list_mappings(list(legal_stages(8)), node=4)]
    assert lines[0] == "517 legal mappings of 8 ranks, on nodes of 4"
    assert sum(" | " in line for line in lines) == (1 + 20) + (1 + 10) + (1 + 4) + (1 + 1)
    assert max(map(len, lines)) <= WIDTH
    assert any(line.split("|")[0].split() == ["1", "1", "1", "8*"] for line in lines)
