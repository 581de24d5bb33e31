"""Every law of a mapping: the message with its numbers and its fix, all of them at once, none for a legal mapping."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titanmoe.components import COMPONENTS
from titanmoe.config.schema import Config, Experts, Model, MoE, Parallelism, Training
from titanmoe.fold.degrees import nodes_of_a_group
from titanmoe.fold.legality import violations

MODEL = Model(
    vocab_size=320, dim=64, num_layers=4, num_heads=8, num_kv_heads=4, num_experts=8, expert_hidden=128
)  # fmt: skip


def broken(world: int, parallelism: Parallelism | None = None, training: Training | None = None, **model) -> list[str]:
    config = Config(
        model=replace(MODEL, **model),
        parallelism=parallelism or Parallelism(),
        training=training or Training(seq_len=64),
        components=COMPONENTS,
    )
    return violations(config, world)


def test_a_legal_mapping_breaks_nothing():
    training = Training(seq_len=64, local_batch_size=1, global_batch_size=4)
    assert broken(16, Parallelism(pp=2, cp=2, tp=2, experts=Experts(ep=4)), training) == []
    assert violations(Config(), 1) == []


def test_num_experts():
    assert broken(12, Parallelism(experts=Experts(ep=3)), dim=48) == [
        "parallelism.experts.ep = 3 does not divide model.num_experts = 8 (8 % 3 = 2): use ep in 1, 2, 4"
    ]


def test_expert_hidden():
    assert broken(6, Parallelism(experts=Experts(etp=3))) == [
        "parallelism.experts.etp = 3 does not divide model.expert_hidden = 128 (128 % 3 = 2): use etp in 1, 2"
    ]


def test_what_tp_splits():
    shape = dict(shared_hidden=64, dense_hidden=128, num_dense_layers=1)
    assert broken(3, Parallelism(tp=3, experts=Experts(edp_replicate=3)), Training(seq_len=63), **shape) == [
        "parallelism.tp = 3 does not divide model.num_heads = 8 (8 % 3 = 2): use tp = 1",
        "parallelism.tp = 3 does not divide model.num_kv_heads = 4 (4 % 3 = 1), and is no multiple of it (3 % 4 = 3): "
        "use tp = 1",
        "parallelism.tp = 3 does not divide model.vocab_size = 320 (320 % 3 = 2): use tp = 1, "
        "or pad the vocabulary to 321",
        "parallelism.tp = 3 does not divide model.dense_hidden = 128 (128 % 3 = 2): use tp = 1",
        "parallelism.tp = 3 does not divide model.shared_hidden = 64 (64 % 3 = 1): use tp = 1",
    ]


def test_heads_of_latent_attention_are_reported_once():
    shape = dict(kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=8, num_kv_heads=8, vocab_size=96)
    assert broken(3, Parallelism(tp=3, experts=Experts(edp_replicate=3)), Training(seq_len=63), **shape) == [
        "parallelism.tp = 3 does not divide model.num_heads = 8 (8 % 3 = 2): use tp = 1"
    ]


def test_only_what_the_model_has_is_split():
    # dense_hidden and shared_hidden are left over from another shape, and no layer uses them
    assert broken(2, Parallelism(tp=2), dense_hidden=7) == []
    assert broken(2, Parallelism(tp=2), num_dense_layers=4, dense_hidden=8, shared_hidden=7, expert_hidden=7) == []


def test_a_fix_obeys_every_law_of_its_degree():
    shape = dict(num_heads=24, num_kv_heads=4, vocab_size=384)
    (problem,) = broken(24, Parallelism(tp=6, experts=Experts(edp_replicate=24)), Training(seq_len=48), **shape)
    assert problem.endswith(
        "model.num_kv_heads = 4 (4 % 6 = 4), and is no multiple of it (6 % 4 = 2): use tp in 1, 2, 4, 8, 12, 24"
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_key_heads_may_be_on_several_ranks(tp: int):
    assert broken(tp, Parallelism(tp=tp), num_kv_heads=2) == []


@pytest.mark.parametrize(
    ("seq_len", "parallelism", "message"),
    [
        (63, Parallelism(tp=2), "tp * cp = 2 * 1 = 2 (63 % 2 = 1): use 62 or 64"),
        (60, Parallelism(tp=2, cp=4), "2 * tp * cp = 2 * 2 * 4 = 16 (60 % 16 = 12): use 48 or 64"),
        (12, Parallelism(tp=2, cp=4), "2 * tp * cp = 2 * 2 * 4 = 16 (12 % 16 = 12): use 16"),
        (60, Parallelism(tp=2, cp=4, cp_placement="contiguous"), "tp * cp = 2 * 4 = 8 (60 % 8 = 4): use 56 or 64"),
    ],
)
def test_seq_len(seq_len, parallelism, message):
    assert broken(8, parallelism, Training(seq_len=seq_len)) == [
        f"training.seq_len = {seq_len} is not a multiple of {message}, or another tp or cp"
    ]


def test_contiguous_pieces_need_not_be_halved():
    assert broken(8, Parallelism(cp=4, cp_placement="contiguous"), Training(seq_len=60)) == []


def test_expert_weights_are_sharded_evenly_over_edp():
    assert broken(12, dim=62) == [
        "parallelism.experts.edp = 12 ranks cannot shard the weights of 8 experts (model.num_experts 8 / ep 1) evenly, "
        "neither by expert (8 % 12 = 8) nor along model.dim = 62 (62 % 12 = 2): use edp_replicate in 3, 6, 12"
    ]
    assert broken(12, Parallelism(experts=Experts(edp_replicate=3)), dim=62) == []
    assert broken(12, dim=60) == []
    assert broken(8, dim=62) == []


def test_expert_biases_are_split_by_etp_and_sharded_in_slices():
    biased = dict(expert_linear_bias=True, expert_hidden=126)
    assert broken(8, Parallelism(experts=Experts(etp=4)), dim=66, **biased | {"expert_hidden": 128}) == [
        "parallelism.experts.etp = 4 does not divide model.dim = 66 (66 % 4 = 2): use etp in 1, 2"
    ]
    assert broken(8, Parallelism(experts=Experts(etp=4)), dim=66) == []
    # 8 experts over 8 ranks divide evenly; 2 experts over 4 do not, and every width must be a multiple of 4, or 4 * etp
    assert broken(8, **biased) == []
    assert broken(8, Parallelism(experts=Experts(ep=2)), num_experts=4, dim=66, **biased) == [
        "parallelism.experts.edp = 4 ranks cannot shard the weights of 2 experts (model.num_experts 4 / ep 2) evenly, "
        "neither by expert (2 % 4 = 2) nor along model.dim = 66 (66 % 4 = 2) and model.expert_hidden = 126 "
        "(126 % 4 = 2): use edp_replicate in 2, 4"
    ]
    assert broken(16, Parallelism(experts=Experts(ep=4, etp=2)), num_experts=4, dim=66, **biased) == [
        "parallelism.experts.edp = 2 ranks cannot shard the weights of 1 experts (model.num_experts 4 / ep 4) evenly, "
        "neither by expert (1 % 2 = 1) nor along model.dim = 66 (66 % 4 = 2) and model.expert_hidden = 126 "
        "(126 % 4 = 2): use edp_replicate = 2"
    ]
    assert broken(16, Parallelism(experts=Experts(ep=4, etp=2)), num_experts=4, dim=66, expert_hidden=126) == []


def test_layers_and_stages():
    assert broken(8, Parallelism(pp=8)) == [
        "parallelism.pp = 8 is more than model.num_layers = 4, and a stage has at least one layer: use pp of 4 or less"
    ]


def test_global_batch():
    training = Training(seq_len=64, local_batch_size=2, global_batch_size=20)
    assert broken(16, Parallelism(tp=2, dp_replicate=2), training) == [
        "training.global_batch_size = 20 is not a multiple of training.local_batch_size * data ranks = 2 * 8 = 16 "
        "(20 % 16 = 4): use 16 or 32"
    ]
    assert broken(16, Parallelism(tp=2), replace(training, global_batch_size=32)) == []
    assert broken(16, Parallelism(tp=2), replace(training, global_batch_size=-1)) == []


def test_a_model_without_experts_has_no_expert_laws():
    dense = dict(num_dense_layers=4, dense_hidden=128, num_experts=7, expert_hidden=3, dim=62)
    assert broken(16, Parallelism(tp=2), **dense) == []
    assert broken(16, Parallelism(experts=Experts(ep=2, etp=4)), **dense) == [
        "parallelism.experts.ep = 2, but none of the 4 layers has experts (model.num_dense_layers = 4, "
        "model.moe_every = 1): use ep = 1",
        "parallelism.experts.etp = 4, but none of the 4 layers has experts (model.num_dense_layers = 4, "
        "model.moe_every = 1): use etp = 1",
    ]
    # every 4th of 3 layers: none
    assert len(broken(4, Parallelism(experts=Experts(ep=2)), num_layers=3, moe_every=4, dense_hidden=128)) == 1


def test_products_accumulate_only_where_no_data_rank_shares_an_expert():
    def why(ep: int, model: Model = MODEL, reshard: str = "auto") -> list[str]:
        degrees, moe = Parallelism(experts=Experts(ep=ep)), MoE(accumulate_weight_gradients=True)
        degrees = replace(degrees, reshard_after_forward=reshard)
        return violations(Config(model=model, parallelism=degrees, moe=moe, components=COMPONENTS), 4)

    start = "moe.accumulate_weight_gradients = true has no effect, because "
    fsdp = 'parallelism.reshard_after_forward = "always" leaves the experts to FSDP: set it to false, or use "auto"'
    assert why(4) == []
    assert why(2) == [
        f"{start}2 data ranks shard the same experts (edp = 2): set it to false, or use a mapping with edp = 1"
    ]
    assert why(4, reshard="always") == [start + fsdp]
    assert why(1, replace(MODEL, moe_every=5, dense_hidden=128)) == [f"{start}no layer has experts: set it to false"]


def test_all_at_once():
    training = Training(seq_len=63, global_batch_size=5)
    problems = broken(16, Parallelism(tp=16, experts=Experts(ep=3, edp=7)), training)
    parts = [
        "ep = 3 does not divide the stage of 16 ranks",
        "tp = 16 does not divide model.num_heads",
        "ep = 3 does not divide model.num_experts",
        "training.seq_len = 63",
    ]
    assert [part in problem for part, problem in zip(parts, problems, strict=True)] == [True] * 4
    # a broken expert view does not hide what depends on the attention view's derived degrees, nor vice versa
    problems = broken(16, Parallelism(experts=Experts(ep=3)), Training(seq_len=64, global_batch_size=5))
    assert any("global_batch_size = 5 is not a multiple" in problem for problem in problems)
    problems = broken(24, Parallelism(tp=5), Training(seq_len=65), dim=62)
    assert any("edp = 24 ranks cannot shard" in problem for problem in problems)


def test_nonsense_in_other_fields_does_not_crash():
    broken(0)
    broken(8, Parallelism(pp=0, cp=0, tp=-3, experts=Experts(ep=0, etp=-1)))
    broken(8, Parallelism(tp=3, experts=Experts(ep=3)), num_heads=-3, num_experts=0, moe_every=0, num_layers=-1, dim=0)
    broken(8, None, Training(seq_len=0, local_batch_size=0, global_batch_size=0))


def hierarchical(world: int, parallelism: Parallelism) -> list[str]:
    model, training = replace(MODEL, num_experts=8, dim=96), Training(seq_len=64)
    moe = MoE(dispatcher="hierarchical")
    return violations(
        Config(model=model, parallelism=parallelism, training=training, moe=moe, components=COMPONENTS), world
    )


@pytest.mark.parametrize(
    ("world", "ep", "etp", "node", "nodes"),
    [
        (8, 8, 1, 8, 1),
        (8, 4, 1, 8, 1),
        (8, 2, 1, 4, 1),
        (8, 8, 1, 4, 2),
        (8, 8, 1, 1, 8),
        (8, 4, 2, 4, 2),
        (8, 4, 2, 100, 1),
        (8, 2, 4, 2, None),  # an expert's slices on two nodes
        (8, 1, 8, 4, None),
        (12, 4, 1, 3, None),
        (12, 4, 1, 6, None),
    ],
)
def test_groups_of_experts_on_nodes(world: int, ep: int, etp: int, node: int, nodes: int | None):
    parallelism = Parallelism(node=node, experts=Experts(ep=ep, etp=etp))
    assert nodes_of_a_group(world, ep, etp, node) == nodes
    assert len(hierarchical(world, parallelism)) == (nodes is None)


def test_nodes_that_split_groups_are_refused_with_what_fits():
    (text,) = hierarchical(12, Parallelism(node=6, experts=Experts(ep=4)))
    assert text == (
        'moe.dispatcher = "hierarchical" needs nodes that hold full groups of ep * etp = 4 * 1 = 4 ranks, or equal '
        "parts of one with full experts, and parallelism.node = 6 is neither (6 % 4 = 2; 4 % 6 = 4, 6 % etp = 0): use "
        'parallelism.node in 1, 2, 4, 8, 12, another ep or etp, or dispatcher = "alltoall"'
    )
