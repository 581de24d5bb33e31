"""Adapters out to PEFT and in from there: what its own library computes with them is what ours does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests import parity, world
from tests.checkpoint import runs
from tests.checkpoint_hf import adapted, models
from tests.checkpoint_hf.test_convert import convert
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.checkpoint.hf import peft_base
from titanmoe.checkpoint.hf.config_json import describe_folder, hf_format_of
from titanmoe.checkpoint.hf.peft_read import read_peft
from titanmoe.checkpoint.hf.peft_write import plan_peft_folder
from titanmoe.checkpoint.hf.tensor_map import TensorMap
from titanmoe.checkpoint.move_in_blocks import slice_of_full
from titanmoe.checkpoint.read_adapters import Adapters
from titanmoe.checkpoint.write_tensors import LazyTensor
from titanmoe.cli import main
from titanmoe.config.load import ConfigError
from titanmoe.config.schema import LoRA, Model
from titanmoe.models.families import preset

peft = pytest.importorskip("peft")


def by_peft(model: Any, folder: Path) -> torch.Tensor:
    """Logits with adapters as PEFT loads them; every tensor of theirs has to find its place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*(missing|unexpected)")
        return models.logits(peft.PeftModel.from_pretrained(model, folder).eval(), models.ids())


def merged(model: Any, source: Path, *words: object) -> torch.Tensor:
    out = source.with_name(f"{source.name} merged")
    assert convert("--to-hf", source, out, *words) == 0
    return models.logits(type(model).from_pretrained(out).eval(), models.ids())


def close(got: torch.Tensor, want: torch.Tensor, times: int = 1) -> None:
    assert (got - want).abs().max() < times * 1e-5 * want.abs().max()


@pytest.mark.parametrize("name", models.FAMILIES)
def test_peft_computes_what_ours_does_and_gives_back_the_same_bits(tmp_path, name):
    """Experts apart, and stacked for gpt-oss; a rank of their own."""
    model = models.make(name)
    folder = models.save(model, tmp_path / "in")
    adapters = adapted.write(tmp_path / "ours", folder)
    assert convert("--to-peft", tmp_path / "ours", tmp_path / "peft") == 0
    before, want = models.logits(model, models.ids()), merged(model, tmp_path / "ours")
    assert (want - before).abs().max() > 0.1
    close(by_peft(model, tmp_path / "peft"), want, models.enlarged(name))

    back = read_peft(tmp_path / "peft", describe_folder(folder).model)
    assert back.base == str(folder) and adapters.keys() == back.tensors.keys()
    assert all(torch.equal(back.tensors[name].get(), tensor) for name, tensor in adapters.items())
    assert dataclasses.replace(back.lora, targets=[]) == adapted.LORA
    assert torch.equal(merged(model, tmp_path / "peft"), want)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "gpt_oss"])
def test_the_scale_of_rslora_goes_out_and_comes_back(tmp_path, name):
    """Ranks are doubled in stacks and added up in fused matrices, and their roots are not."""
    model = models.make(name)
    folder = models.save(model, tmp_path / "in")
    lora = dataclasses.replace(adapted.LORA, rslora=True)
    adapted.write(tmp_path / "plain", folder)
    adapters = adapted.write(tmp_path / "ours", folder, lora)
    assert convert("--to-peft", tmp_path / "ours", tmp_path / "peft") == 0
    want = merged(model, tmp_path / "ours")
    assert (want - merged(model, tmp_path / "plain")).abs().max() > 0.1
    close(by_peft(model, tmp_path / "peft"), want, models.enlarged(name))
    back = read_peft(tmp_path / "peft", describe_folder(folder).model)
    assert all(torch.equal(back.tensors[name].get(), tensor) for name, tensor in adapters.items())
    assert dataclasses.replace(back.lora, targets=[]) == lora


@pytest.mark.parametrize(("targets", "written"), [(["*.attention.*"], 0.1), ([], 0.0)], ids=["attention", "all"])
def test_dropout_is_written_where_peft_takes_it(tmp_path, targets, written):
    """PEFT refuses to load it together with target_parameters, which experts' adapters need."""
    model = models.make("qwen3_moe")
    folder = models.save(model, tmp_path / "in")
    adapted.write(tmp_path / "ours", folder, dataclasses.replace(adapted.LORA, dropout=0.1, targets=targets))
    assert convert("--to-peft", tmp_path / "ours", tmp_path / "peft") == 0
    assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["lora_dropout"] == written
    close(by_peft(model, tmp_path / "peft"), merged(model, tmp_path / "ours"), models.enlarged("qwen3_moe"))


PARTS = {
    "some layers": ["layers.1.*"],
    "experts' down in some, attention in others": ["layers.1.*.w2", "layers.0.attention.w[qo].*"],
    "all but experts": ["*.attention.*", "*.ffn.*", "*.shared.*"],
    "shared experts alone": ["*.shared.*"],
}


@pytest.mark.parametrize("targets", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3", "qwen3_next"])
def test_parts_of_a_model(tmp_path, name, targets):
    model = models.make(name)
    folder = models.save(model, tmp_path / "in")
    adapters = adapted.write(tmp_path / "ours", folder, dataclasses.replace(adapted.LORA, targets=targets))
    assert convert("--to-peft", tmp_path / "ours", tmp_path / "peft") == 0
    close(by_peft(model, tmp_path / "peft"), merged(model, tmp_path / "ours"), models.enlarged(name))
    assert read_peft(tmp_path / "peft", describe_folder(folder).model).tensors.keys() == adapters.keys()


MADE_BY_PEFT = {
    "one rank": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "gate and up alone": {"target_parameters": ["mlp.experts.gate_up_proj"], "rank_pattern": {".*gate_up_proj": 2}},
    "experts by the names of their modules": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    "gate and up by the names of their modules": {"target_modules": ["o_proj", "gate_proj", "up_proj"]},
    "orthogonal": {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "orthogonal"},
    "gaussian, with dropout": {"target_modules": ["v_proj"], "init_lora_weights": "gaussian", "lora_dropout": 0.1},
    "rslora": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "use_rslora": True},
    "down alone": {"target_parameters": ["experts.down_proj"], "alpha_pattern": {"q_proj": 7, "experts.down_proj": 7}},
}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("case", MADE_BY_PEFT)
def test_adapters_made_by_peft_on_stacked_experts_are_read(tmp_path, name, case):
    """Gate and up have an A in common there, and each of ours a copy of it."""
    made_by_peft(tmp_path, name, {"target_modules": ["q_proj"]} | MADE_BY_PEFT[case])


def test_adapters_made_by_peft_on_matrices_of_several_are_read(tmp_path):
    """Each of ours has a copy of their A."""
    made_by_peft(tmp_path, "qwen3_next", {"target_modules": ["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]})


def made_by_peft(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    model = models.make(name)
    models.save(model, tmp_path / "in")
    torch.manual_seed(3)  # of each A
    options = {"r": 4, "lora_alpha": 7} | options
    tuned = peft.get_peft_model(model, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in (p for n, p in tuned.named_parameters() if "lora_B" in n):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    tuned.save_pretrained(tmp_path / "peft")
    want = models.logits(tuned.eval(), models.ids())
    close(merged(models.make(name), tmp_path / "peft", "--base", tmp_path / "in"), want, models.enlarged(name))


def made(tmp_path: Path, name: str, **options: Any) -> tuple[Path, torch.Tensor]:
    """Return a folder of adapters, trained a little, on a model whose folder is `in`; and what PEFT computes."""
    model = models.make(name)
    models.save(model, tmp_path / "in")
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=7, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for parameter in (p for n, p in tuned.named_parameters() if "lora_" in n):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    tuned.save_pretrained(tmp_path / "peft")
    return tmp_path / "peft", models.logits(tuned.eval(), models.ids())


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapters_on_a_base_that_peft_changed_are_no_plain_lora(tmp_path, capsys, init):
    """Read as plain LoRA, they would compute something else."""
    folder, want = made(tmp_path, "qwen3_moe", target_modules=["q_proj", "v_proj"], init_lora_weights=init)
    words = ("--to-hf", folder, tmp_path / "out", "--base", tmp_path / "in")
    assert "path_initial_model_for_weight_conversion" in refused(capsys, *words)
    settings(folder, init_lora_weights=True)
    assert (
        merged(models.make("qwen3_moe"), folder, "--base", tmp_path / "in") - want
    ).abs().max() > 0.1 * want.abs().max()


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "qwen3_next"])
def test_all_linear_is_refused_with_what_to_name_instead(tmp_path, capsys, name):
    folder, _ = made(tmp_path, name, target_modules="all-linear")
    text = refused(capsys, "--to-hf", folder, tmp_path / "out", "--base", tmp_path / "in")
    assert 'routers and gates are not adapted here, and "all-linear" adapts them: train with target_modules=[' in text
    instead = re.search(r"train with target_modules=(\[.*?\])(?: and target_parameters=(\[.*?\]))? instead", text)
    targets = {"target_modules": json.loads(instead[1]), "target_parameters": json.loads(instead[2] or "null")}
    (tmp_path / "again").mkdir()
    folder, want = made(tmp_path / "again", name, **targets)
    close(merged(models.make(name), folder, "--base", tmp_path / "again/in"), want, models.enlarged(name))


# ---- what is refused


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert convert(*words) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return models.save(models.make("qwen3_moe"), tmp_path / "qwen")


def test_other_weights_are_refused(tmp_path, qwen, capsys):
    other = models.save(models.make("qwen3_moe", rms_norm_eps=1e-5), tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    shutil.copy(qwen / "config.json", other)
    adapted.write(tmp_path / "ours", qwen)
    for kind in ("--to-hf", "--to-peft"):
        text = refused(capsys, kind, tmp_path / "ours", tmp_path / "out", "--base", other)
        assert f"{other} has other weights (digest" in text and f"{qwen}): name those" in text
        assert not list(tmp_path.glob("out*"))
    shutil.copy(qwen / "model.safetensors", other)
    assert convert("--to-hf", tmp_path / "ours", tmp_path / "out", "--base", other) == 0  # the same, elsewhere
    assert convert("--from-hf", qwen, tmp_path / "whole") == 0
    assert convert("--to-peft", tmp_path / "ours", tmp_path / "peft", "--base", tmp_path / "whole") == 0
    text = refused(capsys, "--to-hf", tmp_path / "whole", tmp_path / "o", "--base", qwen)
    assert f"has full weights: --base {qwen} is for adapters" in text
    assert "has full weights and no adapters" in refused(capsys, "--to-peft", tmp_path / "whole", tmp_path / "o")
    assert "is a folder of PEFT already" in refused(capsys, "--to-peft", tmp_path / "peft", tmp_path / "o")


def test_random_weights_have_no_name(tmp_path, qwen, capsys):
    adapted.write(tmp_path / "ours", qwen, initial_hf="")
    assert "was trained on random weights" in refused(capsys, "--to-hf", tmp_path / "ours", tmp_path / "out")
    assert convert("--to-peft", tmp_path / "ours", tmp_path / "peft") == 0
    assert "it names no base model" in capsys.readouterr().out
    assert "does not say which weights" in refused(capsys, "--to-hf", tmp_path / "peft", tmp_path / "out")


def test_what_peft_cannot_express(tmp_path):
    model = Model(**preset("deepseek_v3", "debug") | {"family": "deepseek_v3", "mtp_depth": 1})
    adapters = _adapters(model, LoRA(rank=4))
    map_ = TensorMap(model, hf_format_of("deepseek_v3"))
    with pytest.raises(ConfigError, match=r"multi-token prediction has adapters, .*use --drop mtp"):
        plan_peft_folder(adapters, map_, "", None, [])
    names = plan_peft_folder(adapters, map_, "", None, ["mtp"]).tensors
    assert names and not any(f"layers.{model.num_layers}." in name for name in names)
    with pytest.raises(ConfigError, match=r"only w1 has adapters, and PEFT adapts both or neither"):
        plan_peft_folder(_adapters(model, LoRA(rank=4, targets=["layers.*.w[12]"])), map_, "", None, [])


def _adapters(model: Model, lora: LoRA) -> Adapters:
    tensors = adapted.random_adapters(model, lora)
    return Adapters(
        path=Path("ours"),
        model=model,
        lora=lora,
        tensors={n: LazyTensor(tuple(x.shape), x.dtype, slice_of_full(lambda x=x: x)) for n, x in tensors.items()},
    )


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
EXPERT = "base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_B.weight"
WRONG: dict[str, tuple[Any, str]] = {
    "no adapter": (
        lambda f, t: (f / "adapter_config.json").unlink(),
        "is no folder of PEFT, as there is no adapter_config.json: name one",
    ),
    "a tensor is missing": (lambda f, t: t.pop(Q), f"{Q}: missing"),
    "an expert is missing": (lambda f, t: t.pop(EXPERT), f"{EXPERT}: missing"),
    "a shape": (lambda f, t: t.update({Q: t[Q][:, :5]}), f"{Q}: shape (6, 5), and (6, 32) is needed"),
    "of the head": (
        lambda f, t: t.update({"base_model.model.lm_head.lora_A.weight": t[Q].clone()}),
        "lm_head.lora_A.weight: not an",
    ),
    "several ranks": (
        lambda f, t: t.update({Q: t[Q][:2], Q.replace("_A", "_B"): t[Q.replace("_A", "_B")][:, :2]}),
        "several values of lora.rank",
    ),
    "several alphas": (
        lambda f, t: settings(f, alpha_pattern={"q_proj": 3}),
        "several values of lora.alpha, 3.0 (attention.wq.weight), 7.0",
    ),
    "a pattern without end": (
        lambda f, t: settings(f, alpha_pattern={"((.*)*)*!": 7}),
        "alpha_pattern with '((.*)*)*!', a regular expression: write names of modules",
    ),
    "a pattern of many": (lambda f, t: settings(f, alpha_pattern={".*" * 30 + "x": 7}), "a regular expression"),
    "a pattern that is none": (
        lambda f, t: settings(f, alpha_pattern={"(q_proj": 7}),
        "'(q_proj', a regular expression",
    ),
    "patterns that are a list": (
        lambda f, t: settings(f, alpha_pattern=["q_proj"]),
        "has alpha_pattern = ['q_proj'], which is not an object",
    ),
    "ranks that are a text": (
        lambda f, t: settings(f, rank_pattern="(("),
        "rank_pattern = '((', which is not an object",
    ),
    "an alpha that is a list": (
        lambda f, t: settings(f, lora_alpha=["*"]),
        "has lora_alpha = ['*']: write a number above 0",
    ),
    "an alpha of a pattern": (
        lambda f, t: settings(f, alpha_pattern={"q_proj": "7"}),
        "has q_proj = '7': write a number above 0",
    ),
    "parameters that are a number": (
        lambda f, t: settings(f, target_parameters=3),
        "has target_parameters = 3, which is not a list",
    ),
    "a base that is a list": (
        lambda f, t: settings(f, base_model_name_or_path=["x"]),
        "has base_model_name_or_path = ['x'], which is not a name",
    ),
    "a base with a NUL": (lambda f, t: settings(f, base_model_name_or_path="x\0"), "= 'x\\x00', which is not a name"),
    "an rslora that is a number": (lambda f, t: settings(f, use_rslora=1), "has use_rslora = 1: write true or false"),
    "dora": (lambda f, t: settings(f, use_dora=True, bias="all"), "has bias = 'all', and only plain LoRA"),
    "mica": (lambda f, t: settings(f, init_lora_weights="mica"), "has init_lora_weights = 'mica', and only plain LoRA"),
    "an unknown key": (
        lambda f, t: settings(f, spectral_config={"k": 1}, off=None),
        "has spectral_config = {'k': 1}, which is not known here, so that what that changes cannot be told",
    ),
    "a dropout that is none": (
        lambda f, t: settings(f, lora_dropout="0.1"),
        "has lora_dropout = '0.1': write a number from 0 to",
    ),
    "another task": (lambda f, t: settings(f, task_type="SEQ_CLS"), "has task_type = 'SEQ_CLS', and only plain LoRA"),
} | {
    f"a changed base, {init}": (
        lambda f, t, init=init: settings(f, init_lora_weights=init),
        f"has init_lora_weights = '{init}', with which PEFT changes the base when it makes adapters",
    )
    for init in ("pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga")
}


def settings(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, Path]:
    """A Hugging Face folder and adapters for it in PEFT's form."""
    tmp = tmp_path_factory.mktemp("exported")
    folder = models.save(models.make("qwen3_moe"), tmp / "in")
    adapted.write(tmp / "ours", folder)
    assert convert("--to-peft", tmp / "ours", tmp / "peft") == 0
    return folder, tmp / "peft"


@pytest.mark.parametrize("case", WRONG)
def test_a_folder_that_cannot_be_read_says_why(tmp_path, exported, case):
    spoil, text = WRONG[case]
    folder = shutil.copytree(exported[1], tmp_path / "peft")
    tensors = load_file(folder / "adapter_model.safetensors")
    spoil(folder, tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError) as error:
        read_peft(folder, describe_folder(exported[0]).model)
    assert text in "; ".join(error.value.problems)


# ---- weights under them that are not those that they were trained on


def others(folder: Path, out: Path) -> Path:
    """Return a copy of a model's folder in which one weight is another."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def test_the_base_of_a_peft_folder_is_compared_by_weights_or_by_name(tmp_path, exported, capsys):
    base, adapter = exported
    other, same = others(base, tmp_path / "other"), shutil.copytree(base, tmp_path / "same")
    text = refused(capsys, "--to-hf", adapter, tmp_path / "out", "--base", other)
    assert (
        f"{other} has other weights (digest " in text
        and f"than {base} (digest" in text
        and not list(tmp_path.glob("out*"))
    )
    assert convert("--to-hf", adapter, tmp_path / "a", "--base", same) == 0
    assert f"note: {same} has the same weights (digest " in capsys.readouterr().out
    assert convert("--to-hf", adapter, tmp_path / "b") == 0
    assert f"note: {base} is the base that adapter_config.json names" in capsys.readouterr().out

    moved = shutil.copytree(adapter, tmp_path / "moved")
    settings(moved, base_model_name_or_path="somebody/other-model", revision="main")
    text = refused(capsys, "--to-hf", moved, tmp_path / "out", "--base", base)
    assert (
        "the adapters are for somebody/other-model@main (base_model_name_or_path in adapter_config.json), which is"
        in text
    )
    assert f"or, if they are the same weights, write {base} there" in text
    settings(moved, base_model_name_or_path=f"somebody/{base.name.upper()}", revision=None)
    assert convert("--to-hf", moved, tmp_path / "c", "--base", base) == 0
    assert "note: names and shapes were compared, not weights: adapters for somebody/" in capsys.readouterr().out
    settings(moved, base_model_name_or_path=None)
    assert convert("--to-hf", moved, tmp_path / "d", "--base", base) == 0
    assert f"note: shapes alone were compared with {base}" in capsys.readouterr().out
    settings(moved, base_model_name_or_path=str(models.save(models.make("mixtral"), tmp_path / "mixtral")))
    text = refused(capsys, "--to-hf", moved, tmp_path / "out", "--base", base)
    assert f"the adapters are for {tmp_path / 'mixtral'}" in text and f"cannot be compared with {base}: " in text


def test_generation_compares_the_base_of_a_peft_folder(tmp_path, capsys):
    base = models.save(models.make("qwen3_moe", vocab_size=320), tmp_path / "in")
    adapted.write(tmp_path / "ours", base)
    assert convert("--to-peft", tmp_path / "ours", tmp_path / "peft") == 0
    words = ["generate", "--adapter", str(tmp_path / "peft"), "--prompt", "a", "--max-tokens", "1"]
    words += ["--tokenizer", "bytes", "--device", "cpu", "--checkpoint"]
    assert main([*words, str(others(base, tmp_path / "other"))]) == 2
    assert "has other weights (digest" in capsys.readouterr().err
    same = shutil.copytree(base, tmp_path / "same")
    assert main([*words, str(same)]) == 0
    assert f"note: {same} has the same weights" in capsys.readouterr().err


def test_a_run_compares_them_on_all_ranks(tmp_path, exported):
    other = str(others(exported[0], tmp_path / "other"))
    with pytest.raises(world.RankError, match=r"has other weights \(digest"):
        world.run(2, runs.go, str(tmp_path), begin(exported) | {"checkpoint.initial_hf": other}, 1)
    with pytest.raises(world.RankError, match=r"and this run begins from random weights: name the model"):
        world.run(1, runs.go, str(tmp_path), begin(exported) | {"checkpoint.initial_hf": ""}, 1)


def compared_where_one_rank_has_the_base() -> str:
    named = SimpleNamespace(base="owner/base", path="adapters")  # all that is read of them here
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            stack.enter_context(mock.patch.object(peft_base, "resolve_place", lambda name: "/cache/base"))
        return peft_base.compare_base(named, None, "mirror/base", dist.group.WORLD)


def test_ranks_agree_on_a_base_that_not_all_machines_have() -> None:
    results = world.run(2, compared_where_one_rank_has_the_base, timeout=20)
    assert results == ["names and shapes were compared, not weights: adapters for owner/base, on mirror/base"] * 2


# ---- a run that begins from them


def begin(exported: tuple[Path, Path], **changes: Any) -> dict[str, Any]:
    folder, adapters = exported
    shape = dataclasses.asdict(describe_folder(folder).model)
    lora = {"lora.rank": 6, "lora.experts_rank": 3, "lora.alpha": 7.0}
    words = {f"model.{name}": value for name, value in shape.items()} | lora
    words |= {"checkpoint.initial_hf": str(folder), "checkpoint.initial_adapter": str(adapters)}
    return words | dict.fromkeys(parity.NUMERICS, "float32") | changes


def test_a_run_begins_from_them_and_gives_back_the_same_bits(tmp_path, exported):
    words = begin(exported, **{"optimizer.lr": 1e-300, "parallelism.experts.etp": 2, "lora.dropout": 0.1})
    (went, _) = world.run(2, runs.go, str(tmp_path), words, 1)
    origin = f"adapters of {exported[1]}, trained there with lora_dropout = 0, and here 0.1\n{exported[0]} is the base"
    origin += " that adapter_config.json names"
    assert went.notes["begins from"].endswith(origin)
    path = tmp_path / "run/checkpoints/step-00000001"
    assert convert("--to-peft", path, tmp_path / "peft") == 0
    back, want = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "peft", exported[1]))
    assert back.keys() == want.keys() and all(back[name].equal(tensor) for name, tensor in want.items())
    # It resumes from what it saved, whatever has become of the folder.
    world.run(2, runs.go, str(tmp_path), words | {"checkpoint.initial_adapter": "gone"}, 2)
    assert "model.layers.0.attention.wq.lora_A" in Checkpoint(path).tensors


def test_other_adapters_than_the_recipe_says_are_refused_at_once(tmp_path, exported):
    other = {"lora.rank": 8, "lora.experts_rank": 4, "lora.alpha": 32.0, "lora.targets": ["*.attention.w[qk].*"]}
    with pytest.raises(world.RankError) as error:
        world.run(1, runs.go, str(tmp_path), begin(exported, **other), 1)
    for text in ("lora.alpha = 32.0, and the adapters have 7.0: use that", "lora.rank = 8, and the adapters have 6",
                 "lora.experts_rank = 4, and the adapters have 3", "lora.targets chooses 0 matrices that have no",
                 'use targets = ["*.attention.wq.weight"', '"*.moe.experts.w2"]'):  # fmt: skip
        assert text in str(error.value)
    without = {"lora.rank": 0, "lora.experts_rank": -1}
    with pytest.raises((ConfigError, world.RankError), match=r"lora.rank = 0 makes none"):
        parity.read(begin(exported, **without), 1)
