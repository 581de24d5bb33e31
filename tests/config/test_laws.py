"""Laws: contradictions are refused with their numbers, and everything else is accepted."""

import re
from math import inf, nan

import pytest

from titanmoe.components import COMPONENTS
from titanmoe.config.fields import build, fields, flatten, ranges
from titanmoe.config.laws import contradictions, out_of_range
from titanmoe.config.ranges import Range
from titanmoe.config.schema import Config
from titanmoe.models.families import family_of, names
from titanmoe.moe.dispatchers.dispatcher_spec import overlapping_quoted

LATENT = {"model.kv_lora_rank": 16, "model.qk_nope_head_dim": 6, "model.qk_rope_head_dim": 2, "model.v_head_dim": 4}
FILES = {"data.source": "files", "data.paths": ["a", "b"]}
WIDE = {"training.dtype": "float64", "training.mixed_precision_param": "float64"}
HALVES = {"moe.overlap": "halves", "training.local_batch_size": 2}
YARN = {"model.rope_scaling": "yarn", "model.rope_factor": 4.0}


def test_every_number_has_a_range_that_contains_its_default():
    numbers = {path for path, field in fields().items() if (field.item or field.kind) in (int, float)}
    assert set(ranges()) == numbers
    assert out_of_range(flatten(Config())) == []


def test_defaults_and_every_size_of_every_family_are_lawful():
    assert contradictions(Config()) == []
    for family, sizes in names().items():
        for size in sizes:
            named = {"model.family": family, "model.size": size}
            values = named | family_of(family).preset(named)
            assert out_of_range(values) == contradictions(build(values, COMPONENTS)) == [], (family, size)


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "says"),
    [
        (Range(1), [1, 10**9], [0, -1], "at least 1"),
        (Range(0, without_low=True), [1e-30, 3], [0, -1e-30], "above 0"),
        (Range(0, 1), [0, 0.5, 1], [-0.1, 1.1], "in [0, 1]"),
        (Range(0, 1, without_high=True), [0, 0.999], [1, -1], "in [0, 1)"),
        (Range(0, 1, without_low=True), [0.001, 1], [0, 2], "in (0, 1]"),
        (Range(1, derived=True), [-1, 1, 8], [0, -2], "at least 1, or -1"),
    ],
)
def test_range(limits, inside, outside, says):
    assert all(value in limits for value in inside)
    assert not any(value in limits for value in outside)
    assert str(limits) == says


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("training.steps", 0),
        ("training.seq_len", 0),
        ("training.local_batch_size", 0),
        ("training.global_batch_size", 0),
        ("training.global_batch_size", -2),
        ("training.seed", -1),
        ("training.timeout_s", 0),
        ("optimizer.lr", -1e-9),
        ("optimizer.lr", 0.0),
        ("optimizer.lr", 1.001),
        ("optimizer.adamw_lr", 0.0),
        ("optimizer.adamw_lr", 5.0),
        ("optimizer.lr", inf),
        ("optimizer.lr", nan),
        ("optimizer.beta1", 1.0),
        ("optimizer.beta2", -0.1),
        ("optimizer.eps", 0.0),
        ("lr_schedule.warmup_steps", -1),
        ("lr_schedule.min_ratio", 1.5),
        ("lr_schedule.decay_fraction", -0.1),
        ("parallelism.tp", 0),
        ("parallelism.dp_shard", 0),
        ("parallelism.experts.edp", -3),
        ("pipeline.layers_per_stage", [2, -1, 2]),
        ("model.top_k", 0),
        ("model.num_kv_heads", 0),
        ("model.route_scale", 0.0),
        ("moe.jitter", 1.0),
        ("moe.capacity_factor", -0.5),
        ("moe.aux_loss", -0.01),
        ("metrics.log_every", 0),
    ],
)
def test_out_of_range(path, value):
    (violation,) = out_of_range(flatten(Config()) | {path: value})
    assert violation.fields == (path,)
    assert re.match(rf"{path}(\[1\])? = (-?[\d.]+(e-\d+)?|inf|nan) is (out of range|not a finite .*): ", violation.text)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model.top_k": 9}, "model.top_k = 9 exceeds model.num_experts = 8.* at most 8"),
        (
            {"model.num_kv_heads": 5},
            r"num_heads = 8 is not a multiple of model.num_kv_heads = 5 \(8 % 5 = 3\): use num_kv_heads 1, 2, 4, 8",
        ),
        ({"model.head_dim": 7}, "model.head_dim = 7 is odd.* 6 or 8"),
        (
            {"model.num_dense_layers": 5, "model.dense_hidden": 64},
            "model.num_dense_layers = 5 exceeds model.num_layers = 4.* at most 4",
        ),
        (
            {"model.num_dense_layers": 1, "model.moe_every": 4, "model.dense_hidden": 64},
            "model.moe_every = 4 gives experts to none of the 3 blocks after the 1 dense.* at most 3",
        ),
        ({"model.num_dense_layers": 1}, "model.dense_hidden = 0.* make 1 of 4 blocks dense.* dense_hidden = 256"),
        ({"model.moe_every": 2}, "model.dense_hidden = 0.* make 2 of 4 blocks dense"),
        (
            {"model.num_dense_layers": 1, "model.moe_every": 2},
            "model.dense_hidden = 0.*num_dense_layers = 1 .*moe_every = 2 make 3 of 4 blocks dense",
        ),
        ({"model.shared_gate": True}, "model.shared_gate = true .* shared_hidden = 128, or set shared_gate = false"),
        (
            {"model.top_k": 1},
            "model.top_k = 1 with norm_topk = true .* no gradient: set norm_topk = false, or top_k to 2",
        ),
        ({"model.top_k": 1, "model.score_function": "sigmoid"}, "model.top_k = 1 with norm_topk = true .* no gradient"),
        (
            {"model.top_k": 1, "model.norm_topk": False, "model.score_function": "softmax_after_topk"},
            'model.top_k = 1 with score_function = "softmax_after_topk" .* set score_function = "softmax" with',
        ),
        ({"model.num_groups": 3}, r"model.num_experts = 8 .* 3 equal groups \(8 % 3 = 2\): use num_groups 1, 2, 4, 8"),
        ({"model.top_groups": 2}, "model.top_groups = 2 exceeds model.num_groups = 1: use at most 1"),
        (
            {"model.num_groups": 8, "model.top_groups": 1},
            "model.top_groups = 1 of 8 groups of 1 experts have 1, fewer than model.top_k = 2: use at least 2",
        ),
        (LATENT | {"model.num_kv_heads": 4}, "num_kv_heads = 4 is not model.num_heads = 8, .* use num_kv_heads = 8"),
        (
            LATENT | {"model.qk_rope_head_dim": 3, "model.head_dim": 9},
            "qk_rope_head_dim = 3 does not give .* such as 4",
        ),
        (LATENT | {"model.qk_nope_head_dim": 8, "model.qk_rope_head_dim": 0}, "qk_rope_head_dim = 0 .* such as 64"),
        (LATENT | {"model.head_dim": 8, "model.qk_nope_head_dim": 8}, r"8 \+ 2: use head_dim = 10"),
        (LATENT | {"model.v_head_dim": 0}, "v_head_dim = 0 gives .* such as v_head_dim = 6"),
        (LATENT | {"model.qkv_bias": True}, "qkv_bias = true .* set qkv_bias = false, or kv_lora_rank = 0"),
        (LATENT | {"model.qk_norm": "head"}, 'qk_norm = "head" .* set qk_norm = "none", or kv_lora_rank = 0'),
        (LATENT | {"model.attention_sinks": True}, "attention_sinks = true .* set attention_sinks = false, or kv_lora"),
        (
            LATENT | {"model.sliding_window": 8, "model.full_attention_every": 0},
            "sliding_window = 8 is for grouped-query .* set sliding_window = 0, or kv_lora_rank = 0",
        ),
        ({"model.rotary_dim": 3}, "rotary_dim = 3 is not an even number below model.head_dim = 8, .* or 0 for full"),
        ({"model.rotary_dim": 8}, "rotary_dim = 8 is not an even number below model.head_dim = 8"),
        (
            LATENT | {"model.rotary_dim": 2},
            "rotary_dim = 2 is for grouped-query .* set rotary_dim = 0, or kv_lora_rank",
        ),
        (LATENT | {"model.attention_gate": True}, "attention_gate = true .* set attention_gate = false, or kv_lora"),
        (LATENT | {"model.out_bias": True}, "out_bias = true .* set out_bias = false, or kv_lora_rank = 0"),
        (
            {"model.sliding_window": 128},
            "sliding_window = 128 is not used with .* set full_attention_every = 2 .* or sliding_window = 0",
        ),
        (
            {"model.full_attention_every": 0},
            "full_attention_every = 0 gives blocks a sliding window, but .* such as sliding_window = 128, or set full_",
        ),
        (
            {"model.q_lora_rank": 16},
            "q_lora_rank = 16 is for latent .* set kv_lora_rank, such as 512, or q_lora_rank = 0",
        ),
        ({"model.v_head_dim": 16}, "v_head_dim = 16 is for latent attention"),
        ({"model.rope_scaling": "yarn"}, "rope_factor = 1, which does nothing: set it, such as rope_factor = 4.0"),
        (
            {"model.rope_factor": 4.0},
            'rope_factor = 4.0 is not used .* set rope_scaling = "yarn", or rope_factor = 1.0',
        ),
        (YARN | {"model.rope_theta": 1.0}, "model.rope_theta = 1.0 gives no slow frequencies .* more than 1"),
        (YARN | {"model.rope_beta_fast": 0.5}, "rope_beta_fast = 0.5 is below model.rope_beta_slow = 1.0: .* 32.0"),
        (YARN | {"model.rope_mscale": 1.0}, "rope_mscale = 1.0 and model.rope_mscale_all_dim = 0.0 .* give both, or"),
        ({"data.source": "files"}, "data.paths, which is empty: name files or folders"),
        ({"data.paths": ["a"]}, 'data.source = "stdlib" does not read data.paths'),
        ({"data.chat_template": "a"}, 'data.chat_template = "a" is for chats, and data.format = "auto" reads none'),
        (
            {"training.dtype": "bfloat16", "training.mixed_precision_param": "float32"},
            'param = "float32" is wider than training.dtype = "bfloat16".* use bfloat16, or dtype = "float32"',
        ),
        ({"moe.pad_to_capacity": True}, "moe.pad_to_capacity = true .*capacity_factor = 0 .* such as cap"),
        (
            {"moe.overlap": "halves"},
            'overlap = "halves" halves .*local_batch_size = 1: use 2 or more, or overlap = "none"',
        ),
        (
            HALVES | {"moe.dispatcher": "allgather"},
            f'overlap = "halves" .*"allgather" sends and waits at once: use dispatcher = {overlapping_quoted()}, or',
        ),
        (HALVES | {"moe.dispatcher": "symm_mem"}, '"symm_mem" leaves its counts on the device: use'),
        (HALVES | {"moe.capacity_factor": 1.0}, "capacity_factor = 1.0 drops by both: use capacity_factor = 0, or"),
        (
            HALVES | {"model.num_dense_layers": 4, "model.dense_hidden": 8, "model.num_layers": 4},
            'no block of this model has experts: set overlap = "none"',
        ),
        (
            {"moe.pad_to_capacity": True, "moe.capacity_factor": 1.0, "moe.dispatcher": "symm_mem"},
            'pad_to_capacity = true makes every size static.* use dispatcher = "alltoall", .*or pad_to_capacity',
        ),
        ({"job.name": "a/b"}, "job.name = 'a/b' is not a folder name"),
        ({"job.name": ".."}, "job.name = '..' is not a folder name"),
        (FILES | {"data.weights": [1.0]}, "data.weights has 1 numbers for 2 entries of data.paths"),
        (FILES | {"data.fields": ["text"]}, "data.fields has 1 names for 2 entries of data.paths: give one for each"),
        ({"data.weights": [1.0]}, "has 1 numbers for 0 entries"),
        (FILES | {"data.weights": [0.0, 0.0]}, r"data.weights = \[0.0, 0.0\] sums to 0"),
        (FILES | {"data.weights": [1.0, 0.0]}, "gives 'b' the weight 0: remove both"),
        (FILES | {"data.balance_work": True}, 'with data.packing = "stream" all cost the same'),
        ({"data.source": "synthetic", "data.packing": "best_fit"}, 'data.packing = "best_fit" is about documents'),
        ({"validation.interval": 5}, "has nothing to validate on: name validation.paths, or set"),
        ({"validation.paths": ["a"]}, "validation.interval = 0 never reads it"),
        (
            {"validation.paths": ["a"], "validation.held_out": 9, "validation.interval": 1},
            "held_out = 9 holds out documents that nothing reads",
        ),
        ({"moe.grouped_mm": "grouped", **WIDE}, 'moe.grouped_mm = "grouped" has no float64: use "auto"'),
        ({"moe.expert_dtype": "fp8", **WIDE}, 'gives results in bfloat16, but .* = "float64": use "bfloat16"'),
        ({"moe.expert_dtype": "fp8", "moe.grouped_mm": "loop"}, 'moe.grouped_mm = "loop" asks for none'),
        ({"moe.accumulate_weight_gradients": True, "compile.enable": True}, "compiler: set one of them to false"),
        ({"moe.accumulate_weight_gradients": True, "lora.rank": 4}, "lora.rank = 4 trains adapters alone"),
        (
            {"profile.steps": [3, 99], "training.steps": 98},
            "profile.steps has 99, and training.steps = 98: choose steps up to 98",
        ),
        ({"profile.memory": "steps"}, 'needs profile.steps: list some, or use "oom"'),
        ({"validation.held_out": 1}, "holds out every document and leaves none"),
        (
            {"data.source": "synthetic", "validation.interval": 1, "validation.held_out": 9, "validation.steps": 0},
            "never ends: set steps = 10",
        ),
    ],
)
def test_contradiction(values, says):
    (violation,) = contradictions(build(values, COMPONENTS))
    assert re.search(says, violation.text)
    assert set(violation.fields) & set(values)
    assert set(violation.fields) <= set(fields())


@pytest.mark.parametrize(
    "values",
    [
        {"model.top_k": 8},
        {"model.top_k": 1, "model.norm_topk": False},
        {"model.top_k": 1, "model.norm_topk": False, "model.score_function": "sigmoid"},
        {"model.num_dense_layers": 4, "model.dense_hidden": 64},
        {"model.num_dense_layers": 4, "model.dense_hidden": 64, "model.top_k": 1},
        {"model.moe_every": 4, "model.dense_hidden": 64},
        {"model.num_groups": 4, "model.top_groups": 1},
        FILES | {"data.weights": [3.0, 0.5], "data.packing": "best_fit", "data.balance_work": True},
        {"validation.interval": 5, "validation.held_out": 2, "validation.steps": 0},
        {"validation.held_out": 2},
        YARN | {"model.rope_mscale": 1.0, "model.rope_mscale_all_dim": 0.5},
        {"model.sliding_window": 8, "model.full_attention_every": 0},
        {"model.sliding_window": 8, "model.full_attention_every": 2, "model.attention_sinks": True},
        LATENT,
        LATENT | {"model.qk_nope_head_dim": 5, "model.head_dim": 7, "model.q_lora_rank": 8},
        {"moe.capacity_scope": "full_sequence", "moe.drop_policy": "position"},
        {"moe.capacity_factor": 1.0, "moe.pad_to_capacity": True},
        {"data.source": "synthetic", "data.paths": ["a"]},
        {"data.source": "synthetic", "validation.interval": 1},
        {"training.dtype": "float64", "training.mixed_precision_param": "float64"},
        {"training.steps": 1, "lr_schedule.warmup_steps": 10},
    ],
)
def test_lawful(values):
    assert out_of_range(flatten(build(values, COMPONENTS))) == contradictions(build(values, COMPONENTS)) == []


def test_contradictions_come_together():
    values = {"model.head_dim": 3, "model.top_k": 20, "moe.pad_to_capacity": True, "data.source": "files"}
    assert len(contradictions(build(values, COMPONENTS))) == 4
