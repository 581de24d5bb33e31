"""Read published low-precision weights (FP8, MXFP4) as the bfloat16 numbers that they stand for.

FP8 (DeepSeek-V3, MiniMax-M2): NAME in e4m3 and NAME_scale_inv in float32, a factor for each block of 128 x 128.
MXFP4 (gpt-oss): NAME_blocks, 16 bytes of two e2m1 numbers each per 32 values, low half first, and NAME_scales, their
common power of two (e8m0, biased by 127). The last dim of the blocks is the first of the two dims that NAME has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanmoe.checkpoint.hf.safetensors_folder import SafetensorsFolder
from titanmoe.checkpoint.hf.tensor_map import Shape
from titanmoe.config.load import ConfigError

SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
E4M3 = ("e4m3", "float8_e4m3fn")
GROUP = 32
UNQUANTISED = "use the unquantised model"
"""Advice of messages about a model that is quantised in another way."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Dequantised:
    """A folder's tensors, dequantised: blocks of quantised ones are read as bfloat16, others in their own dtype."""

    def __init__(self, folder: SafetensorsFolder, block: tuple[int, int]):
        """Find quantised tensors by names and dtypes; ConfigError with all whose scales are missing or do not fit.

        `block` is how many rows and columns share an FP8 scale. No values are read.
        """
        self.folder, self.block = folder, block
        self.tensors: dict[str, tuple[Shape, torch.dtype]] = {}
        self.quantised: dict[str, str] = {}
        """Format of each quantised tensor: "FP8" or "MXFP4"."""
        problems: list[str] = []
        stored = folder.tensors
        for name, (file, shape, dtype, _) in stored.items():
            if name.endswith(SCALE) and stored.get(name.removesuffix(SCALE)):
                continue
            if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in stored:
                continue
            if name.endswith(BLOCKS) and (scales := stored.get(name.removesuffix(BLOCKS) + SCALES)):
                base = name.removesuffix(BLOCKS)
                if dtype != torch.uint8 or shape[-1:] != (GROUP // 2,) or scales.shape != shape[:-1] or len(shape) < 3:
                    wanted = f"(..., rows, groups, {GROUP // 2}) of U8 and (..., rows, groups)"
                    is_not = f"{name} {shape} with scales {scales.shape} is not MXFP4, which is {wanted}"
                    problems.append(f"{file.name}: {is_not}: {UNQUANTISED}")
                    continue
                *outer, rows, groups, _ = shape
                self.tensors[base] = (*outer, groups * GROUP, rows), torch.bfloat16
                self.quantised[base] = "MXFP4"
            elif dtype == torch.float8_e4m3fn:
                scale = stored.get(name + SCALE)
                blocks = tuple(-(-side // size) for side, size in zip(shape, self.block, strict=False))
                if scale is None:
                    problems.append(
                        f"{file.name}: {name} is e4m3 without {name}{SCALE}: download the file that has the scales"
                    )
                elif len(shape) != 2 or scale.shape != blocks:
                    problems.append(
                        f"{file.name}: {name} {shape} has scales {scale.shape}, blocks of {self.block} make {blocks}: "
                        "correct weight_block_size in config.json"
                    )
                else:
                    self.tensors[name] = shape, torch.bfloat16
                    self.quantised[name] = "FP8"
            elif dtype == torch.uint8:
                what = f"{name} is U8, which is only supported for MXFP4 blocks and scales"
                problems.append(f"{file.name}: {what}: {UNQUANTISED}")
            else:
                self.tensors[name] = shape, dtype
        if problems:
            raise ConfigError(problems, str(folder.path))
        used = {stored for name, kind in self.quantised.items() for stored in _stored_names(name, kind)}
        self.unused = stored.keys() - self.tensors.keys() - used
        """Scales that belong to no weight."""

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """Return a block of a tensor: bfloat16 if it is stored quantised, else in its stored dtype.

        Args:
            name: the tensor's name without suffixes such as _blocks.
            offset: where the block begins in the dequantised tensor.
            shape: the block's shape.
        """
        kind = self.quantised.get(name)
        if kind is None:
            return self.folder.read(name, offset, shape)
        return self._fp8(name, offset, shape) if kind == "FP8" else self._mxfp4(name, offset, shape)

    def _fp8(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        weight = self.folder.read(name, offset, shape).float()
        first = tuple(start // size for start, size in zip(offset, self.block, strict=True))
        ends = (-(-(start + n) // size) for start, n, size in zip(offset, shape, self.block, strict=True))
        counts = tuple(max(0, end - begin) for begin, end in zip(first, ends, strict=True))
        scale = self.folder.read(name + SCALE, first, counts).float()
        for dim, size in enumerate(self.block):
            place = torch.arange(offset[dim], offset[dim] + shape[dim]) // size - first[dim]
            scale = scale.index_select(dim, place)
        return (weight * scale).to(torch.bfloat16)

    def _mxfp4(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        *outer, first, row = offset
        *outer_shape, length, rows = shape
        group, end = first // GROUP, -(-(first + length) // GROUP)
        at, size = (*outer, row, group), (*outer_shape, rows, max(0, end - group))
        packed = self.folder.read(name + BLOCKS, (*at, 0), (*size, GROUP // 2))
        power = self.folder.read(name + SCALES, at, size).to(torch.int32) - 127
        table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.bfloat16)
        values = torch.stack((table[(packed & 15).int()], table[(packed >> 4).int()]), -1).flatten(-2)
        values = torch.ldexp(values, power.unsqueeze(-1)).flatten(-2)
        start = first - group * GROUP
        return values[..., start : start + length].transpose(-1, -2)


def _stored_names(name: str, kind: str) -> tuple[str, ...]:
    return (name + SCALE,) if kind == "FP8" else (name + BLOCKS, name + SCALES)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def fp8_block(config: dict[str, Any], path: Path) -> tuple[int, int]:
    """Return how many rows and columns of a matrix share an FP8 scale, which config.json says; default 128, 128.

    Args:
        config: the contents of config.json.
        path: the model's folder, for messages.

    Raises:
        ConfigError: the model is quantised in a way that is not supported.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return 128, 128
    if not isinstance(quantization, dict):
        raise ConfigError(f"{path} has quantization_config = {quantization!r:.80}: write an object, or remove that key")
    kind = quantization.get("quant_method")
    if kind == "mxfp4":
        return 128, 128
    form, block = quantization.get("fmt", "e4m3"), quantization.get("weight_block_size")
    if kind == "fp8" and form in E4M3 and isinstance(block, list) and len(block) == 2 and all(map(_is_size, block)):
        return block[0], block[1]
    details = f"{form}, blocks {block}" if kind == "fp8" else quantization.get("format")
    raise ConfigError(
        f"{path} is quantised by {kind}{f' ({details})' if details else ''}: supported are fp8 in e4m3 with "
        f"weight_block_size, and mxfp4; {UNQUANTISED}, or make one: from_pretrained of transformers "
        "with dequantize = True in its quantization_config, then save_pretrained"
    )
