"""What cannot be converted is reported in clear lines, all at once, and nothing is written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint import folders
from tests.checkpoint_hf import models
from titanmoe.checkpoint.checkpoint_folder import Checkpoint, write_checkpoint
from titanmoe.checkpoint.hf.config_json import describe_folder, to_config_json
from titanmoe.checkpoint.hf.huggingface_source import compress_names, open_hf
from titanmoe.checkpoint.move_in_blocks import slice_of_full
from titanmoe.checkpoint.write_tensors import LazyTensor
from titanmoe.cli import main
from titanmoe.config import ConfigError
from titanmoe.config.schema import Model
from titanmoe.models.families import preset


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return models.save(models.make("mixtral"), tmp_path_factory.mktemp("mixtral"))


@pytest.fixture
def copy(mixtral, tmp_path):
    """A folder to corrupt with change(config, tensors)."""

    def spoil(change=lambda config, tensors: None):
        folder = tmp_path / "in"
        folder.mkdir()
        config, tensors = json.loads((mixtral / "config.json").read_text()), load_file(mixtral / "model.safetensors")
        change(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder

    return spoil


def refused(capsys, folder, *options):
    """The lines with which a conversion is refused."""
    folder = Path(folder)
    before = sorted(folder.parent.rglob("*")) if folder.exists() else []
    capsys.readouterr()
    assert main(["convert", *(options or ("--from-hf",)), str(folder), str(folder.parent / "out")]) == 2
    assert before == (sorted(folder.parent.rglob("*")) if folder.exists() else [])
    out, err = capsys.readouterr()
    assert not out
    return err


# ---- config.json


@pytest.mark.parametrize(
    "name, changes, reason",
    [
        ("mixtral", {"model_type": "bert"}, ": docs/extending_families.md shows how to add one, as"),
        ("mixtral", {"model_type": "deepseek_v2"}, "'deepseek_v2', not one of "),
        ("mixtral", {"model_type": "deepseek_v2"}, "a file of names and sizes, here from that of deepseek_v3"),
        ("mixtral", {"model_type": "glm_moe_dsa"}, "it needs attention to those keys alone that an indexer chooses"),
        ("mixtral", {"model_type": "deepseek_v32"}, "it needs attention to those keys alone that an indexer chooses"),
        ("mixtral", {"model_type": "deepseek_v4"}, "it needs attention to compressed keys"),
        (
            "mixtral",
            {"model_type": "minimax_m3_vl"},
            "which is not here: docs/extending_families.md#a-layer-of-its-own",
        ),
        ("mixtral", {"model_type": "nemotron_h"}, "it needs Mamba-2 layers and experts without a gate"),
        ("mixtral", {"model_type": "glm4_mo"}, "a file of names and sizes, here from that of glm4_moe"),
        ("glm4_moe", {"hidden_act": "gelu"}, "titanmoe's glm4_moe only has"),
        ("glm4_moe_lite", {"attention_bias": True}, "attention_bias = True, titanmoe's glm4_moe_lite only has false"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace = 2, and its mlp_layer"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}, "not dense or sparse for 3 layers"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["sparse", "dense", "dense"]},
            "has mlp_layer_types, with which it has experts in the blocks [0] of 3",
        ),
        ("mixtral", {"model_type": "llama"}, "it is dense: titanmoe convert --upcycle "),
        (
            "mixtral",
            {"model_type": "llama"},
            " gives it experts, and --checkpoint.load OUT with --checkpoint.model_only",
        ),
        (
            "mixtral",
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
            "type 'dynamic', model.rope_scaling is none or yarn: up to max_position_embeddings it changes nothing, so "
            'for such a seq_len name a copy of the folder whose config.json has rope_type = "default" there',
        ),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act = 'gelu', titanmoe's mixtral only has \"silu\""),
        ("mixtral", {"sliding_window": 4096}, "sliding_window = 4096, titanmoe's mixtral only has null"),
        ("olmoe", {"sliding_window": 4096}, "sliding_window = 4096, titanmoe's olmoe only has null"),
        ("olmoe", {"is_causal": False}, "is_causal = False, titanmoe's olmoe only has true"),
        ("gpt_oss", {"per_layer_config": {"1": {"num_experts_per_tok": 1}}}, "titanmoe's gpt_oss only has null"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias = True, titanmoe's qwen3_moe only has false"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen2_moe", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("mixtral", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8}}, "type 'llama3'"),
        ("mixtral", {"rope_parameters": None, "rope_theta": None}, "rope_theta = None, which is not a number"),
        ("mixtral", {"rope_parameters": {"rope_type": "yarn"}}, "of type 'yarn' without factor"),
        (
            "qwen3_moe",
            {"num_experts": 7, "num_local_experts": 8},
            "num_experts = 7 and num_local_experts = 8: set one value",
        ),
        (
            "mixtral",
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5",
        ),
        ("mixtral", {"hidden_size": None}, "no hidden_size, which gives model.dim"),
        ("mixtral", {"hidden_size": "32"}, "model.dim = '32', which is not of type int"),
        ("mixtral", {"num_experts_per_tok": 9}, "model.top_k = 9 exceeds model.num_experts = 4"),
        ("qwen2_moe", {"num_hidden_layers": 4, "mlp_only_layers": [2]}, "experts in the blocks [0, 1, 3] of 4"),
    ],
)
def test_a_config_that_no_model_can_express(tmp_path, name, changes, reason):
    kind, options = models.FAMILIES[name]
    config = getattr(models.transformers, f"{kind}Config")(**models.BASE | options).to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        describe_folder(tmp_path)
    assert reason in str(caught.value) and len(caught.value.problems) == 1


def test_all_that_is_wrong_with_a_config_at_once(copy, capsys):
    def spoil(config, tensors):
        config |= {"hidden_act": "gelu", "sliding_window": 9}
        del config["hidden_size"]

    lines = refused(capsys, copy(spoil))
    assert "3 problems" in lines and "gelu" in lines and "sliding_window" in lines and "hidden_size" in lines


def test_faults_of_different_kinds_at_once(copy, capsys):
    """A key that is not followed, a RoPE that no [model] has, and numbers that contradict each other; or a key that is
    missing."""

    def spoil(config, tensors):
        config |= {"hidden_act": "gelu", "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}
        config["num_experts_per_tok"] = 9

    folder = copy(spoil)
    lines = refused(capsys, folder)
    assert "2 problems" in lines and "of type 'linear'" in lines
    assert 'titanmoe\'s mixtral only has "silu": docs/extending_families.md shows how to add one' in lines
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": None}))
    lines = refused(capsys, folder)
    assert "2 problems" in lines and "gelu" in lines and "model.top_k = 9 exceeds model.num_experts = 4" in lines
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    lines = refused(capsys, folder)
    assert "3 problems" in lines and "'linear'" in lines and "gelu" in lines and "no hidden_size" in lines


@pytest.mark.parametrize("old", [False, True], ids=["rope_parameters", "rope_scaling"])
def test_yarn_is_read_and_written(copy, old):
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 20.0}

    def stretch(config, tensors):
        if old:
            del config["rope_parameters"]
            config |= {"rope_theta": 5e5, "rope_scaling": yarn}
        else:
            config["rope_parameters"] = yarn | {"rope_theta": 5e5}

    folder = copy(stretch)
    model = describe_folder(folder).model
    assert (model.rope_scaling, model.rope_factor, model.rope_original_len) == ("yarn", 8, 16)
    assert (model.rope_theta, model.rope_beta_fast, model.rope_beta_slow) == (5e5, 20, 1)
    (folder / "config.json").write_text(json.dumps(to_config_json(model, None, "float32", 64)))
    assert describe_folder(folder).model == model
    rope = models.transformers.AutoConfig.from_pretrained(folder).rope_parameters
    assert rope.items() >= (yarn | {"rope_theta": 5e5, "beta_slow": 1.0, "truncate": True}).items()


def test_published_configs_are_the_presets(tmp_path):
    """The shapes of Mixtral-8x7B-v0.1 and Qwen3-30B-A3B as their config.json state them."""
    published = {
        ("mixtral", "8x7b"): dict(
            model_type="mixtral", vocab_size=32000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2,
            rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, hidden_act="silu", tie_word_embeddings=False,
            max_position_embeddings=32768,
        ),
        ("qwen3_moe", "30b_a3b"): dict(
            model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
            num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True, rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling=None,
            decoder_sparse_step=1, mlp_only_layers=[], attention_bias=False, sliding_window=None,
            use_sliding_window=False, max_window_layers=48, max_position_embeddings=40960,
        ),
    }  # fmt: skip
    for (family, size), config in published.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert describe_folder(tmp_path).model == Model(**preset(family, size))
        assert describe_folder(tmp_path).unknown == []


@pytest.mark.parametrize(
    "alone, step, dense, every",
    [([], 1, 0, 1), ([0, 1], 1, 2, 1), ([], 2, 0, 2), ([], 3, 0, 3), ([0, 1, 2, 4, 6], 1, 2, 2)],
)
def test_which_blocks_of_qwen_are_dense(tmp_path, alone, step, dense, every):
    config = models.make("qwen2_moe").config.to_dict()
    config |= {"num_hidden_layers": 8, "mlp_only_layers": alone, "decoder_sparse_step": step, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = describe_folder(tmp_path).model
    assert (model.num_dense_layers, model.moe_every) == (dense, every)
    written = to_config_json(model, None, "float32", 64)
    assert written["mlp_only_layers"] == [i for i in range(8) if i in alone or (i + 1) % step]


# ---- tensors


def test_every_missing_unexpected_and_misshapen_tensor_is_listed(copy, capsys):
    def spoil(config, tensors):
        del tensors["model.norm.weight"]
        for layer in (0, 1):
            for expert in range(4):
                del tensors[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight"]
        tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(3, 32)
        tensors["model.layers.2.self_attn.q_proj.weight"] = torch.zeros(2)
        tensors["stray"] = torch.zeros(1)

    lines = refused(capsys, copy(spoil))
    for line in (
        "5 problems",
        "model.norm.weight: missing",
        "model.layers.{0-1}.block_sparse_moe.experts.{0-3}.w3.weight: missing",
        "model.layers.2.self_attn.q_proj.weight: not part of this model",
        "stray: not part of this model",
        "model.layers.1.self_attn.q_proj.weight: shape (3, 32) in the files, (32, 32) in this model",
    ):
        assert line in lines


@pytest.mark.parametrize("number", [1, 3])
def test_another_number_of_layers_than_the_files_have_is_one_line(copy, capsys, number):
    folder = copy(lambda config, tensors: config.update(num_hidden_layers=number))
    assert refused(capsys, folder) == (
        f"error: 1 problem in {folder}\n\n  1. {folder}/config.json has num_hidden_layers = {number}, and the files "
        "have 2 layers: correct the number, or add the files that are missing\n"
    )


def test_names_share_a_line_where_that_says_everything():
    names = {f"a.{i}.b.{j}" for i in (0, 1, 5) for j in range(3)}
    assert compress_names(names) == ["a.{0-1,5}.b.{0-2}"]
    assert compress_names(names - {"a.1.b.2"}) == sorted(names - {"a.1.b.2"})
    assert compress_names(["x", "y"]) == ["x", "y"]


def test_experts_of_different_dtypes(copy, capsys):
    def spoil(config, tensors):
        name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
        tensors[name] = tensors[name].bfloat16()

    assert "layers.1.moe.experts.w1: experts of different dtypes, bfloat16, float32" in refused(capsys, copy(spoil))


def test_another_model_than_asked_for(mixtral):
    model = describe_folder(mixtral).model
    for changes, lines in (
        ({"vocab_size": 320}, ["model.vocab_size = 320, but"]),
        ({"family": "qwen3_moe"}, ["model.family = 'qwen3_moe', but"]),
        ({"num_layers": 3, "num_experts": 8}, ["model.num_layers = 3", "model.num_experts = 8"]),
    ):
        with pytest.raises(ConfigError) as caught:
            open_hf(mixtral, replace(model, **changes)).check()
        problems = caught.value.problems
        assert len(problems) == len(lines) and all(
            line in problem for line, problem in zip(lines, problems, strict=True)
        )
    other = replace(model, rope_theta=1e4, top_k=1, norm_topk=False)
    with pytest.raises(ConfigError) as caught:
        open_hf(mixtral, other).check()
    assert len(caught.value.problems) == 3
    other = open_hf(mixtral, replace(other, change=["rope_theta", "top_k", "norm_topk"]))
    other.check()
    assert len([note for note in other.notes if note.startswith("model.")]) == 3
    same = open_hf(mixtral, replace(model, score_function="softmax_after_topk"))
    same.check()
    assert same.notes == []


def test_a_tied_embedding_stored_twice(tmp_path, capsys):
    folder = models.save(models.make("qwen3"), tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert main(["convert", "--upcycle", str(folder), str(tmp_path / "out")]) == 0
    assert "left out 1 tensors: a second copy of the tied embedding" in capsys.readouterr().out
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, folder / "model.safetensors")
    assert main(["convert", "--upcycle", str(folder), str(tmp_path / "out"), "--overwrite"]) == 2
    assert "lm_head.weight: not part of this model" in capsys.readouterr().err


# ---- files


def test_folders_that_are_not_models(mixtral, tmp_path, capsys):
    assert "is not a folder" in refused(capsys, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert f"no config.json in {tmp_path / 'empty'}" in refused(capsys, tmp_path / "empty")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_bytes((mixtral / "config.json").read_bytes())
    (tmp_path / "bin" / "pytorch_model.bin").write_text("pickled")
    assert "neither model.safetensors nor model.safetensors.index.json but pytorch_model.bin" in refused(
        capsys, tmp_path / "bin"
    )
    (tmp_path / "bin" / "config.json").write_text("{")
    assert "is not JSON" in refused(capsys, tmp_path / "bin")
    assert "contains no checkpoint" in refused(capsys, mixtral, "--to-hf")


@pytest.mark.parametrize("left", [0, 5, 300, -1])
def test_a_truncated_file(copy, capsys, left):
    folder = copy()
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:left])
    lines = refused(capsys, folder)
    assert "model.safetensors is damaged or truncated" in lines and lines.count("\n") == 1


def test_a_missing_shard(tmp_path, capsys):
    folder = models.save(models.make("mixtral"), tmp_path / "in", max_shard_size="30KB")
    files = sorted(folder.glob("*.safetensors"))
    files[1].unlink()
    assert f"{files[1]} is missing, model.safetensors.index.json names it" in refused(capsys, folder)


def test_dtypes_that_are_not_weights(copy, capsys):
    def spoil(config, tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int64)

    assert "model.norm.weight of dtype I64" in refused(capsys, copy(spoil))


def test_only_folders_of_the_same_kind_are_overwritten_and_only_if_asked(mixtral, tmp_path, capsys):
    def convert(*words):
        return main(["convert", *map(str, words)])

    ours, out = tmp_path / "ours", tmp_path / "out"
    assert convert("--from-hf", mixtral, ours) == 0 and convert("--to-hf", ours, out) == 0
    (out / "mark").write_text("of the first")
    (ours / "mark").write_text("of the first")
    assert convert("--from-hf", mixtral, ours) == 2 and convert("--to-hf", ours, out) == 2
    assert (out / "mark").exists() and (ours / "mark").exists()
    assert capsys.readouterr().err.count("choose another folder, or give --overwrite") == 2
    (tmp_path / "out.removing" / "rest").mkdir(parents=True)  # of a conversion that was killed
    assert convert("--from-hf", mixtral, ours, "--overwrite") == 0 and convert("--to-hf", ours, out, "--overwrite") == 0
    assert [path.name for path in tmp_path.glob("out.removing*")] == ["out.removing"]  # perhaps the user's own
    assert not (out / "mark").exists() and not (ours / "mark").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    for option, source in (("--from-hf", mixtral), ("--to-hf", ours)):
        assert convert(option, source, tmp_path / "home", "--overwrite") == 2
    assert (tmp_path / "home" / "thesis.tex").exists()
    assert convert("--to-hf", ours, tmp_path / "no" / "such" / "place") == 2


def test_options_of_something_else(mixtral, tmp_path, capsys):
    lines = refused(capsys, mixtral, "--from-hf", "--experts", "8", "--max-shard-gb", "1", "--seed", "0")
    assert "--experts is an option of --upcycle" in lines and "--max-shard-gb is an option of --to-hf" in lines
    assert "--seed" in lines
    assert "--max-shard-gb = 0.0 is not a size" in refused(capsys, mixtral, "--to-hf", "--max-shard-gb", "0")


def test_a_model_that_transformers_cannot_express(mixtral, tmp_path, capsys):
    """A checkpoint whose routing is not Mixtral's."""
    ours = tmp_path / "ours"
    assert main(["convert", "--from-hf", str(mixtral), str(ours)]) == 0
    record = folders.manifest_of(ours)["record"]
    record["config"]["model"] |= {"route_scale": 2.0, "norm_topk": False}
    folders.rewrite(ours, record=record)
    assert main(["convert", "--to-hf", str(ours), str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err
    assert "model.route_scale = 2.0, but transformers' mixtral only has 1.0" in lines
    assert "model.norm_topk = False" in lines and not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_not_exported(mixtral, tmp_path, capsys):
    ours = tmp_path / "ours"
    assert main(["convert", "--from-hf", str(mixtral), str(ours)]) == 0
    (file,) = ours.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert main(["convert", "--to-hf", str(ours), str(tmp_path / "out")]) == 2
    assert "its contents have changed" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, change, reason",
    [
        ("layers.1.moe.router.expert_bias", lambda t: t + 1, "is not zero, and mixtral models have no such bias"),
        ("head.norm.weight", lambda t: None, "head.norm.weight is missing"),
        ("head.norm.weight", lambda t: t[:-1], "head.norm.weight has shape (31,), not (32,)"),
        (
            "layers.2.ffn_norm.weight",
            lambda t: torch.zeros(32),
            "layers.2.ffn_norm.weight does not belong to this model",
        ),
    ],
)
def test_a_checkpoint_that_is_not_its_model(mixtral, tmp_path, capsys, name, change, reason):
    assert main(["convert", "--from-hf", str(mixtral), str(tmp_path / "ours")]) == 0
    saved = Checkpoint(tmp_path / "ours")
    tensors = {name: saved.read(name) for name in saved.tensors}
    tensors[f"model.{name}"] = change(tensors.get(f"model.{name}"))
    pieces = {
        name: LazyTensor(tuple(t.shape), t.dtype, slice_of_full(lambda t=t: t))
        for name, t in tensors.items()
        if t is not None
    }
    write_checkpoint(tmp_path / "other", pieces, saved.record)
    capsys.readouterr()
    assert main(["convert", "--to-hf", str(tmp_path / "other"), str(tmp_path / "out")]) == 2
    assert reason in capsys.readouterr().err and not (tmp_path / "out").exists()
