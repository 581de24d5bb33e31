"""A dense model given experts computes what transformers' dense model computes."""

import pytest
import torch

from tests import world
from tests.checkpoint_hf import models, ours
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.cli import main

# experts, top_k, granularity: copies; pieces of several copies; a small version of the paper's E8G8T8
SETTINGS = [(4, 2, 1), (8, 4, 2), (16, 8, 8)]


def upcycle(folder, out, experts, top_k, granularity, *more):
    words = ("--experts", experts, "--top-k", top_k, "--granularity", granularity, *more)
    return main(["convert", "--upcycle", *map(str, (folder, out, *words))])


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    cache = {}

    def get(name):
        if name not in cache:
            model = models.make(name)
            folder = models.save(model, tmp_path_factory.mktemp(name))
            cache[name] = folder, models.logits(model, models.ids())
        return cache[name]

    return get


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "e{}-t{}-g{}".format(*s))
@pytest.mark.parametrize("name", models.DENSE)
def test_logits_are_the_dense_ones(dense, tmp_path, name, setting):
    folder, want = dense(name)
    assert upcycle(folder, tmp_path / "out", *setting) == 0
    got = ours.whole(world.run(1, ours.logits, str(tmp_path / "out"), models.ids(), {}, {}), models.ids())
    assert want.std() > 0.1
    models.close(got, want)


@pytest.mark.parametrize("name, kind", [("llama", "MixtralForCausalLM"), ("qwen3", "Qwen3MoeForCausalLM")])
def test_transformers_runs_what_was_upcycled(dense, tmp_path, name, kind):
    folder, want = dense(name)
    assert upcycle(folder, tmp_path / "ours", 16, 8, 8) == 0
    assert main(["convert", "--to-hf", str(tmp_path / "ours"), str(tmp_path / "out")]) == 0
    model = getattr(models.transformers, kind).from_pretrained(tmp_path / "out").eval()
    assert model.config.num_experts_per_tok == 8 and model.config.eos_token_id == 2
    models.close(models.logits(model, models.ids()), want)


def test_routers_are_equal_for_the_pieces_of_a_copy_and_random_otherwise(dense, tmp_path):
    folder, _ = dense("llama")
    read = {}
    for seed in (0, 0, 1):
        out = tmp_path / f"{len(read)}"
        assert upcycle(folder, out, 16, 8, 4, "--seed", seed) == 0
        read[out.name] = Checkpoint(out).read("model.layers.1.moe.router.weight").unflatten(0, (4, 4))
    again, other = read["1"], read["2"]
    assert torch.equal(read["0"], again) and not torch.equal(again, other)
    assert torch.equal(again, again[:, :1].expand_as(again))
    assert len(again[:, 0].unique(dim=0)) == 4
    assert again.std().item() == pytest.approx(0.02, rel=0.3)


def test_bfloat16_is_split_and_scaled_without_rounding(tmp_path):
    folder = models.save(models.make("llama", torch.bfloat16), tmp_path / "in")
    assert upcycle(folder, tmp_path / "out", 8, 4, 4) == 0
    dense, saved = models.tensors(folder), Checkpoint(tmp_path / "out")
    down = saved.read("model.layers.0.moe.experts.w2")
    assert down.dtype == torch.bfloat16
    whole = torch.cat(down[4:].unbind(), 1).float() / 4
    assert torch.equal(whole, dense["model.layers.0.mlp.down_proj.weight"].float())


@pytest.mark.parametrize(
    "setting, reasons",
    [
        ((8, 3, 2), ["--top-k = 3 is not a multiple of --granularity = 2", "use 4"]),
        ((9, 2, 2), ["--experts = 9 is not a multiple", "use 10"]),
        ((6, 3, 3), ["--granularity = 3 is not a power of two"]),
        ((256, 128, 128), ["64 % 128 = 64"]),
        ((8, 1, 1), ["top_k = 1", "the router has no gradient"]),
        ((2, 4, 1), ["top_k = 4 exceeds"]),
        ((0, 2, 1), ["--experts = 0"]),
    ],
)
def test_settings_that_cannot_be_equal_are_refused(dense, tmp_path, capsys, setting, reasons):
    assert upcycle(dense("llama")[0], tmp_path / "out", *setting) == 2
    printed = capsys.readouterr().err
    assert all(reason in printed for reason in reasons), printed
    assert not (tmp_path / "out").exists()


def test_qwen2_with_experts_has_no_transformers_model(dense, tmp_path, capsys):
    assert upcycle(dense("qwen2")[0], tmp_path / "ours", 4, 2, 1) == 0
    assert main(["convert", "--to-hf", str(tmp_path / "ours"), str(tmp_path / "out")]) == 2
    assert "model.shared_hidden = 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
