"""Read from a Hugging Face folder, a model computes what transformers computes; on one rank and folded."""

import pytest
import torch

from tests import world
from tests.checkpoint_hf import models, ours

FOLDED = [
    ("mixtral", dict(dp_replicate=2, cp=2), dict(etp=4)),
    ("qwen2_moe", dict(tp=2), dict(ep=2, etp=2)),
    ("qwen3_moe", dict(tp=2, cp=2), dict(ep=4)),
    ("olmoe", dict(tp=4), dict(ep=2)),
    ("deepseek_v3", dict(tp=2, cp=2, cp_kind="ulysses"), dict(ep=2, etp=2)),
    ("gpt_oss", dict(tp=2, cp=2), dict(ep=2, etp=2)),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder and logits by family."""
    made = {}

    def get(name):
        if name not in made:
            model = models.make(name)
            folder = models.save(model, tmp_path_factory.mktemp(name))
            made[name] = str(folder), models.logits(model, models.ids())
        return made[name]

    return get


@pytest.mark.parametrize("name", models.FAMILIES)
def test_logits_of_every_family(folders, name):
    folder, want = folders(name)
    got = ours.whole(world.run(1, ours.logits, folder, models.ids(), {}, {}), models.ids())
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name, degrees, experts", FOLDED, ids=[name for name, *_ in FOLDED])
def test_logits_of_a_folded_model(folders, name, degrees, experts):
    folder, want = folders(name)
    got = ours.whole(world.run(4, ours.logits, folder, models.ids(), degrees, experts), models.ids())
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
