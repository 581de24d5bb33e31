"""Files from others that ask for more than any model has are refused before they are used."""

import json
from itertools import product

import pytest

from titanmoe.checkpoint.hf import config_json as configs
from titanmoe.checkpoint.hf.config_json import parse_config_json, read_json
from titanmoe.config import ConfigError
from titanmoe.config.blocks import has_experts
from titanmoe.config.schema import Model
from titanmoe.models.families.gpt_oss import FULL, WINDOW, _kinds, _read_kinds
from titanmoe.models.families.huggingface import Unrepresentable, dense_blocks

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
    "rope_theta": 1e6,
}


def why(**changes) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_config_json(MIXTRAL | changes, "config.json")
    return error.value.problems


@pytest.mark.parametrize("number", [10**9, 10**400, 1e300])
@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("num_hidden_layers", "num_layers"),
        ("hidden_size", "dim"),
        ("vocab_size", "vocab_size"),
        ("num_local_experts", "num_experts"),
        ("intermediate_size", "expert_hidden"),
        ("num_attention_heads", "num_heads"),
    ],
)
def test_a_size_that_no_model_has(monkeypatch, key, field, number):
    monkeypatch.setattr(configs, "_model", lambda *_: pytest.fail("it was made"))
    (message,) = why(**{key: number})
    assert (
        message.startswith(f"config.json gives model.{field} = ")
        and "and the limit is " in message
        and len(message) < 200
    )


def test_a_size_that_several_keys_give():
    (message,) = why(rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10**400})
    assert (
        message.startswith("config.json gives model.rope_original_len = 0x") and "the limit is 2,147,483,648" in message
    )


def test_floats_that_are_not_numbers():
    (message,) = why(rms_norm_eps=10**400)
    assert "model.norm_eps = 0x" in message and "the limit is 9,223,372,036,854,775,807" in message
    assert "rope_theta" in why(rope_theta=10**400)[0]


def test_experts_of_all_layers_are_counted_together():
    (message,) = why(num_hidden_layers=10_000, num_local_experts=60_000)
    assert "10000 layers (model.num_layers) of 60000 experts (model.num_experts), 600,000,000 in all" in message
    assert (
        parse_config_json(MIXTRAL | {"num_hidden_layers": 1000, "num_local_experts": 1000}, "c").model.num_layers
        == 1000
    )


def test_files_that_are_too_large_or_too_deep(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config.json is not JSON: lists or objects are nested too deep"):
        read_json(file)
    monkeypatch.setattr(configs, "MOST_BYTES", 10)
    file.write_text(json.dumps({"a": 1}))
    assert read_json(file) == {"a": 1}
    file.write_text(json.dumps({"a": 1234567}))
    with pytest.raises(ConfigError, match=r"config.json has more than 10 bytes"):
        read_json(file)


def test_which_blocks_are_dense_is_found_as_by_trying_all():
    for layers in range(1, 8):
        spelt = {}
        for every, dense in product(range(1, layers + 1), range(layers + 1)):
            model = Model(num_layers=layers, num_dense_layers=dense, moe_every=every)
            sparse = tuple(has_experts(model, i) for i in range(layers))
            spelt.setdefault(sparse, {"num_dense_layers": dense, "moe_every": every})
        for sparse in product([False, True], repeat=layers):
            if sparse in spelt:
                assert dense_blocks(list(sparse)) == spelt[sparse]
            else:
                with pytest.raises(Unrepresentable):
                    dense_blocks(list(sparse))


def test_which_blocks_are_narrow_is_found_as_by_trying_all():
    for layers in range(1, 8):
        spelt = {tuple(_kinds(every, layers)): every for every in reversed(range(layers + 1))}
        for kinds in product([WINDOW, FULL], repeat=layers):
            config = {"num_hidden_layers": layers, "layer_types": list(kinds)}
            if set(kinds) == {FULL}:
                assert _read_kinds(config) == {"sliding_window": 0, "full_attention_every": 1}
            elif kinds in spelt:
                assert _read_kinds(config) == {"full_attention_every": spelt[kinds]}
            else:
                with pytest.raises(Unrepresentable):
                    _read_kinds(config)


def test_ten_thousand_layers_take_a_pass_or_two(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "titanmoe.models.families.huggingface.has_experts", lambda *it: calls.append(it) or has_experts(*it)
    )
    assert dense_blocks([False] * 9999 + [True]) == {"num_dense_layers": 9999, "moe_every": 1}
    assert len(calls) == 10_000
