"""Low-rank adapters on a model's frozen matrices: y = W x + alpha / r * B A x (arXiv 2106.09685).

B begins as zeros, so a model with new adapters computes what it did without them. Where tp or etp divides W's outputs,
B is divided and every rank has A; where it divides the inputs, A is divided and every rank has B, on its own summand of
A x. What every rank has gets a summand of its gradient there: `titanmoe.parallel.tensor.sum_replicated` adds them up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm.collectives import local
from titanmoe.config.schema import Config
from titanmoe.models import tensors
from titanmoe.models.transformer import Transformer
from titanmoe.moe.expert_products import ExpertProducts
from titanmoe.moe.experts import Experts


def add_adapters(model: Transformer, config: Config) -> None:
    """To a model on meta that tp and ep have not divided yet."""
    tuning, alpha = tensors.Tuning.of(config), config.lora.alpha
    for name, parameter in list(model.named_parameters()):
        if not (rank := tuning.rank_of(name)):
            continue
        *experts, outputs, inputs = parameter.shape
        shapes = (*experts, rank, inputs), (*experts, outputs, rank)
        for adapter, shape in zip(tensors.adapter_names(name), shapes, strict=True):
            path, _, last = adapter.rpartition(".")
            setattr(model.get_submodule(path), last, nn.Parameter(torch.empty(shape, dtype=model.dtype)))
        module = model.get_submodule(path)
        module.lora_scale = alpha / rank
        if type(module) is Experts:
            module.__class__ = AdaptedExperts


class AdaptedExperts(Experts):
    """Experts with adapters on some of their matrices: A (e, r, inputs) and B (e, outputs, r)."""

    def gate_and_up(self, products: ExpertProducts, x_RD: Tensor) -> tuple[Tensor, ...]:
        weights = self.hidden_weights()
        pairs = {name: self.pair(name, products) for name in weights if hasattr(self, f"{name}_lora_A")}
        outputs = products.up(x_RD, *weights.values(), *(a for a, _ in pairs.values()))
        hidden, narrow = outputs[: len(weights)], list(outputs[len(weights) :])
        for name, y_RF in zip(weights, hidden, strict=True):
            if name in pairs:  # in place, so that no more of them exist than without adapters
                y_RF.add_(products.up(self.lora_scale * narrow.pop(0), pairs[name][1])[0])
        return hidden

    def down(self, products: ExpertProducts, hidden: tuple[Tensor, ...], weight_R1: Tensor) -> Tensor:
        if not hasattr(self, "w2_lora_A"):
            return super().down(products, hidden, weight_R1)
        a, b = self.pair("w2", products)
        y_RD, narrow = products.down(hidden, weight_R1, local(self.w2), a)
        y_RD += products.up(self.lora_scale * narrow, b)[0]
        return y_RD

    def pair(self, name: str, products: ExpertProducts) -> tuple[Tensor, Tensor]:
        """Return A and B of a matrix. torch's grouped product gets them with zeros up to a rank of whole 16-byte units,
        which it needs."""
        a, b = (local(getattr(self, adapter)) for adapter in tensors.adapter_names(name))
        missing = -a.shape[1] % (16 // a.element_size()) if products.grouped else 0
        return (F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))) if missing else (a, b)
