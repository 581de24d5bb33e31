"""[model] hf = FOLDER, from a folder that transformers wrote to a run, and to a run that no longer has it."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint_hf import models
from tests.support import processes
from titanmoe.checkpoint.hf import config_json as configs
from titanmoe.checkpoint.hf.huggingface_source import open_hf
from titanmoe.cli import main
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, load, to_toml
from titanmoe.config.schema import Model, MoE
from titanmoe.data.open_documents import open_documents
from titanmoe.moe.balance_losses.aux_losses import AuxLoss
from titanmoe.moe.balance_losses.balance_loss import RouterOutput
from titanmoe.tokens import Tokens

ROOT = Path(__file__).parents[2]


def save(folder, name="qwen3_moe", tokenizer=False, **changes):
    models.save(models.make(name, **changes), folder)
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return folder


def read(*words):
    return load(list(map(str, words)), COMPONENTS, lambda config: [])


def problems(*words):
    with pytest.raises(ConfigError) as caught:
        read(*words)
    return caught.value.problems


# ---- what is taken over


@pytest.mark.parametrize("name", models.FAMILIES)
def test_the_model_is_that_of_its_config_json(tmp_path, name):
    folder = save(tmp_path / "model", name)
    config = read("--model.hf", folder)
    assert config.model == configs.describe_folder(folder).model
    assert config.checkpoint.initial_hf == str(folder)
    assert (config.data.tokenizer, config.moe.aux_loss) == (str(folder), 0.0)


def test_the_tokenizer_is_the_folders_unless_the_recipe_names_one(tmp_path):
    folder = save(tmp_path / "model", tokenizer=True)
    assert read("--model.hf", folder).data.tokenizer == str(folder)
    assert read("--model.hf", folder, "--data.tokenizer", "bytes").data.tokenizer == "bytes"


def test_text_is_refused_if_the_model_has_no_tokenizer_but_not_shards_of_bytes(tmp_path):
    folder, text, shards = save(tmp_path / "model", vocab_size=320), tmp_path / "text.txt", tmp_path / "shards"
    text.write_text("One line of text.\n" * 9)
    words = "--data.source", "files", "--data.paths", [str(text)], "--job.dump_folder", tmp_path
    config = read("--model.hf", folder, *words)
    with pytest.raises(ConfigError, match=r"there is no file .*model/tokenizer\.json: set data\.tokenizer"):
        open_documents(config, str(text))
    assert main(["tokenize", str(text), "--out", str(shards), "--workers", "1"]) == 0
    documents = open_documents(config, str(shards))
    assert documents.stored_tokenizer.open(config.data.tokenizer).identity == "bytes"


def test_weights_are_random_if_the_recipe_says_so(tmp_path):
    folder = save(tmp_path / "model")
    config = read("--model.hf", folder, "--checkpoint.initial_hf", "")
    assert config.checkpoint.initial_hf == "" and config.model.num_experts == 8


def test_the_block_of_multi_token_prediction_is_the_recipes_choice(tmp_path):
    folder = save(tmp_path / "model", "deepseek_v3")
    without, with_mtp = (read("--model.hf", folder, "--model.mtp_depth", depth).model for depth in (0, 1))
    assert read("--model.hf", folder).model == without
    assert (without.mtp_depth, without.mtp_after_norm) == (0, False)
    assert (with_mtp.mtp_depth, with_mtp.mtp_after_norm) == (1, True)
    before = read("--model.hf", folder, "--model.mtp_depth", 1, "--model.mtp_after_norm", "false").model
    assert before == dataclasses.replace(with_mtp, mtp_after_norm=False)


def test_what_is_printed_loads_back_without_the_folder(tmp_path):
    folder = save(tmp_path / "model", output_router_logits=True)
    config = read("--model.hf", folder, "--model.rope_theta", 5e5, "--model.change", "rope_theta")
    (tmp_path / "printed.toml").write_text(to_toml(config))
    folder.rename(tmp_path / "elsewhere")
    assert read("--config", tmp_path / "printed.toml") == config


# ---- what is refused


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    (problem,) = problems("--model.hf", tmp_path / "none")
    place = f"{tmp_path / 'none'}, which is not a folder"
    assert problem == f"command line: no config.json in {place}: name the folder of a Hugging Face model"


def test_all_that_contradicts_the_file_is_refused(tmp_path):
    folder = save(tmp_path / "model", output_router_logits=True)
    wrong = ["--model.rope_theta", 5e5, "--model.top_k", 2, "--model.norm_topk", "false", "--moe.aux_loss", 0.01]
    says = [problem.partition(", but ")[2].partition(":")[0] for problem in problems("--model.hf", folder, *wrong)]
    assert says == [f"{folder}/config.json says {value}" for value in ("10000.0", "3", "true", "0.0015")]


@pytest.mark.parametrize("field, value", [("rope_theta", 5e5), ("top_k", 2), ("norm_topk", False)])
def test_first_weights_of_a_model_that_computes_something_else_are_refused_unless_listed(tmp_path, field, value):
    folder = save(tmp_path / "model")
    model = dataclasses.replace(configs.describe_folder(folder).model, **{field: value})
    with pytest.raises(
        ConfigError, match=rf"model.{field} = {value}, but .* use that, or list '{field}' in model.change"
    ):
        open_hf(folder, model).check()
    source = open_hf(folder, dataclasses.replace(model, change=[field]))
    source.check()
    assert any(note.startswith(f"model.{field} = {value}") for note in source.notes)


def test_a_listed_field_that_the_weights_do_not_fit_is_refused(tmp_path):
    folder = save(tmp_path / "model")
    model = dataclasses.replace(configs.describe_folder(folder).model, num_experts=16, change=["num_experts"])
    with pytest.raises(ConfigError, match=r"model.num_experts = 16, but .* gives 8: use that$"):
        open_hf(folder, model).check()


# ---- the balance loss


# MiniMax-M2's is over softmax scores that its router does not use, so it has none that is ours.
WITHOUT_AUX = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2")
AUX_FAMILIES = [name for name in models.FAMILIES if name not in WITHOUT_AUX]


def aux_loss(logits_TE: Tensor, top_k: int) -> Tensor:
    """The term of a layer, for one sample."""
    T, E = logits_TE.shape
    index_T = torch.arange(T)
    tokens = Tokens(index_T[None], index_T, index_T * 0, torch.ones(T, dtype=torch.bool), torch.tensor(0))
    scores_TE = logits_TE.softmax(-1)
    count_1E = torch.bincount(scores_TE.topk(top_k).indices.flatten(), minlength=E)[None]
    loss = AuxLoss(Model(num_experts=E, top_k=top_k), MoE(), 1)
    return loss(
        RouterOutput(
            logits_TE, scores_TE, count_1E, tokens, torch.tensor(T), torch.tensor(1), False, NO_GROUP, NO_GROUP
        )
    )


@pytest.mark.parametrize("name", AUX_FAMILIES)
def test_the_balance_loss_is_transformers_own_where_one_layer_has_experts(tmp_path, name):
    """Value and gradient, against what its model adds to its loss."""
    changes = {"mlp_only_layers": [0]} if name == "qwen2_moe" else {"num_hidden_layers": 1}
    changes |= {"layer_types": ["full_attention"]} if name in ("qwen3_next", "qwen3_5_moe") else {}
    changes |= {"mlp_only_layers": []} if name == "qwen3_next" else {}
    model = models.make(name, **changes, output_router_logits=True, router_aux_loss_coef=0.3)
    parsed = configs.describe_folder(models.save(model, tmp_path / "model"))
    ids_BL = models.ids(samples=1)
    out = model(ids_BL, labels=ids_BL)
    (router_TE,) = (logits for logits in out.router_logits if logits is not None)
    theirs = 0.3 * out.aux_loss
    torch.testing.assert_close(out.loss - theirs, model(ids_BL, labels=ids_BL, output_router_logits=False).loss)
    grad_TE = torch.autograd.grad(theirs, router_TE)[0]
    logits_TE = router_TE.detach().double().requires_grad_()
    ours = parsed.aux_loss * aux_loss(logits_TE, parsed.model.top_k)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    torch.testing.assert_close(torch.autograd.grad(ours, logits_TE)[0].float(), grad_TE, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("layers, top_k", [(2, 3), (5, 2)])
def test_over_layers_the_balance_losses_are_equal_where_loads_are(tmp_path, layers, top_k):
    """Theirs is joint over layers, so that equal layers count once; ours adds them up."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model = models.make("qwen3_moe", num_hidden_layers=layers, num_experts_per_tok=top_k, output_router_logits=True)
    parsed = configs.describe_folder(models.save(model, tmp_path / "model"))
    generator = torch.Generator().manual_seed(0)
    for logits_TE in (torch.randn(64, 8, generator=generator), torch.eye(8).repeat(8, 1) * 1e-6):
        theirs = 0.001 * load_balancing_loss_func((logits_TE,) * layers, 8, top_k)
        ours = parsed.aux_loss * sum(aux_loss(logits_TE, top_k) for _ in range(layers))
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert parsed.aux_loss == pytest.approx(0.001 * top_k / layers)


def test_the_balance_loss_follows_the_file(tmp_path):
    folder = save(tmp_path / "model", router_aux_loss_coef=0.2)
    said = json.loads((folder / "config.json").read_text())

    def coefficient(**changes):
        kept = {key: value for key, value in (said | changes).items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))
        return read("--model.hf", folder).moe.aux_loss

    assert coefficient() == coefficient(output_router_logits=None) == 0  # off
    assert read("--model.hf", folder, "--moe.aux_loss", 0.01).moe.aux_loss == 0.01  # then the recipe's own choice
    assert coefficient(output_router_logits=True) == pytest.approx(0.2 * 3 / 2)
    assert coefficient(output_router_logits=True, router_aux_loss_coef=None) == pytest.approx(0.001 * 3 / 2)
    with pytest.raises(ConfigError, match="has router_aux_loss_coef = 'much': write a number"):
        coefficient(output_router_logits=True, router_aux_loss_coef="much")


@pytest.mark.parametrize("name", WITHOUT_AUX)
def test_a_model_to_which_transformers_adds_no_balance_loss_has_none(name, tmp_path):
    folder = save(tmp_path / "model", name, output_router_logits=True)
    assert configs.describe_folder(folder).aux_loss is None and read("--model.hf", folder).moe.aux_loss == 0


# ---- commands


RUN = """
[model]
hf = "model"
[data]
source = "synthetic"
[training]
steps = 1
seq_len = 32
mixed_precision_param = "float32"
device = "cpu"
[metrics]
tensorboard = false
"""


def test_a_run_begins_from_the_folder_and_goes_on_without_it(tmp_path):
    save(tmp_path / "model")
    (tmp_path / "run.toml").write_text(RUN)
    words = [ROOT / "train.py", "--config", "run.toml"]
    first = processes.run(words, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "weights of model" in first.stdout
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    again = processes.run([*words, "--training.steps", "2"], cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "step 2/2" in again.stdout
    manifest = json.loads((tmp_path / "runs/run/checkpoints/step-00000002/manifest.json").read_text())
    model = Model(**manifest["record"]["config"]["model"])
    assert model == configs.describe_folder(tmp_path / "elsewhere").model
    wrong = processes.run([*words, "--training.steps", "3", "--model.top_k", "2"], cwd=tmp_path)
    assert wrong.returncode == 2 and "manifest.json says 3: leave it out" in wrong.stderr
    assert main(["convert", "--to-hf", str(tmp_path / "runs/run"), str(tmp_path / "out")]) == 0
    assert configs.describe_folder(tmp_path / "out").model == model
    other = processes.run([*words, "--job.name", "other"], cwd=tmp_path)
    assert other.returncode == 2 and "no config.json in model" in other.stderr


@pytest.mark.parametrize("command", ["fold", "plan", "rehearse"])
def test_commands_on_a_recipe_take_one(tmp_path, monkeypatch, capsys, command):
    """With the answer that they give for its sizes written out."""
    save(tmp_path / "model")
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resolved").mkdir()
    (tmp_path / "resolved/run.toml").write_text(to_toml(read("--config", "run.toml")))
    outputs = []
    for folder in (tmp_path, tmp_path / "resolved"):
        monkeypatch.chdir(folder)
        capsys.readouterr()
        assert main([command, "run.toml", "--ranks", "2"]) == 0
        outputs.append(re.sub(r"in [\d.]+ s\b", "", capsys.readouterr().out))
    assert outputs[0] == outputs[1] and len(outputs[0]) > 200


@pytest.mark.parametrize("name", models.FAMILIES)
def test_the_recipe_that_convert_describes_loads(tmp_path, capsys, name):
    folder = save(tmp_path / "model", name, tokenizer=name == "mixtral", output_router_logits=True)
    assert main(["convert", "--describe", str(folder)]) == 0
    (tmp_path / "new.toml").write_text(text := capsys.readouterr().out)
    config = read("--config", tmp_path / "new.toml")
    assert config.model == configs.describe_folder(folder).model and config.checkpoint.initial_hf == str(folder)
    assert f'# family = "{config.model.family}"\n' in text and "fill in" in text
    assert f"# num_heads = {config.model.num_heads}\n" in text
    assert ("# moe.aux_loss = " in text) == (name not in WITHOUT_AUX)
    assert ("# Tokenizer: its own." in text) == (name == "mixtral")


def test_the_recipes_of_the_page_load(tmp_path):
    folder = save(tmp_path / "model")
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/huggingface.md").read_text(), re.DOTALL)
    configs_read = []
    for block in blocks:
        (tmp_path / "page.toml").write_text(block.replace("Qwen/Qwen3-30B-A3B", str(folder)))
        configs_read.append(read("--config", tmp_path / "page.toml"))
    plain, longer = configs_read
    assert plain.checkpoint.initial_hf == longer.checkpoint.initial_hf == str(folder)
    assert (plain.model.rope_scaling, longer.model.rope_scaling, longer.model.rope_factor) == ("none", "yarn", 4.0)
    open_hf(folder, longer.model).check()


def test_describe_makes_no_folder_and_the_rest_of_convert_needs_one(tmp_path, capsys):
    assert main(["convert", "--describe", "a", "b"]) == main(["convert", "--from-hf", "a"]) == 2
    said = capsys.readouterr().err
    assert "--describe prints a recipe and makes no folder: leave b out" in said and "OUT is missing" in said
