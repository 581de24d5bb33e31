"""Measure the memory and time of a conversion, with a family's real widths at reduced depth.

    python scripts/bench/convert.py qwen3_moe 30b_a3b --layers 1 [--experts 16] [--low-precision] [--folder DIR]

It writes a Hugging Face folder of random weights, converts it in each direction, in a process each, and removes it all.
"memory" is the most by which the process's resident memory, with mapped files (VmHWM), exceeds that after imports;
"limit" is 1.5 times an expert's matrices plus a block of the output.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from titanmoe.checkpoint import move_in_blocks, weight_digest
from titanmoe.checkpoint.checkpoint_folder import write_checkpoint
from titanmoe.checkpoint.hf import config_json as configs
from titanmoe.checkpoint.hf import convert_command  # noqa: F401 (what a conversion imports is not its growth)
from titanmoe.checkpoint.hf.convert import to_hf  # noqa: F401
from titanmoe.checkpoint.hf.quantised import BLOCKS, SCALE, SCALES
from titanmoe.checkpoint.hf.safetensors_folder import Shape, write_file
from titanmoe.checkpoint.hf.tensor_map import TensorMap, our_shapes
from titanmoe.checkpoint.hf.upcycle import UpcycledWeights  # noqa: F401
from titanmoe.checkpoint.hf.weight_sources import open_weights
from titanmoe.checkpoint.write_tensors import LazyTensor
from titanmoe.cli import main as titanmoe
from titanmoe.config.fields import to_tables
from titanmoe.config.schema import Checkpoint, Config, LoRA, Model, Training
from titanmoe.models import tensors as names
from titanmoe.models.families import preset, shipped
from titanmoe.models.lora_spec import is_adapter
from titanmoe.parallel.frozen import frozen_dtype

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
BF16 = torch.bfloat16


def random(name: str, offset: Shape, shape: Shape, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return a random block of a tensor: random bytes from 1 to 99, or for bfloat16 numbers from 1 to 2.

    `name` and `offset`, where the block is in the tensor, are not used.
    """
    if dtype != BF16:
        return torch.randint(1, 100, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)
    return torch.randint(0x3F80, 0x4000, shape, dtype=torch.int16).view(BF16)


def make_folder(folder: Path, model: Model, low_precision: bool = False) -> Path:
    """Create a Hugging Face folder of random weights and return it.

    With `low_precision`, experts are in MXFP4 if the family has that, else in FP8.
    """
    folder.mkdir()
    mxfp4 = model.family == "gpt_oss"
    config = configs.to_config_json(model, None, "bfloat16", 4096)
    sizes: dict[str, tuple[Shape, torch.dtype]] = {}
    for name, shape in TensorMap(model, configs.hf_format_of(model.family)).hf_shapes.items():
        if not low_precision or ".experts." not in name or name.endswith("_bias"):
            sizes[name] = shape, BF16
        elif mxfp4:
            experts, inputs, outputs = shape
            sizes[name + BLOCKS] = (experts, outputs, inputs // 32, 16), torch.uint8
            sizes[name + SCALES] = (experts, outputs, inputs // 32), torch.uint8
        else:
            sizes[name] = shape, torch.float8_e4m3fn
            sizes[name + SCALE] = tuple(-(-n // 128) for n in shape), torch.float32
    if low_precision:
        config["quantization_config"] = {"quant_method": "mxfp4"} if mxfp4 else FP8
    write_file(folder / "model.safetensors", sizes, lambda n, at, shape: random(n, at, shape, sizes[n][1]))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_adapters(path: Path, folder: Path, rank: int = 8) -> None:
    """Write a checkpoint of random LoRA adapters of experts to `path`, for the weights of a Hugging Face folder."""
    under, begin, lora = (
        open_weights(str(folder)),
        Checkpoint(initial_hf=str(folder)),
        LoRA(rank=1, experts_rank=rank, alpha=16, targets=["*experts*"]),
    )
    config = Config(model=under.model, lora=lora, checkpoint=begin, training=Training(seq_len=32))
    dtype_of = partial(frozen_dtype, compute=BF16)
    total = sum(
        weight_digest.digest_in_blocks(name, shape, partial(under.read, name), dtype_of(name))
        for name, (shape, _) in under.tensors.items()
        if not name.endswith("expert_bias")
    )
    shapes = dict(names.shapes(under.model, names.Tuning.of(config)))
    tensors = {
        f"model.{name}": LazyTensor(shape, BF16, partial(random, name))
        for name, shape in shapes.items()
        if is_adapter(name)
    }
    digest = weight_digest.combine_digests(None, lambda: total)
    write_checkpoint(path, tensors, {"step": 1, "config": to_tables(config), "base": digest})


def one_expert(model: Model) -> int:
    """Return the bytes of one expert's three matrices in bfloat16, without biases."""
    return 3 * model.dim * model.expert_hidden * BF16.itemsize


def resident(field: str) -> int:
    """Return the bytes of a memory field of this process, such as VmRSS (now) or VmHWM (peak)."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10


def measure(conversions: list[list[str]]) -> None:
    """Run conversions in this process; print as JSON the bytes by which the peak of each exceeds the memory before."""
    grown = []
    shipped(), our_shapes(Model())  # imports what they need
    for words in conversions:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        before = resident("VmRSS")
        if titanmoe(["convert", *words]):
            sys.exit(2)
        grown.append(resident("VmHWM") - before)
    print(json.dumps(grown))


def growth(*conversions: tuple[object, ...]) -> list[int]:
    """Run `measure` in a new process; return the bytes by which memory grew in each conversion; exit if one fails.

    Each conversion is a tuple of arguments of `titanmoe convert`.
    """
    words = json.dumps([[str(word) for word in conversion] for conversion in conversions])
    ran = subprocess.run([sys.executable, __file__, "--measure", words], text=True, capture_output=True)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="?", default="qwen3_moe")
    parser.add_argument("size", nargs="?", default="30b_a3b")
    parser.add_argument("--layers", type=int, default=1, help="with experts")
    parser.add_argument("--experts", type=int, help="fewer than the family has")
    parser.add_argument("--vocab", type=int, help="a smaller vocabulary than the family has")
    parser.add_argument("--low-precision", action="store_true", help="experts in FP8 or MXFP4")
    parser.add_argument("--folder", type=Path, help="where there is room")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: checks that it runs, measures nothing")
    args = parser.parse_args()
    if args.tiny:
        args.family, args.size, args.experts, args.vocab = "qwen3_moe", "debug", 8, 64
    model = Model(**preset(args.family, args.size))
    model = replace(model, num_layers=args.layers, num_dense_layers=0, mtp_depth=0)
    if args.vocab:
        model = replace(model, vocab_size=args.vocab)
    if args.experts:
        model = replace(model, num_experts=args.experts, num_groups=1, top_groups=1)
    expert, stack = one_expert(model), one_expert(model) // 3 * model.num_experts
    limit = 1.5 * expert + move_in_blocks.WRITE_BLOCK_BYTES
    print(f"{args.family} {args.size}, {model.num_experts} experts: one has {expert / 1e6:.1f} MB, ", end="")
    print(f"one matrix of each {stack / 1e6:.0f} MB")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        make_folder(folder / "hf", model, args.low_precision)
        make_adapters(folder / "adapters", folder / "hf")
        commands = {
            "--from-hf": ("--from-hf", folder / "hf", folder / "ours"),
            "--to-hf": ("--to-hf", folder / "ours", folder / "out", "--overwrite"),
            "--to-hf, adapters": ("--to-hf", folder / "adapters", folder / "out", "--overwrite"),
        }
        if args.tiny:
            commands = {"--from-hf": commands["--from-hf"]}
        for what, command in commands.items():
            began = time.perf_counter()
            (grown,) = growth(command)
            seconds = time.perf_counter() - began
            print(f"{what:20} memory {grown / 1e6:6.1f} MB, limit {limit / 1e6:6.1f} MB, {seconds:.1f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(json.loads(sys.argv[2]))
    else:
        main()
