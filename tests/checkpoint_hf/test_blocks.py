"""Conversions hold blocks of tensors, never a stack of experts: the bytes they write, and the memory they take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.bench.convert import growth, make_adapters, make_folder, one_expert
from tests.checkpoint_hf import adapted, models
from titanmoe.checkpoint import move_in_blocks, write_tensors
from titanmoe.checkpoint.checkpoint_folder import Checkpoint
from titanmoe.checkpoint.hf import safetensors_folder
from titanmoe.checkpoint.hf.safetensors_folder import Shape
from titanmoe.cli import main
from titanmoe.config.schema import Model
from titanmoe.models.families import preset


@pytest.mark.parametrize(
    ("shape", "most", "sizes"),
    [
        ((3, 4, 5), 60, [(3, 4, 5)]),
        ((3, 4, 5), 40, [(2, 4, 5), (1, 4, 5)]),
        ((3, 4, 5), 19, [(1, 3, 5), (1, 1, 5)] * 3),
        ((3, 4, 5), 1, [(1, 1, 5)] * 12),
        ((7,), 3, [(3,), (3,), (1,)]),
        ((), 1, [()]),
        ((3, 0), 1, []),
    ],
)
def test_blocks_make_up_a_tensor_in_order(shape: Shape, most: int, sizes: list[Shape]) -> None:
    cut = list(move_in_blocks.split_into_blocks((0,) * len(shape), shape, 1, most))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    numbers = [number for at in cut for number in whole[move_in_blocks.block_slices(*at)].flatten().tolist()]
    assert [size for _, size in cut] == sizes and numbers == whole.flatten().tolist()


def convert(out: Path, *words: object) -> bytes:
    """The weights' file, or all of a checkpoint's numbers."""
    assert main(["convert", *map(str, words), str(out), "--overwrite"]) == 0
    if "--to-hf" in words:
        return (out / "model.safetensors").read_bytes()
    saved = Checkpoint(out)
    return b"".join(saved.read(name).view(torch.uint8).numpy().tobytes() for name in sorted(saved.tensors))


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_small_blocks_make_the_same_bytes(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models.save(models.make(family), tmp_path / "in")
    adapted.write(tmp_path / "adapters", folder)
    conversions = {"ours": ("--from-hf", folder), "theirs": ("--to-hf", tmp_path / "ours")}
    whole = [convert(tmp_path / out, *words) for out, words in conversions.items()]
    convert(tmp_path / "merged", "--to-hf", tmp_path / "adapters")
    for module, name, size in (
        (safetensors_folder, "WRITE_BLOCK_BYTES", 2000),
        (write_tensors, "WRITE_BLOCK_BYTES", 2000),
        (move_in_blocks, "COPY_BLOCK_BYTES", 700),
    ):
        monkeypatch.setattr(module, name, size)
    assert [convert(tmp_path / out, *words) for out, words in conversions.items()] == whole
    stored = Checkpoint(tmp_path / "ours").stored["model.layers.1.moe.experts.w1"]
    assert len(stored.blocks) > stored.shape[0]
    # a product of few rows is rounded otherwise
    convert(tmp_path / "again", "--to-hf", tmp_path / "adapters")
    torch.testing.assert_close(models.tensors(tmp_path / "again"), models.tensors(tmp_path / "merged"))


def test_memory_does_not_grow_with_the_number_of_experts(tmp_path: Path) -> None:
    model = replace(Model(**preset("mixtral", "debug")), dim=512, expert_hidden=1024, num_experts=40, num_layers=1)
    limit, stack = 1.5 * one_expert(model) + move_in_blocks.WRITE_BLOCK_BYTES, one_expert(model) / 3 * model.num_experts
    folder, ours = make_folder(tmp_path / "in", model), tmp_path / "ours"
    make_adapters(tmp_path / "adapters", folder)
    conversions = {
        "in": ("--from-hf", folder, ours),
        "out": ("--to-hf", ours, tmp_path / "theirs"),
        "merged": ("--to-hf", tmp_path / "adapters", tmp_path / "merged"),
    }
    grown = dict(zip(conversions, growth(*conversions.values()), strict=True))
    assert {what: n for what, n in grown.items() if not n < limit < stack} == {}


def test_a_planned_tensor_that_is_not_written_is_named(tmp_path: Path) -> None:
    plan = dict.fromkeys(("a", "b"), ((2,), torch.float32))
    file = tmp_path / "x.safetensors"
    with (
        pytest.raises(RuntimeError, match=r"x\.safetensors: b was not written, of 1 such tensors"),
        safetensors_folder.safetensors_writer(file, plan) as write,
    ):
        write("a", [torch.ones(2)])
