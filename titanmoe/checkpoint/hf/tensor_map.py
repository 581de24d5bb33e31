"""Map our tensors to Hugging Face's for one model, and copy blocks between them in both directions.

Our names are those of titanmoe.models.transformer, with experts stacked; Hugging Face names are as published. Every
element of a Hugging Face tensor is one of ours and vice versa, so both directions are plain copies, bit by bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from titanmoe.checkpoint.move_in_blocks import CPU, empty, fill_in_blocks
from titanmoe.config.load import ConfigError
from titanmoe.config.schema import Config, Model
from titanmoe.models.families import mixers
from titanmoe.models.families.huggingface import HFTensor, HuggingFace, Unrepresentable
from titanmoe.models.transformer import Transformer

Shape = tuple[int, ...]
ReadNamedBlock = Callable[[str, Shape, Shape], Tensor]
"""A function (name, offset, shape) that returns a block of a tensor."""
EXPERT_BIAS = ".expert_bias"
"""Suffix of a router's selection bias: all zeros in families whose files have none."""


class HfPlace(NamedTuple):
    """A Hugging Face tensor, or a slice of it, that is one of our tensors, or one expert of it."""

    our_name: str
    hf_name: str
    expert: int | None
    hf_tensor: HFTensor


def our_shapes(model: Model) -> dict[str, Shape]:
    """Return the shapes of a model's parameters and router biases by our names; a tied embedding appears once."""
    with torch.device("meta"):
        model_on_meta = Transformer(Config(model=model), 1, torch.float32)
    shapes = {name: tuple(p.shape) for name, p in model_on_meta.named_parameters()}
    return shapes | {name: tuple(b.shape) for name, b in model_on_meta.named_buffers() if name.endswith(EXPERT_BIAS)}


def layer_number(name: str) -> int | None:
    """Return the layer's number in a tensor's name, model.layers.NUMBER or layers.NUMBER; None for other names."""
    number = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    return None if number is None else int(number[1])


class TensorMap:
    """The correspondence between a model's tensors and those of its Hugging Face format."""

    def __init__(self, model: Model, hf: HuggingFace, stored: Collection[str] = ()):
        """Map a model's tensors to Hugging Face's; ConfigError if one that is no selection bias has no place there.

        Args:
            model: the model.
            hf: the names and layouts of the family's tensors on Hugging Face.
            stored: names of the tensors in the files to read, which choose a name where a family has two.
        """
        self.model, self.hf, self.stored = model, hf, stored
        self.mixer_hf_tensors = [hf.mixer_hf_tensors.get(mixer.name, {}) for mixer in mixers(model)]
        self.our_shapes = our_shapes(model)
        self.hf_shapes: dict[str, Shape] = {}
        self.places: dict[str, list[HfPlace]] = {name: list(self._places(name)) for name in self.our_shapes}
        """Places of each of our tensors, one for each stacked expert; empty for a bias that no file has."""
        self.parts: dict[str, list[HfPlace]] = {}
        """Places of our tensors in each Hugging Face tensor."""
        self.copies: dict[str, str] = {}
        """Hugging Face tensors that repeat another, and that other's name."""
        homeless = [name for name, places in self.places.items() if not places and not name.endswith(EXPERT_BIAS)]
        if homeless:
            for conversion in hf.conversions:
                try:
                    conversion.write(model)
                except Unrepresentable as error:
                    raise ConfigError(f"transformers' {hf.model_type} {error}") from None
            raise ConfigError([f"{hf.model_type} models of transformers have no {name}" for name in homeless])
        for place in (place for places in self.places.values() for place in places):
            self._add(place)
        if model.mtp_depth:
            last = str(model.num_layers)
            # a tied model has no head of its own to repeat
            self.copies = {
                copy.replace("{last}", last): original for copy, original in hf.copies.items() if original in self.parts
            }
        for copy, original in self.copies.items():
            for place in self.parts[original]:
                self._add(place._replace(hf_name=copy))

    def _add(self, place: HfPlace) -> None:
        self.hf_shapes[place.hf_name] = self._hf_shape(place)
        self.parts.setdefault(place.hf_name, []).append(place)

    def _places(self, name: str) -> Iterator[HfPlace]:
        hf_tensor = self._hf_tensor(name)
        if hf_tensor is None:
            return
        hf_name = self._hf_name(hf_tensor, name)
        if "{expert}" not in hf_name:
            yield HfPlace(name, hf_name, None, hf_tensor)
            return
        for expert in range(self.our_shapes[name][0]):
            yield HfPlace(name, hf_name.replace("{expert}", str(expert)), expert, hf_tensor)

    def _hf_tensor(self, name: str) -> HFTensor | None:
        """Return our tensor's name and layout: the alternative if that is stored, else its mixer's, else its family's.

        None if the format has no such tensor.
        """
        layer, kind = layer_number(name), re.sub(r"^layers\.\d+\.", "layers.{layer}.", name)
        other = self.hf.alternative_hf_tensors.get(kind)
        if other is not None and self._hf_name(other, name) in self.stored:
            return other
        mixer_hf_tensors = {} if layer is None else self.mixer_hf_tensors[layer]
        return mixer_hf_tensors.get(kind) or self.hf.hf_tensors.get(kind)

    def _hf_name(self, hf_tensor: HFTensor, name: str) -> str:
        return hf_tensor.name.replace("{layer}", str(layer_number(name))).replace("{last}", str(self.model.num_layers))

    def _hf_shape(self, place: HfPlace) -> Shape:
        shape = self.our_shapes[place.our_name]
        shape = shape if place.expert is None else shape[1:]
        if place.hf_tensor.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        shape = (*shape[:-1], shape[-1] * place.hf_tensor.stride)
        if place.hf_tensor.fused is not None:
            rows, number = place.hf_tensor.fused.rows(self.model), place.hf_tensor.fused.number
            shape = (*shape[:-2], shape[-2] // rows[number] * sum(rows), shape[-1])
        return (*shape[:-1], 1, shape[-1]) if place.hf_tensor.has_dim_of_1 else shape

    # ---- from Hugging Face

    def read(self, name: str, offset: Shape, shape: Shape, dtype: torch.dtype, read: ReadNamedBlock) -> Tensor:
        """Return a block of one of our tensors, copied from Hugging Face tensors; zeros for a router bias in no file.

        Args:
            name: our name of the tensor.
            offset: where the block begins in our tensor.
            shape: the block's shape.
            dtype: dtype to return.
            read: returns a block of a Hugging Face tensor, given its name, offset and shape. Where their rows are in
                another order than ours, it is also asked for rows in between.
        """
        places = self.places[name]
        if not places:
            return torch.zeros(shape, dtype=dtype)
        out = empty(shape, dtype)
        if places[0].expert is None:
            self._get(places[0], out, offset, read)
        else:
            for row, place in enumerate(places[offset[0] : offset[0] + shape[0]]):
                self._get(place, out[row], offset[1:], read)
        return out

    def _get(self, place: HfPlace, out: Tensor, offset: Shape, read: ReadNamedBlock) -> None:
        """Fill `out`, a block of our tensor or of one expert, in place from one Hugging Face tensor."""
        if place.hf_tensor.transposed:
            out, offset = out.transpose(-1, -2), (*offset[:-2], offset[-1], offset[-2])
        fill_in_blocks(out, offset, partial(self._take, place, read))

    def _take(self, place: HfPlace, read: ReadNamedBlock, offset: Shape, shape: Shape) -> Tensor:
        """Return a block of our tensor, read from one Hugging Face tensor; dims are in the order of the latter.

        Args:
            place: where the tensor is in Hugging Face's files.
            read: returns a block of a Hugging Face tensor.
            offset: where the block begins in our tensor, its dims in the order of the Hugging Face tensor.
            shape: the block's shape, in that order too.
        """
        hf_tensor = place.hf_tensor
        if hf_tensor.rotated is not None or hf_tensor.fused is not None:
            rows = self.rows(hf_tensor, offset[-2], shape[-2])
            low, high = int(rows.min()), int(rows.max()) + 1
            offset = (*offset[:-2], low, *[0] * hf_tensor.has_dim_of_1, offset[-1])
            shape = (*shape[:-2], high - low, *[1] * hf_tensor.has_dim_of_1, shape[-1])
            block = read(place.hf_name, offset, shape)
            return (block.squeeze(-2) if hf_tensor.has_dim_of_1 else block).index_select(-2, rows - low)
        *outer, last = shape
        return read(place.hf_name, (*offset[:-1], offset[-1] * hf_tensor.stride), (*outer, last * hf_tensor.stride))[
            ..., hf_tensor.phase :: hf_tensor.stride
        ]

    def rows(self, hf_tensor: HFTensor, first: int, count: int) -> Tensor:
        """Return the row numbers in a Hugging Face tensor of our rows [first, first + count).

        For tensors whose rows are permuted (RoPE in pairs), or fused with another tensor's.
        """
        row = torch.arange(first, first + count)
        if hf_tensor.fused is not None:
            rows, number = hf_tensor.fused.rows(self.model), hf_tensor.fused.number
            return row // rows[number] * sum(rows) + sum(rows[:number]) + row % rows[number]
        width, rotated = hf_tensor.rotated(self.model)
        i = row % width - (width - rotated)  # the number among the rotated rows of the head, which come last
        paired = torch.where(i < rotated // 2, 2 * i, 2 * i - rotated + 1)
        return torch.where(i < 0, row, row - i + paired)

    # ---- to Hugging Face

    def write(
        self,
        name: str,
        offset: Shape,
        shape: Shape,
        dtype: torch.dtype,
        read: ReadNamedBlock,
        device: torch.device = CPU,
    ) -> Tensor:
        """Return a block of a Hugging Face tensor, copied from our tensors.

        Args:
            name: the tensor's name on Hugging Face.
            offset: where the block begins in it.
            shape: the block's shape; its last dim has to be full.
            dtype: dtype to return.
            read: returns a block of one of our tensors, given its name, offset and shape.
            device: where to make it.
        """
        out = empty(shape, dtype, device)
        for place in self.parts[name]:
            self._put(place, out, offset, read)
        return out

    def _put(self, place: HfPlace, out: Tensor, offset: Shape, read: ReadNamedBlock) -> None:
        """Fill in place what our tensor of `place` has of `out`, a block of a Hugging Face tensor from `offset` on."""
        hf_tensor, ours = place.hf_tensor, out[..., place.hf_tensor.phase :: place.hf_tensor.stride]
        if hf_tensor.rotated is not None or hf_tensor.fused is not None:
            if hf_tensor.has_dim_of_1:
                offset, ours = (*offset[:-2], offset[-1]), ours.squeeze(-2)
            rows = self.rows(hf_tensor, 0, self.our_shapes[place.our_name][-2]) - offset[-2]
            chosen = ((rows >= 0) & (rows < ours.shape[-2])).nonzero().squeeze(1)
            if not len(chosen):
                return
            low, high = int(chosen.min()), int(chosen.max()) + 1
            sizes = (*ours.shape[:-2], high - low, ours.shape[-1])
            part = read(place.our_name, (*offset[:-2], low, offset[-1]), sizes)
            ours[..., rows[chosen], :] = part[..., chosen - low, :].to(ours.dtype)
            return
        if hf_tensor.transposed:
            offset, ours = (*offset[:-2], offset[-1], offset[-2]), ours.transpose(-1, -2)
        if place.expert is not None:
            offset, ours = (place.expert, *offset), ours.unsqueeze(0)
        fill_in_blocks(ours, offset, partial(read, place.our_name))
