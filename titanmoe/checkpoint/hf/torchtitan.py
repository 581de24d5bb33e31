"""Read TorchTitan's checkpoints: find our tensors in a folder that it wrote with torch.distributed.checkpoint.

Names and layouts are those of https://github.com/pytorch/torchtitan at b5bcd76c66d0acb1a08b176d9639425bc55e0b2a
(torchtitan/models/*/model.py and state_dict_adapter.py), and of its releases 0.2.0 to 0.2.2. They are close to ours:
experts are stacked. What differs is as in Hugging Face's files: the order of the rows that RoPE turns in pairs, queries
whose gate is in the same matrix, and gate and up of gpt-oss, which alternate. Sizes and switches are not in such a
folder: config.json has them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from titanmoe.checkpoint.hf.config_json import CONFIG, describe_folder
from titanmoe.checkpoint.hf.huggingface_source import HuggingFaceSource
from titanmoe.checkpoint.hf.safetensors_folder import NAMES, StoredSlice
from titanmoe.checkpoint.hf.tensor_map import EXPERT_BIAS, Shape
from titanmoe.checkpoint.read_dcp import DcpFolder
from titanmoe.config.load import ConfigError
from titanmoe.models.families.huggingface import FusedRows, HFTensor, HuggingFace

MODEL_TYPES = ("deepseek_v3", "kimi_k2", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss")
VISION, MTP = "vision_encoder.", "mtp_layers."
BEGINS = ("tok_embeddings.", "layers.", "norm.", "lm_head.", "output.", VISION, MTP)
"""Prefixes of the model's tensors. Other entries belong to the optimizer, the data loader and the like."""
RENAMED = {
    r"tok_embeddings\.": "embed.",
    r"norm\.": "head.norm.",
    r"(lm_head|output)\.": "head.",
    # in a block
    r"attention\.qkv_linear\.": "attention.",
    r"attn\.(conv_[qkv])\.weight": r"attention.\1",
    r"attn\.in_proj_": "attention.w",
    r"attn\.out_proj\.": "attention.wo.",
    r"attn\.": "attention.",
    r"feed_forward\.": "ffn.",
    r"moe\.(?:routed_experts\.inner_)?experts\.(w[123])(?:_E[DF]+)?$": r"moe.experts.\1",
    r"moe\.(?:routed_experts\.inner_)?experts\.mlp([12])_weight(?:_E[DFG]+)?$": r"moe.experts.w\1",
    r"moe\.(?:routed_experts\.inner_)?experts\.mlp([12])_bias(?:_E[DG])?$": r"moe.experts.w\1_bias",
    r"moe\.expert_bias(?:_E)?$": "moe.router.expert_bias",
    r"moe\.router\.gate\.": "moe.router.",
    r"moe\.shared_experts\.": "moe.shared.",
}
"""Patterns at the beginning of TorchTitan's names, in a block or outside, and their replacements in ours."""


def to_our_name(name: str) -> str:
    """Translate TorchTitan's name of a tensor to ours; names that both share are returned unchanged."""
    block = re.match(r"layers\.\d+\.|", name)[0]
    for theirs, ours in RENAMED.items():
        renamed, count = re.subn(f"^{theirs}", ours, name.removeprefix(block))
        if count:
            return block + renamed
    return name


class TorchTitanFolder:
    """Weights that TorchTitan saved, by our names, with the interface of SafetensorsFolder."""

    def __init__(self, path: Path):
        """Find the tensors in a folder; ConfigError if it has none, an unknown dtype, or two names of one tensor."""
        self.path, self.dcp = path, DcpFolder(path, BEGINS)
        self.names: dict[str, str] = {}
        for name, (_, dtype) in self.dcp.tensors.items():
            if dtype not in NAMES:
                known = ", ".join(map(str, NAMES))
                raise ConfigError(f"{path} has {name} of dtype {dtype}: save the tensor as one of {known}")
            if (other := self.names.setdefault(to_our_name(name), name)) != name:
                raise ConfigError(f"{path} has both {other} and {name}, which are the same tensor: save only one")
        if not self.names:
            known = ", ".join(BEGINS)
            raise ConfigError(f"{path} has no tensors whose names begin as TorchTitan's ({known}): name another folder")
        sizes = {ours: self.dcp.tensors[name] for ours, name in self.names.items()}
        self.tensors = {ours: StoredSlice(path, *size, 0) for ours, size in sizes.items()}

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """Return a block of a tensor as it is stored, rows in TorchTitan's order; CheckpointError if it cannot be read.

        Args:
            name: our name of the tensor.
            offset: where the block begins in the full tensor.
            shape: the block's shape.
        """
        return self.dcp.read(self.names[name], offset, shape)


def open_torchtitan(path: Path, assets: Path, drop: tuple[str, ...] = ()) -> HuggingFaceSource:
    """Open the weights of a folder as a model of ours, and check that they are all there.

    Weights of a vision encoder are left out.

    Args:
        path: The folder that torch.distributed.checkpoint wrote.
        assets: A folder with the config.json that describes the model.
        drop: ("mtp",) leaves multi-token prediction out, which is refused otherwise.

    Raises:
        ConfigError: with everything that is missing, unexpected, or not in TorchTitan's models.
        CheckpointError: if the folder is damaged, or not what torch writes.
    """
    if not (assets / CONFIG).is_file():
        raise ConfigError(f"no {CONFIG} in {assets}: name TorchTitan's hf_assets_path with --hf-assets")
    parsed = describe_folder(assets)
    if parsed.hf.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"{assets / CONFIG} has model_type {parsed.hf.model_type!r}, and TorchTitan's checkpoints are read for "
            f"{', '.join(MODEL_TYPES)}: let TorchTitan write Hugging Face's format (last_save_in_hf), and convert "
            "that with --from-hf"
        )
    folder = TorchTitanFolder(path)
    # There, blocks of multi-token prediction have names of their own.
    parsed = parsed._replace(
        hf=torchtitan_format(parsed.hf, folder.tensors), json=parsed.json | {"num_nextn_predict_layers": 0}
    )
    source = HuggingFaceSource(assets, parsed, parsed.model, drop, folder)
    if source.has_mtp and "mtp" not in drop:
        raise ConfigError(
            f"{path} has multi-token prediction, which is not converted from TorchTitan: --drop mtp leaves it out"
        )
    source.check()
    if folder.dcp.others:
        kinds = sorted({name.partition(".")[0] for name in folder.dcp.others})
        source.skipped[f"they are not the model's ({', '.join(kinds):.200})"] = folder.dcp.others
    return source


def torchtitan_format(hf: HuggingFace, stored: Collection[str]) -> HuggingFace:
    """Return names and layouts of a family's tensors in TorchTitan's checkpoints, from those of Hugging Face.

    TorchTitan may balance any family by expert biases: they belong to the model if the folder has them.

    Args:
        hf: names and layouts in Hugging Face's files.
        stored: names of the tensors in TorchTitan's folder, translated to ours.
    """
    bias = f"layers.{{layer}}.moe.router{EXPERT_BIAS}"
    hf_tensors = {ours: hf_tensor for ours, hf_tensor in _torchtitan_tensors(hf.hf_tensors).items() if ours != bias}
    return replace(
        hf,
        hf_tensors=hf_tensors | ({bias: HFTensor(bias)} if any(name.endswith(EXPERT_BIAS) for name in stored) else {}),
        mixer_hf_tensors={mixer: _torchtitan_tensors(names) for mixer, names in hf.mixer_hf_tensors.items()},
        alternative_hf_tensors={},
        copies={},
        left_out={VISION: "they read images and video, and only text is trained"},
        derived=(),
    )


def _torchtitan_tensors(hf_tensors: Mapping[str, HFTensor]) -> dict[str, HFTensor]:
    return {ours: _torchtitan_tensor(ours, hf_tensor) for ours, hf_tensor in hf_tensors.items()}


def _torchtitan_tensor(ours: str, hf_tensor: HFTensor) -> HFTensor:
    """Return name and layout of a tensor of ours in TorchTitan's checkpoints, from those in Hugging Face's files."""
    if hf_tensor.stride > 1:  # gate and up of gpt-oss alternate: columns in Hugging Face's files, rows there
        name = ours.replace(".w3", ".w1")
        if not hf_tensor.transposed:
            return replace(hf_tensor, name=name)
        return HFTensor(name, fused=FusedRows(lambda model: (1, 1), hf_tensor.phase))
    if hf_tensor.fused is None:
        return HFTensor(ours, rotated=hf_tensor.rotated)
    if hf_tensor.name.endswith(".q_proj.weight"):
        return HFTensor(ours.replace(".wg.", ".wq."), fused=hf_tensor.fused)
    # A tensor of its own.
    return HFTensor(ours, fused=FusedRows(lambda model: (1,), 0), has_dim_of_1=hf_tensor.has_dim_of_1)
