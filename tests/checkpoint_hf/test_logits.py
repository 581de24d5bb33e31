"""Read from a Hugging Face folder, a model computes what transformers computes; on one rank and folded."""

import re
from pathlib import Path

import pytest
import torch

from tests import world
from tests.checkpoint_hf import models, ours

ROOT = Path(__file__).parents[2]
FOLDED = [
    ("mixtral", dict(dp_replicate=2, cp=2), dict(etp=4)),
    ("qwen2_moe", dict(tp=2), dict(ep=2, etp=2)),
    ("qwen3_moe", dict(tp=2, cp=2), dict(ep=4)),
    ("olmoe", dict(tp=4), dict(ep=2)),
    ("deepseek_v3", dict(tp=2, cp=2, cp_kind="ulysses"), dict(ep=2, etp=2)),
    ("glm4_moe", dict(tp=4), dict(ep=4)),
    ("glm4_moe_lite", dict(tp=2, cp=2), dict(ep=4)),
    ("qwen3_next", dict(tp=4), dict(ep=2, etp=2)),
    ("qwen3_5_moe", dict(tp=2, cp=2), dict(ep=4)),
    ("minimax_m2", dict(tp=4), dict(ep=2, etp=2)),
    ("gpt_oss", dict(tp=2, cp=2), dict(ep=2, etp=2)),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder and logits by family."""
    cache = {}

    def get(name):
        if name not in cache:
            model = models.make(name)
            folder = models.save(model, tmp_path_factory.mktemp(name))
            cache[name] = str(folder), models.logits(model, models.ids())
        return cache[name]

    return get


@pytest.mark.parametrize("name", models.FAMILIES)
def test_logits_of_every_family(folders, name):
    folder, want = folders(name)
    got = ours.whole(world.run(1, ours.logits, folder, models.ids(), {}, {}), models.ids())
    assert want.std() > 0.1
    models.close(got, want, models.enlarged(name))


@pytest.mark.parametrize("name, degrees, experts", FOLDED, ids=[name for name, *_ in FOLDED])
def test_logits_of_a_folded_model(folders, name, degrees, experts):
    folder, want = folders(name)
    got = ours.whole(world.run(4, ours.logits, folder, models.ids(), degrees, experts), models.ids())
    models.close(got, want, models.enlarged(name))


def test_the_page_reads_what_it_says(folders):
    folder, _ = folders("qwen3_moe")
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "huggingface.md").read_text(), re.DOTALL)
    names = {"folder": Path(folder)}
    exec(code, names)
    hf_tensors = models.tensors(Path(folder))
    want = [hf_tensors[f"model.layers.0.mlp.experts.{expert}.gate_proj.weight"] for expert in (4, 5)]
    assert torch.equal(names["two"], torch.stack(want))
