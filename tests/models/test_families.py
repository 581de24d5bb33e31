"""Families: every size is a whole, consistent model; debug sizes exercise their family; bad names are explained."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from titanmoe.config.blocks import has_experts
from titanmoe.config.schema import Model
from titanmoe.models.families import FAMILIES, names, olmoe, preset

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).parents[2] / "docs" / "models.md"

SIZES = [(family, size) for family, sizes in names().items() for size in sizes]
PUBLISHED = [(family, size) for family, size in SIZES if size != "debug"]

# What a family's name stands for: the same in all its sizes.
SWITCHES = [
    "qkv_bias",
    "qk_norm",
    "rope_theta",
    "norm_eps",
    "tie_embeddings",
    "shared_gate",
    "score_function",
    "norm_topk",
]
# Moonlight has DeepSeek-V3's architecture and its own constants.
# GLM-4.5-Air is without the norms of the larger one.
OWN = {("deepseek_v3", "16b"): {"rope_theta", "rope_scaling", "norm_eps"}, ("glm4_moe", "106b_a12b"): {"qk_norm"}}
# Only set by families that have them; a published model without them keeps the schema's default, which is none.
RARE = [
    "out_bias",
    "attention_sinks",
    "sliding_window",
    "full_attention_every",
    "attention_gate",
    "norm_adds_one",
    "rope_scaling",
    "router_bias",
    "expert_linear_bias",
    "expert_activation",
]
# What a size must set itself, so that a changed default cannot change a published model.
SHAPES = [
    "vocab_size",
    "dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_experts",
    "top_k",
    "expert_hidden",
    "shared_hidden",
]


def test_the_families_and_sizes():
    """Recipes and checkpoints name them. There may be more."""
    assert names().keys() == set(FAMILIES.table)
    assert (
        names().items()
        >= {
            "mixtral": ["debug", "8x7b", "8x22b", "8x22b_g8t8"],
            "qwen2_moe": ["debug", "57b_a14b"],
            "qwen3_moe": ["debug", "30b_a3b", "235b_a22b"],
            "llama3_moe": ["debug", "8x70b"],
            "deepseek_v3": ["debug", "16b", "671b"],
            "olmoe": ["debug", "7b_a1b"],
            "gpt_oss": ["debug", "20b", "120b"],
            "minimax_m2": ["debug", "230b_a10b"],
            "glm4_moe": ["debug", "106b_a12b", "355b_a32b"],
            "kimi_k2": ["debug", "1t_a32b"],
            "glm4_moe_lite": ["debug", "30b_a3b"],
            "qwen3_next": ["debug", "80b_a3b"],
            "qwen3_5_moe": ["debug", "35b_a3b", "122b_a10b"],
        }.items()
    )


@pytest.mark.parametrize("family, size", SIZES)
def test_a_size_is_a_whole_and_consistent_model(family, size):
    fields = preset(family, size)
    assert set(SWITCHES + SHAPES) <= set(fields)
    model = Model(**fields)
    assert (model.family, model.size) == (family, size)
    assert model.num_heads % model.num_kv_heads == 0
    assert model.head_dim % 2 == 0  # RoPE rotates pairs
    assert 1 <= model.top_k <= model.num_experts
    assert model.dense_hidden > 0 or all(has_experts(model, layer) for layer in range(model.num_layers))
    assert model.shared_hidden > 0 or not model.shared_gate


@pytest.mark.parametrize("family, size", PUBLISHED)
def test_the_debug_size_has_its_familys_switches(family, size):
    debug, published = Model(**preset(family, "debug")), Model(**preset(family, size))
    for switch in set(SWITCHES + RARE) - OWN.get((family, size), set()):
        assert getattr(debug, switch) == getattr(published, switch), switch
    assert (debug.shared_hidden > 0) == (published.shared_hidden > 0)
    assert (debug.kv_lora_rank > 0) == (published.kv_lora_rank > 0)
    assert debug.rotary_dim / debug.head_dim == published.rotary_dim / published.head_dim


@pytest.mark.parametrize("family", names())
def test_the_debug_size_folds_on_eight_ranks_any_way(family):
    model = Model(**preset(family, "debug"))
    for field in ["vocab_size", "dim", "num_heads", "num_kv_heads", "num_experts", "expert_hidden"]:
        assert getattr(model, field) % 8 == 0, field
    assert model.dense_hidden % 8 == 0 and model.shared_hidden % 8 == 0
    assert model.num_layers % 4 == 0  # pipeline stages


def test_the_debug_sizes_cover_dense_blocks_and_grouped_queries():
    models = [Model(**preset(family, "debug")) for family in names()]
    assert any(m.num_dense_layers for m in models)
    assert any(m.num_heads > m.num_kv_heads for m in models)
    assert any(m.num_heads * m.head_dim != m.dim for m in models)


def test_an_empty_recipe_is_mixtral_debug():
    assert Model() == Model(**preset("mixtral", "debug"))


def test_presets_are_copies():
    preset("mixtral", "debug")["dim"] = 1
    assert preset("mixtral", "debug")["dim"] == 64


@pytest.mark.parametrize(
    "family, size, hint",
    [
        ("qwen3", "debug", "did you mean qwen3_moe?"),
        ("Mixtral", "debug", "did you mean mixtral?"),
        ("llama3_8x70b", "debug", "did you mean llama3_moe?"),
        ("mixtral", "8x7B", "Did you mean '8x7b'? Known: debug, 8x7b, 8x22b, 8x22b_g8t8"),
        ("qwen2_moe", "57b", "Did you mean '57b_a14b'? Known: debug, 57b_a14b"),
        ("zzz", "debug", 'model.family = "zzz" is not one of mixtral, qwen2_moe, '),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_and_the_list(family, size, hint):
    with pytest.raises(LookupError) as error:
        preset(family, size)
    assert hint in str(error.value)


def test_shapes_and_counts_need_no_torch():
    code = "import sys, titanmoe.models.count, titanmoe.models.families; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=DOCS.parents[1])


def test_the_docs_code_runs():
    blocks = re.findall(r"```(\w+)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert {"python", "toml"} <= {language for language, _ in blocks}
    for language, text in blocks:
        if language == "python":
            exec(compile(text, str(DOCS), "exec"), {})
        if language == "toml":
            fields = tomllib.loads(text)["model"]
            Model(**{**preset(fields["family"], fields["size"]), **fields})


def test_a_size_with_a_field_that_no_model_has_is_named(monkeypatch):
    monkeypatch.setitem(olmoe.SIZES, "debug", olmoe.SIZES["debug"] | {"vocab": 320, "depth": 4})
    with pytest.raises(LookupError, match=r"its size 'debug' has depth, vocab, no field of \[model\]"):
        preset("olmoe", "debug")
