"""Low-rank adapters on a model's frozen matrices: y = W x + alpha / r * B A x (titanmoe.models.lora_spec).

`add_adapters` turns the modules that the recipe chooses into the kinds below, which compute their own product and add
the adapters'. B begins as zeros, so a model with new adapters computes what it did without them.

Shapes: R routed tokens, D model, F hidden width of an expert on this rank, e experts on this rank, r rank of the
adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm.collectives import to_local
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.models.layers import Linear, constant, local_rows
from titanmoe.models.lora_dropout import CurrentTokens, InputDropout, send_indices, take_indices, tell_tokens
from titanmoe.models.lora_spec import adapter_names, adapter_splits, divisor
from titanmoe.models.tensors import Tuning
from titanmoe.models.transformer import Transformer
from titanmoe.moe.expert_products import ExpertProducts
from titanmoe.moe.experts import Experts
from titanmoe.ops import counter_rng


def add_adapters(model: Transformer, config: Config, tp_rank: int = 0) -> None:
    """Add the adapters that the recipe asks for to a stage, in place, while it is on meta and not sharded yet.

    The caller gives them values (titanmoe.parallel.materialize) and freezes the other parameters. With lora.dropout,
    methods of the blocks are wrapped too (`tell_tokens`): call this before recomputation wraps them.

    Args:
        tp_rank: this rank's index in tensor parallel, by which dropout finds its shard of a split input.

    Raises:
        ConfigError: if lora.targets chooses the matrix of a module that cannot have adapters.
    """
    tuning, rate = Tuning.of(config), config.lora.dropout
    tokens = tell_tokens(model) if rate else None
    for name, parameter in list(model.named_parameters()):
        if not (rank := tuning.rank_of(name)):
            continue
        adapters = adapter_splits(name, (tuple(parameter.shape), None), rank)
        initial = partial(normal, inputs=parameter.shape[-1]), constant(0)
        for (adapter, (shape, _)), values in zip(adapters.items(), initial, strict=True):
            path, _, last = adapter.rpartition(".")
            module = model.get_submodule(path)
            module.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=model.dtype)))
            module.initial = getattr(module, "initial", {}) | {last: values}
        module.__class__ = _adapted_kind(name, module)
        module.adapters_scale = config.lora.alpha / divisor(config.lora, rank)
        dropout = InputDropout(name, parameter.shape[-1], rate, config.training.seed) if rate else None
        if isinstance(module, AdaptedExperts):
            setattr(module, f"{name.rpartition('.')[2]}_dropout", dropout)
        else:
            module.dropout, module.tokens, module.tp_rank = dropout, tokens, tp_rank
    for moe in model.moe_layers().values() if rate else ():
        if isinstance(moe.experts, AdaptedExperts):
            send_indices(moe)


def _adapted_kind(name: str, module: nn.Module) -> type[nn.Module]:
    for plain, adapted in ((Linear, AdaptedLinear), (Experts, AdaptedExperts)):
        if isinstance(module, plain):
            return adapted
    raise ConfigError(
        f"{name} cannot have adapters, because it is of {type(module).__name__}: make it a "
        f"{Linear.__module__}.{Linear.__name__}, or leave it out of lora.targets"
    )


def normal(key: int, index: Tensor, dtype: torch.dtype, inputs: int) -> Tensor:
    """Return normal random numbers as initial values of an adapter's A, with the variance 1 / (3 inputs) of PEFT's.

    Args:
        key: key of the random numbers.
        index: indices of the elements in the full parameter, row-major; the result has this shape.
        inputs: width of the adapter's input.
    """
    return counter_rng.normal(key, index, dtype) * (1 / math.sqrt(3 * inputs))


@contextmanager
def without_adapters(models: Iterable[nn.Module]) -> Iterator[None]:
    """Switch the adapters of the models off within this context, by a factor of 0: they are still computed."""
    modules = [module for model in models for module in model.modules()]
    scales = {m: m.adapters_scale for m in modules if isinstance(m, AdaptedLinear | AdaptedExperts)}
    try:
        for module in scales:
            module.adapters_scale = 0.0
        yield
    finally:
        for module, scale in scales.items():
            module.adapters_scale = scale


class AdaptedLinear(Linear):
    """A linear layer with `lora_A` (r, inputs) and `lora_B` (outputs, r)."""

    adapters_scale: float
    """alpha / r, or rsLoRA's alpha / sqrt(r): the factor of the adapters' product."""
    dropout: InputDropout | None
    """The dropout of the adapters' input; None without it."""
    tokens: CurrentTokens | None
    """The tokens whose input this is; None without dropout."""
    tp_rank: int

    def forward(self, x: Tensor, pass_on: bool = False, rows: slice | None = None) -> Any:
        """Return W x + alpha / r * B A x, plus bias, from this rank's shards.

        Args:
            x: input.
            pass_on: whether to return the pair (result, x), where x is for the next product of the same input
                (`product_and_input`).
            rows: the rows (outputs) of W and B to use; None for all.
        """
        if not pass_on:
            return self.adapted(super().forward(x, rows=rows), x, rows)
        y, x = super().forward(x, pass_on=True, rows=rows)
        return self.adapted(y, x, rows), x

    def without_bias(self, x: Tensor) -> Tensor:
        """Return W x + alpha / r * B A x from this rank's shards, without the bias; a partial sum where tp shards x."""
        return self.adapted(super().without_bias(x), x)

    def effective_weight(self) -> Tensor:
        """Return this rank's shard of W + alpha / r * B A, as a plain tensor."""
        return super().effective_weight() + self.adapters_scale * to_local(self.lora_B) @ to_local(self.lora_A)

    def adapted(self, y: Tensor, x: Tensor, rows: slice | None = None) -> Tensor:
        """Return y + alpha / r * B A x, with only some rows of B if `rows` is given; in training, x after dropout."""
        if self.dropout is not None and self.tokens.indices:
            x = self.dropout(x, self.tokens.index_of(x), self.tp_rank)
        return y + F.linear(self.adapters_scale * F.linear(x, to_local(self.lora_A)), local_rows(self.lora_B, rows))


class AdaptedExperts(Experts):
    """Experts that have, for some of their matrices, A (e, r, inputs) and B (e, outputs, r)."""

    adapters_scale: float
    """alpha / r, or rsLoRA's alpha / sqrt(r): the factor of the adapters' product."""

    def gate_and_up(self, multiplier: ExpertProducts, x_RD: Tensor) -> tuple[Tensor, ...]:
        """Return gate and up of the routed tokens, adapters included: (R, F) each.

        Args:
            multiplier: multiplies routed tokens by their experts' matrices. This method sets its `index_R` to the
                tokens' global indices, or None without dropout.
            x_RD: the routed tokens, sorted by expert, with their indices in further columns if there is dropout.
        """
        weights = self.hidden_weights()
        pairs = {name: self.adapter_pair(name, multiplier) for name in weights if hasattr(self, f"{name}_lora_A")}
        x_RD, multiplier.index_R = take_indices(x_RD, self.w1.shape[-1])
        outputs = multiplier.up(x_RD, *weights.values(), *(a for a, _ in pairs.values() if multiplier.index_R is None))
        hidden, narrow = outputs[: len(weights)], list(outputs[len(weights) :])
        if multiplier.index_R is not None:
            narrow = [self.up_after_dropout(name, multiplier, x_RD, a) for name, (a, _) in pairs.items()]
        for name, y_RF in zip(weights, hidden, strict=True):
            if name in pairs:  # in place, so that no more of them exist than without adapters
                y_RF.add_(multiplier.up(self.adapters_scale * narrow.pop(0), pairs[name][1])[0])
        return hidden

    def down(self, multiplier: ExpertProducts, hidden: tuple[Tensor, ...], weight_R1: Tensor) -> Tensor:
        """Return the down projection of the routed tokens (R, D), adapters included; with etp this rank's summand.

        Args:
            multiplier: multiplies routed tokens by their experts' matrices; the one that `gate_and_up` got.
            hidden: gate and up of the routed tokens, (R, F) each.
            weight_R1: routing weights, which the result includes.
        """
        if not hasattr(self, "w2_lora_A"):
            return super().down(multiplier, hidden, weight_R1)
        a, b = self.adapter_pair("w2", multiplier)
        if multiplier.index_R is None:
            y_RD, narrow_Rr = multiplier.down(hidden, weight_R1, to_local(self.w2), a)
        else:
            (y_RD,) = multiplier.down(hidden, weight_R1, to_local(self.w2))
            narrow_Rr = self.up_after_dropout("w2", multiplier, multiplier.down_input(hidden, weight_R1), a)
        y_RD += multiplier.up(self.adapters_scale * narrow_Rr, b)[0]
        return y_RD

    def up_after_dropout(self, name: str, multiplier: ExpertProducts, x: Tensor, a: Tensor) -> Tensor:
        """Return the product (R, r) of routed tokens, after dropout, with this rank's shard `a` of A (e, r, inputs).

        Args:
            name: the adapter's matrix, "w1", "w2" or "w3".
            multiplier: multiplies routed tokens by their experts' matrices; dropout draws by its `index_R`.
            x: inputs of the matrix for the routed tokens, before dropout.
        """
        return multiplier.up(getattr(self, f"{name}_dropout")(x, multiplier.index_R, self.etp_rank), a)[0]

    def adapter_pair(self, name: str, multiplier: ExpertProducts) -> tuple[Tensor, Tensor]:
        """Return this rank's shards of A and B of a matrix, such as "w1", padded with zeros along r.

        Their r becomes a multiple of what `multiplier` can multiply.
        """
        a, b = (to_local(getattr(self, adapter)) for adapter in adapter_names(name))
        # Rows of torch's grouped product begin at 16 bytes.
        missing = -a.shape[1] % (16 // a.itemsize) if multiplier.method == "grouped" else 0
        return (F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))) if missing else (a, b)
