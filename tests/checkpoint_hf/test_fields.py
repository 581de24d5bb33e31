"""Every field of every config class: changed or left out, it is followed as in transformers, refused, or reported.

After a change that is neither refused nor reported, our logits and loss must be those of transformers, whose model
is built from the changed config and runs as in training: dropout and noise show there. What logits hardly show is
compared by value. A change that is only reported must not move transformers' logits outside training.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.checkpoint_hf import models, ours
from titanmoe.checkpoint.hf.config_json import IGNORED_KEYS, describe_folder, known_keys, parse_config_json
from titanmoe.checkpoint.hf.huggingface_source import HuggingFaceSource
from titanmoe.checkpoint.hf.upcycle import UpcycledWeights
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config, Model
from titanmoe.models.families import shipped
from titanmoe.models.families.dense import DENSE
from titanmoe.models.layers import rope_frequencies, rope_scale
from titanmoe.models.transformer import Transformer
from titanmoe.tokens import Tokens

IDS = models.ids(samples=1, length=24)
OUT = object()
"""Instead of a value: the field is left out."""
Change = dict[str, Any]

# Other legal values, for fields where one more, twice as much or the opposite would not be legal.
OTHER: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "n_group": 2,
    "topk_group": 3,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "hidden_act": "gelu",
    "clip_qkv": 0.1,
    "sliding_window": 5,
    "pad_token_id": 3,
    "dtype": "bfloat16",
    "architectures": ["Other"],
    "problem_type": "regression",
    "transformers_version": "4.0.0",
    "_name_or_path": "elsewhere",
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    "mlp_layer_types": ["dense", "dense", "sparse"],
}
# By the names of classes, by dtype, and by the reader of quantised tensors.
READ_ELSEWHERE = {"model_type", "auto_map", "torch_dtype", "quantization_config"}
# Fields that only change together.
WITH: dict[tuple[str, str], Change] = {
    ("glm4_moe_lite", "num_hidden_layers"): {"mlp_layer_types": OUT},
    ("qwen2_moe", "use_sliding_window"): {"layer_types": OUT},
    ("qwen2", "use_sliding_window"): {"layer_types": OUT, "sliding_window": 5, "max_window_layers": 1},
}
for name in ("qwen3_next", "qwen3_5_moe", "qwen2_moe", "gpt_oss", "qwen2", "qwen3"):
    WITH[name, "num_hidden_layers"] = {"layer_types": OUT}
for name in ("deepseek_v3", "glm4_moe_lite"):
    WITH |= {
        (name, "num_attention_heads"): {"num_key_value_heads": 4},
        (name, "num_key_value_heads"): {"num_attention_heads": 2},
        (name, "n_group"): {"n_routed_experts": 16},
        (name, "qk_rope_head_dim"): {"head_dim": OUT, "qk_head_dim": OUT},
    }
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
ROPES: dict[str, Change] = {
    "default": {"rope_parameters": {"rope_type": "default"}},
    "default beside a theta": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 50.0},
    "nothing but a theta": {"rope_parameters": OUT, "rope_theta": 50.0},
    "empty": {"rope_parameters": {}},
    "null": {"rope_parameters": None},
    "yarn": {"rope_parameters": YARN},
    "not truncated": {"rope_parameters": YARN | {"truncate": False}},
    "faster": {"rope_parameters": YARN | {"beta_fast": 3, "beta_slow": 0.5}},
    "null for each": {
        "rope_parameters": YARN | {"beta_fast": None, "beta_slow": None, "truncate": None, "mscale": None}
    },
    "both scales": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "one scale": {"rope_parameters": YARN | {"mscale": 0.7}},
    "the other scale": {"rope_parameters": YARN | {"mscale_all_dim": 0.7}},
    "factor from contexts": {"rope_parameters": YARN | {"factor": None}, "max_position_embeddings": 64},
    "context of its own": {
        "rope_parameters": {k: v for k, v in YARN.items() if not k.startswith("original")},
        "max_position_embeddings": 32,
    },
    "context outside": {"rope_parameters": YARN, "original_max_position_embeddings": 20},
    "old": {"rope_parameters": OUT, "rope_scaling": YARN | {"rope_type": OUT, "type": "yarn"}, "rope_theta": 50.0},
    "old before new": {"rope_parameters": YARN, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "factor of attention": {"rope_parameters": YARN | {"attention_factor": 2.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "whole heads": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    "part of a head": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}


def without(config: Any) -> Any:
    return {k: without(v) for k, v in config.items() if v is not OUT} if isinstance(config, dict) else config


def hf_of(model_type: str) -> Any:
    maps = [*(family.hf for family in shipped().values() if family.hf), *DENSE]
    return next(hf for hf in maps if model_type in (hf.model_type, hf.outer_type))


class Family:
    """A model as transformers saves it, and what both sides compute after a change of its config.json."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder, self.dense = name, folder, name in models.DENSE
        model = models.make(name, **({"head_dim": 4} if name == "mixtral" else {}))  # YaRN fails there without it
        models.save(model, folder)
        self.cls, self.config_cls, self.state = type(model), type(model.config), model.state_dict()
        self.config = json.loads((folder / "config.json").read_text())
        self.hf = hf_of(name)
        with torch.no_grad():
            self.plain = model.eval()(IDS).logits
        self.logits_of: dict[str, Tensor] = {}
        self.computed: dict[str, tuple[Any, Tensor, Tensor]] = {}

    def fields(self) -> list[str]:
        names = (
            {f.name for f in dataclasses.fields(self.config_cls)}
            | self.config.keys()
            | self.config_cls().to_dict().keys()
        )
        # the first says whose config it is, and changing the second breaks transformers' own models
        return sorted(names - {"model_type", "return_dict"})

    def changed(self, key: str) -> list[Change]:
        value = self.config.get(key, getattr(self.config_cls(), key, None))
        if key in OTHER:
            other = OTHER[key]
        elif isinstance(value, bool):
            other = not value
        elif isinstance(value, int):
            other = value + 1
        elif isinstance(value, float):
            other = 2 * value or 0.5
        elif key == "mlp_only_layers":
            other = [] if value else [0]
        elif key == "layer_types":
            other = ["sliding_attention", *["full_attention"] * (len(value) - 1)]
            other = other if other != value else value[::-1]
        elif value is None and key.endswith("_token_id"):
            other = 3
        else:
            raise AssertionError(f"{key} = {value!r}: say in OTHER what else it may be")
        assert other != value, key
        partners = self.config_cls.attribute_map
        alias = {a: OUT for a, b in [*partners.items(), *((b, a) for a, b in partners.items())] if b == key}
        others = alias | WITH.get((self.name, key), {})
        return [{key: value} | others for value in (other, OUT) if value is other or key in self.config]

    def outcome(self, change: Change) -> str:
        """followed, refused or reported; AssertionError if none of them."""
        config = without(self.config | change)
        hf_config = self.config_cls.from_dict(dict(config))
        names = set(change) | {f"model.{name}" for name, keys in self.hf.fields.items() if set(keys) & set(change)}
        names |= {"rope"} if "rope_parameters" in change else set()
        (self.folder / "config.json").write_text(json.dumps(config))
        try:
            parsed = describe_folder(self.folder, self.dense)
            opened = HuggingFaceSource(self.folder, parsed, parsed.model)
            if any(name in note for note in parsed.notes + opened.notes for name in names):
                hf_config.dtype = torch.float32
                with torch.no_grad():
                    torch.testing.assert_close(self.build(hf_config).eval()(IDS).logits, self.plain)
                return "reported"
            model, loss, want = self.of_transformers(hf_config)
            self.check_values(parsed.model, hf_config, model)
            state = model.state_dict()
            same = (
                hf_config.tie_word_embeddings == self.config["tie_word_embeddings"]
                and state.keys() == self.state.keys()
            )
            same = same and all(torch.equal(self.state[n], t) for n, t in state.items())
            source = self.source(opened if same else self.other(parsed, model, config))
        except ConfigError as error:
            assert any(name in str(error) for name in names), f"{change} is refused for another reason: {error}"
            return "refused"
        got = self.logits(source, same)
        assert torch.isfinite(want).all()
        atol = 1e-4 * models.enlarged(self.name)
        torch.testing.assert_close(got, want, rtol=0, atol=atol, msg=lambda text: f"{change}: {text}")
        own_loss = F.cross_entropy(got[0, :-1], IDS[0, 1:])
        torch.testing.assert_close(own_loss, loss, rtol=0, atol=1e-4, msg=lambda text: f"loss of {change}: {text}")
        return "followed"

    def check_values(self, model: Model, hf_config: Any, hf_model: Any) -> None:
        """Of what logits hardly show."""
        assert model == parse_config_json(hf_config.to_dict(), "transformers' own", self.dense).model
        rotary = hf_model.model.rotary_emb
        frequency = rope_frequencies(model, 2 * len(rotary.inv_freq), torch.float32, torch.device("cpu"))
        torch.testing.assert_close(frequency, rotary.inv_freq)
        assert rope_scale(model) == pytest.approx(rotary.attention_scaling, rel=1e-12)

    def of_transformers(self, config: Any) -> tuple[Any, Tensor, Tensor]:
        """The model of a config with its loss and logits: once, for a field that is left out often has its default."""
        key = repr(sorted(vars(config).items()))
        if key not in self.computed:
            model = self.build(config)
            with torch.no_grad():
                self.computed[key] = model, *model(IDS, labels=IDS)[:2]
        return self.computed[key]

    def build(self, config: Any) -> Any:
        model = self.cls._from_config(config).train()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if name in self.state and self.state[name].shape == tensor.shape:
                    tensor.copy_(self.state[name])
                else:
                    tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
        return model

    def other(self, parsed: Any, model: Any, config: Change) -> HuggingFaceSource:
        folder = models.save(model, self.folder / "other")
        (folder / "config.json").write_text(json.dumps(config))
        return HuggingFaceSource(folder, parsed, parsed.model)

    def source(self, opened: HuggingFaceSource) -> Any:
        if self.dense:
            upcycled = UpcycledWeights(opened.path, experts=2, top_k=2, granularity=1, seed=0)
            return SimpleNamespace(model=upcycled.model, read=upcycled.read)
        opened.check()
        return opened

    def logits(self, source: Any, same: bool) -> Tensor:
        """The same model with the same weights is computed once."""
        key = repr(source.model)
        if same and key in self.logits_of:
            return self.logits_of[key]
        part = Transformer(Config(model=source.model), 1, torch.float32)
        ours.load(part, source)
        length = IDS.shape[1]
        index_T = torch.arange(length)
        tokens = Tokens(index_T[None], index_T, index_T * 0, torch.ones(length, dtype=torch.bool), torch.tensor(0))
        with torch.no_grad():
            logits = part(IDS, tokens)
        if same:
            self.logits_of[key] = logits
        return logits


@pytest.mark.parametrize("name", [*models.FAMILIES, *models.DENSE])
def test_every_field(name: str, tmp_path: Path) -> None:
    family = Family(name, tmp_path)
    assert family.outcome({}) == "followed"
    outcomes, wrong = {}, []
    for key in family.fields():
        for change in family.changed(key):
            try:
                outcomes[key, change[key] is OUT] = family.outcome(change)
            except Exception as error:
                wrong.append(f"{without(change)}: {type(error).__name__} {error}")
    assert not wrong, "\n".join(wrong)
    ignored = dict.fromkeys(IGNORED_KEYS - set(family.fields()) - READ_ELSEWHERE, 7)
    assert family.outcome(ignored) == "followed"
    assert family.outcome({"unheard_of": 7}) == "reported"
    assert family.outcome({"is_causal": False}) == family.outcome({"is_causal": None}) == "refused"
    assert outcomes["attention_dropout", False] == "reported"
    assert outcomes["rms_norm_eps", False] == outcomes["rms_norm_eps", True] == "followed"
    for key in {"router_jitter_noise", "output_router_logits"} & set(family.fields()):
        assert outcomes[key, False] == "reported"


@pytest.mark.parametrize("name", [*models.FAMILIES, *models.DENSE])
def test_what_is_left_out_has_transformers_default(name: str) -> None:
    """By value: logits hardly show another epsilon. The keys that each model needs are required here."""
    cls, dense = type(models.config(name)), name in models.DENSE
    # Without a width of heads, the default has odd parts of them turned.
    every, required = cls(**({"head_dim": 128} if name == "glm4_moe" else {})).to_dict(), {"model_type": cls.model_type}
    model = parse_config_json(every, "it", dense).model
    for key in every.keys() - {"model_type"}:
        left = {k: v for k, v in every.items() if key not in (k, cls.attribute_map.get(k))}
        try:
            assert parse_config_json(left, "it", dense).model == model, key
        except ConfigError as error:
            assert "it has " in str(error)
            required[key] = every[key]
    assert not required.keys() & {"rms_norm_eps", "rope_parameters", "norm_topk_prob", "tie_word_embeddings"}
    assert parse_config_json(required, "it", dense).model == model


@pytest.mark.parametrize("name", [*models.FAMILIES, *models.DENSE])
def test_no_key_that_transformers_reads_is_unknown(name: str) -> None:
    """Read in the code of the model, of the causal mask or of rotary positions."""
    model = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    import transformers
    from transformers import masking_utils, modeling_rope_utils

    text = "".join(map(inspect.getsource, (model, masking_utils.create_causal_mask, modeling_rope_utils)))
    read = re.findall(r"\bconfig\.([a-z]\w*)\b(?!\()", text) + re.findall(r'getattr\([\w.]*config, "(\w+)"', text)
    keys = set(read) - {"default_theta", "json"}  # of the class; of a comment
    assert keys >= {"is_causal", "rms_norm_eps", "rope_parameters"}
    kind, cls = (models.FAMILIES | models.DENSE)[name][0], type(models.config(name))
    others = [getattr(transformers, f"{kind}{part}Config", cls) for part in ("", "Vision")]  # of what is not text
    keys -= {field.name for other in others if other is not cls for field in dataclasses.fields(other)}
    assert keys - known_keys(hf_of(name)) == set()


PART, IN_PART = "part of a head", ("glm4_moe", "minimax_m2")
REFUSED = ("one scale", "the other scale", "factor of attention", "linear")


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", *IN_PART, "llama"])
def test_every_field_of_rope(name: str, tmp_path: Path) -> None:
    family, wrong = Family(name, tmp_path), []
    for what, change in ROPES.items():
        try:
            refused = what in REFUSED or (what == PART and name not in IN_PART)
            assert family.outcome(change) == ("refused" if refused else "followed")
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__} {error}")
    assert not wrong, "\n".join(wrong)
