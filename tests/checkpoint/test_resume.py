"""Stopping and resuming changes nothing: to the bit under the same mapping, to rounding under any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import parity, world
from tests.checkpoint import runs
from tests.checkpoint.runs import LAST, SAVED
from tests.support.case_features import MODELS
from titanmoe.checkpoint.layout import folder_name, read_manifest

PP = {"parallelism.pp": 4, "model.num_layers": 4, "training.global_batch_size": 8}
FOUR = {"model.num_layers": 4}
ONE = {"model.num_layers": 1}
TWO = {"training.global_batch_size": 2}
ONE_KEY = {"model.num_kv_heads": 1, "model.qkv_bias": True, "model.qk_norm": "full"}  # on every rank of tp
EIGHT = {"training.global_batch_size": 8}  # as many data ranks or microbatches need
BIASED = MODELS["gpt_oss"] | {"model.num_experts": 2, "model.top_k": 2, "model.num_kv_heads": 2}
BIASED |= {"model.num_heads": 4, "model.qk_norm": "full"}
SHARED = {"parallelism.vocab": "pipeline", "model.vocab_size": 49}
V = {"pipeline.schedule": "DualPipeV", "parallelism.pp": 2, "model.num_layers": 4}


def mapping(pp: int = 1, tp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1, **more: Any) -> dict[str, Any]:
    degrees = {"pp": pp, "tp": tp, "cp": cp, "experts.ep": ep, "experts.etp": etp}
    return {f"parallelism.{name}": n for name, n in degrees.items()} | more


def go(size: int, folder: Path, changes: dict[str, Any], until: int = LAST) -> runs.Went:
    return world.run(size, runs.go, str(folder), changes, until, timeout=120)[0]


@pytest.mark.parametrize(
    ("shape", "save"),
    [(mapping(tp=2, ep=4) | ONE, "async"), (mapping(pp=2, cp=2, etp=2), "sync")],
    ids=["tp2-ep4-async", "pp2-cp2-etp2-sync"],
)
def test_the_same_mapping_resumes_to_the_last_bit(tmp_path: Path, shape: dict[str, Any], save: str) -> None:
    shape = shape | TWO | {"checkpoint.save": save}
    shape |= {"training.dtype": "float32", "training.mixed_precision_param": "float32"}
    straight = go(4, tmp_path, shape)
    resumed = go(4, tmp_path, shape)
    assert list(resumed.loss) == list(range(SAVED + 1, LAST + 1))
    assert all(resumed.loss[step] == straight.loss[step] for step in resumed.loss)
    assert all(resumed.norm[step] == straight.norm[step] for step in resumed.norm)
    for name, tensor in straight.state.items():
        assert torch.equal(resumed.state[name], tensor), name


# (ranks and mapping that saved, ranks and mapping that resume). The first four broke other trainers.
CASES = {
    "pp4 to ep4": ((4, mapping(pp=4) | FOUR), (4, mapping(ep=4) | FOUR)),
    "etp4 to ep4": ((4, mapping(etp=4)), (4, mapping(ep=4))),
    "tp2 pp2 etp2 to tp1 pp2 etp2": ((4, mapping(tp=2, pp=2, etp=2)), (4, mapping(pp=2, etp=2))),
    "ep4 to tp4 etp4": ((4, mapping(ep=4) | ONE | ONE_KEY), (4, mapping(tp=4, etp=4) | ONE | ONE_KEY)),
    "a stage without experts": (
        (4, mapping(pp=2, tp=2) | FOUR | {"model.num_dense_layers": 2, "model.dense_hidden": 32}),
        (2, mapping(ep=2) | FOUR | {"model.num_dense_layers": 2, "model.dense_hidden": 32}),
    ),
    "whole experts to sharded ones": ((2, mapping(ep=2) | ONE), (4, mapping(ep=2) | ONE)),
    "sharded experts to whole ones": ((4, mapping(ep=2) | ONE), (2, mapping(ep=2) | ONE)),
    "more data ranks": ((1, mapping()), (4, mapping(ep=2) | {"parallelism.dp_replicate": 2})),
    "fewer ranks": ((4, mapping(tp=2, cp=2, ep=4) | ONE_KEY), (1, mapping() | ONE_KEY)),
    "tied ends of a pipeline to one": (
        (4, mapping(pp=2, ep=2) | {"model.tie_embeddings": True}),
        (4, mapping(tp=2, ep=4) | {"model.tie_embeddings": True}),
    ),
    "one rank to tied ends on one rank of a V": (
        (1, mapping() | FOUR | {"model.tie_embeddings": True}),
        (2, mapping() | V | {"model.tie_embeddings": True}),
    ),
    "multi-token prediction beside an embedding of its own, tied, to a shared one": (
        (4, mapping(pp=2, ep=2) | FOUR | {"model.tie_embeddings": True, "model.mtp_depth": 1}),
        (2, mapping(tp=2, ep=2) | FOUR | {"model.tie_embeddings": True, "model.mtp_depth": 1}),
    ),
    "an odd vocabulary over a pipeline to one on a rank": (
        (8, mapping(pp=2, tp=2) | SHARED | EIGHT | {"model.mtp_depth": 1}),
        (2, mapping(ep=2) | EIGHT | {"model.vocab_size": 49, "model.mtp_depth": 1}),
    ),
    "one rank to a tied vocabulary over a pipeline": (
        (1, mapping() | FOUR | {"model.tie_embeddings": True, "model.vocab_size": 49, "model.mtp_depth": 1}),
        (4, mapping(pp=2, tp=2) | FOUR | {"model.tie_embeddings": True, "model.mtp_depth": 1} | SHARED),
    ),
    "one rank with multi-token prediction to a V": (
        (1, mapping() | FOUR | {"model.mtp_depth": 1}),
        (2, mapping() | V | {"model.mtp_depth": 1}),
    ),
    "V to interleaved, dispatcher": (
        (4, mapping(ep=2) | V | EIGHT),
        (4, mapping(cp=2, etp=2) | V | EIGHT | {"pipeline.schedule": "Interleaved1F1B", "moe.dispatcher": "allgather"}),
    ),
    "model dim of experts to their number": (
        (8, mapping(ep=2) | {"model.num_experts": 4, "training.global_batch_size": 8}),
        (4, mapping(ep=4) | {"model.num_experts": 4, "training.global_batch_size": 8}),
    ),
    "biases sliced over data ranks and etp, few sinks, a norm over all heads": (
        (8, mapping(tp=2, ep=2, etp=2) | BIASED),
        (2, mapping(tp=2) | BIASED),
    ),
    "full-sequence dropping": (
        (4, mapping(tp=4, ep=4) | {"moe.capacity_factor": 1.0, "moe.capacity_scope": "full_sequence"}),
        (4, mapping(cp=2, etp=2) | {"moe.capacity_factor": 1.0, "moe.capacity_scope": "full_sequence"}),
    ),
}


RARE = (
    "etp4 to ep4",
    "tp2 pp2 etp2 to tp1 pp2 etp2",
    "more data ranks",
    "full-sequence dropping",
    "V to interleaved, dispatcher",
    "one rank to tied ends on one rank of a V",
    "one rank with multi-token prediction to a V",
    "multi-token prediction beside an embedding of its own, tied, to a shared one",
    "model dim of experts to their number",
    "biases sliced over data ranks and etp, few sinks, a norm over all heads",
)


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in RARE)) for name, case in CASES.items()],
)
def test_any_mapping_resumes_under_any_other(tmp_path: Path, before: Any, after: Any) -> None:
    straight = go(*before_folder(before, tmp_path))
    resumed = go(after[0], tmp_path, after[1] | {"checkpoint.load": str(SAVED)})
    assert list(resumed.loss) == list(range(SAVED + 1, LAST + 1))
    for step in resumed.loss:
        assert resumed.loss[step] == pytest.approx(straight.loss[step], rel=1e-10), step
        assert resumed.norm[step] == pytest.approx(straight.norm[step], rel=1e-9), step
    worst, name = parity.worst_error(resumed.state, straight.state)
    assert worst < 1e-9, (worst, name)
    assert resumed.loader == straight.loader


def before_folder(before: Any, folder: Path) -> tuple[int, Path, dict[str, Any]]:
    return before[0], folder, before[1]


def test_float32_agrees_at_the_first_step(tmp_path: Path) -> None:
    single = {"training.dtype": "float32", "training.mixed_precision_param": "float32"}
    straight = go(4, tmp_path, mapping(pp=2, ep=2) | single)
    resumed = go(8, tmp_path, mapping(tp=2, etp=4) | single | {"checkpoint.load": str(SAVED)}, until=SAVED + 1)
    assert resumed.loss[SAVED + 1] == pytest.approx(straight.loss[SAVED + 1], rel=1e-5)
    assert resumed.norm[SAVED + 1] == pytest.approx(straight.norm[SAVED + 1], rel=1e-4)


def test_whole_experts_are_in_the_files_as_fsdp_would_put_them(tmp_path: Path) -> None:
    """edp = 1, with a replica; "always" leaves them to FSDP."""
    sums = []
    for choice in ("auto", "always"):
        mixed = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
        mixed |= {"parallelism.dp_replicate": 2, "parallelism.reshard_after_forward": choice}
        go(4, tmp_path / choice, mapping(ep=2) | ONE | mixed | {"training.steps": 1}, until=1)
        files = read_manifest(tmp_path / choice / f"run/checkpoints/{folder_name(1)}").files
        sums.append({name: (file.bytes, name == "tensors.json" and file.crc32) for name, file in files.items()})
    assert sums[0] == sums[1]


def test_without_its_moments_a_run_would_diverge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: with weights alone it is a different run from the second step on."""
    straight = go(2, tmp_path, mapping(ep=2) | ONE)
    bare = mapping(ep=2) | ONE
    bare |= {
        "checkpoint.load": str(tmp_path / "run/checkpoints/step-00000001"),
        "checkpoint.model_only": True,
        "checkpoint.enable": False,
    }
    fresh = go(2, tmp_path / "other", bare, until=2)
    assert list(fresh.loss) == [1, 2]
    assert fresh.notes["begins from"].startswith("weights of")
    assert not any(torch.equal(fresh.state[name], straight.state[name]) for name in straight.state if "exp_avg" in name)


def test_what_changed_is_reported(tmp_path: Path) -> None:
    shape = mapping(ep=2) | ONE | {"moe.aux_loss": 0.01}
    go(2, tmp_path, shape, until=SAVED)
    notes = go(4, tmp_path, shape | {"optimizer.lr": 0.02}, until=SAVED + 1).notes
    assert "step-00000001" in notes["begins from"]
    assert "optimizer.lr: 0.01 -> 0.02" in notes["changed since"]
    assert "parallelism.dp_shard: 2 -> 4" in notes["changed since"]
    assert "other microbatches than before for aux_loss (" in notes["changed since"]
    assert "learning rate, which had come to 0.01, rises to 0.0195 here" in notes["changed since"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank, with a checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    go(1, folder, mapping() | ONE, until=SAVED)
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.dim": 32}, ["model.dim is 32 and was 16"]),
        (
            {"model.vocab_size": 64, "model.num_experts": 16},
            ["vocab_size is 64 and was 48", "num_experts is 16 and was 8"],
        ),
        ({"training.seed": 1}, ["training.seed was 0", "is 1 now"]),
        ({"training.seq_len": 32}, ["training.seq_len was 16"]),
    ],
)
def test_what_cannot_change_is_refused(saved: Path, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(world.RankError) as refused:
        go(1, saved, mapping() | ONE | change)
    for word in words:
        assert word in str(refused.value)


def test_another_optimizer_begins_from_the_weights_alone(saved: Path, tmp_path: Path) -> None:
    still = mapping() | ONE | {"optimizer.name": "tests.checkpoint.runs:Still", "optimizer.eps": 1e-8}
    with pytest.raises(world.RankError) as refused:
        go(1, saved, still)
    path = saved / f"run/checkpoints/step-{SAVED:08}"
    assert (
        'optimizer.name = "tests.checkpoint.runs:Still" cannot go on from the moments of "adamw", which the checkpoint '
        'has: set optimizer.name = "adamw", or begin a run of another job.name from its weights, with checkpoint.load '
        f'= "{path}" and checkpoint.model_only = true'
    ) in str(refused.value)
    there = {"checkpoint.load": str(path), "checkpoint.model_only": True, "checkpoint.enable": False}
    weights, stepped = go(1, saved, mapping() | ONE, until=SAVED).state, go(1, tmp_path, still | there, until=1)
    assert list(stepped.loss) == [1] and stepped.state
    assert all(torch.equal(tensor, weights[name]) for name, tensor in stepped.state.items() if "bias" not in name)


def test_a_derived_batch_stays_what_it_was(tmp_path: Path) -> None:
    from titanmoe.config import ConfigError

    derived = ONE | {"training.global_batch_size": -1, "job.dump_folder": str(tmp_path)}
    go(4, tmp_path, mapping() | derived, until=SAVED)
    assert parity.read(runs.RUN | derived | mapping(), 2).training.global_batch_size == 4
    with pytest.raises(ConfigError, match="global_batch_size"):
        parity.read(runs.RUN | derived | mapping(), 8)
