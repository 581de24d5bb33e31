"""A live export gives what `titanmoe convert --to-hf` makes from a checkpoint, on the ranks that ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import world
from tests.checkpoint.test_resume import mapping
from tests.checkpoint_hf import live
from tests.checkpoint_hf.test_convert import convert, equal
from tests.support.case_features import TRAINED

FLOAT32 = {"training.dtype": "float32", "training.mixed_precision_param": "float32"}
INTERLEAVED = {"parallelism.pp": 2, "pipeline.schedule": "Interleaved1F1B"}


def family(name: str, **changes: Any) -> dict[str, Any]:
    return {"model.family": name, "model.size": "debug"} | changes


CASES: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    "experts one by one": (mapping(pp=2, ep=2) | family("mixtral"), False, {"block_bytes": 60_000}),
    "rows in pairs, a bias, to two ranks": (
        mapping(tp=2, etp=2) | family("deepseek_v3") | INTERLEAVED,
        True,
        {"ranks": (1, 3)},
    ),
    "gate and up side by side, in bfloat16, to all": (
        mapping(ep=2) | family("gpt_oss") | FLOAT32,
        False,
        {"ranks": None, "dtype": torch.bfloat16},
    ),
    "fused rows, tied": (
        mapping(tp=2, ep=4) | family("qwen3_next", **{"model.tie_embeddings": True}),
        False,
        {"block_bytes": 200_000},
    ),
}


@pytest.mark.parametrize(("changes", "has_bias", "options"), CASES.values(), ids=CASES)
def test_it_is_what_a_conversion_of_the_checkpoint_gives(
    changes: dict[str, Any], has_bias: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    exported = world.run(4, export, str(tmp_path / "saved"), changes, has_bias, options)
    words = ("--dtype", "bfloat16") if "dtype" in options else ()
    assert convert("--to-hf", tmp_path / "saved", tmp_path / "out", *words) == 0
    wanted = load_file(tmp_path / "out/model.safetensors")
    for rank, pairs in enumerate(exported):
        assert [name for name, _ in pairs] == [name for name, _ in exported[0]], "one order"
        if rank in (range(4) if options.get("ranks", (0,)) is None else options.get("ranks", (0,))):
            equal(dict(pairs), wanted)
        else:
            assert all(tensor is None for _, tensor in pairs)


def export(folder: str, changes: dict[str, Any], has_bias: bool, options: dict[str, Any]) -> Any:
    return live.export(folder, changes, has_bias, **options)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_vocabulary_over_the_pipeline_is_exported_as_one_over_tp(tied: bool, tmp_path: Path) -> None:
    odd = family("qwen3_moe", **{"model.vocab_size": 49, "model.tie_embeddings": tied, "parallelism.pp": 2})
    shared = odd | {"parallelism.tp": 2, "parallelism.vocab": "pipeline"}
    files = []
    for name, changes in {"shared": shared, "alone": odd}.items():
        live_tensors = dict(world.run(4, export, str(tmp_path / name), changes, False, {})[0])
        assert convert("--to-hf", tmp_path / name, tmp_path / f"{name}_out") == 0
        files.append((tmp_path / f"{name}_out/model.safetensors").read_bytes())
        equal(live_tensors, load_file(tmp_path / f"{name}_out/model.safetensors"))
        assert live_tensors["model.embed_tokens.weight"].shape[0] == 49
    assert files[0] == files[1]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_adapters_are_merged(name: str, tmp_path: Path) -> None:
    changes = mapping(pp=2, ep=2) | family(name) | TRAINED["adapters"]
    exported = dict(world.run(4, live.merge, str(tmp_path), changes)[0])
    merged = tmp_path / "adapters", tmp_path / "merged", "--base", tmp_path / "base"
    assert convert("--to-hf", *merged) == 0 and convert("--to-hf", tmp_path / "base", tmp_path / "plain") == 0
    wanted, base = (load_file(tmp_path / out / "model.safetensors") for out in ("merged", "plain"))
    assert exported.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert exported[key].dtype == tensor.dtype == torch.float64
        assert (exported[key] - tensor).abs().max() <= 1e-10 * tensor.abs().max(), key
    assert sum(not torch.equal(base[key], tensor) for key, tensor in wanted.items()) > 10


def test_a_bias_without_a_place_is_refused_on_all_ranks() -> None:
    texts = world.run(4, live.refused, mapping(pp=2, ep=2) | family("mixtral"))
    assert len(set(texts)) == 1
    assert "layers.3.moe.router.expert_bias is not zero, and mixtral models have no such bias" in texts[0]
