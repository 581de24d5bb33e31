"""Dropout of the inputs of adapters: y = W x + alpha / r * B A dropout(x), where W gets x itself, as in PEFT.

An element is dropped by a counted random number of the seed, the step, the matrix's name, the token's global index and
the element's index in the full input, so every mapping, recomputation and resumed run drops the same elements. A
block's methods tell its adapters by a `CurrentTokens` which tokens they get; routed tokens bring their index along, in
further columns.

Shapes: B samples, S positions of the attention slice, s owned positions (S over tp), T owned tokens, R routed tokens, D
width of an input, P = D + INDEX_COLUMNS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titanmoe.models.transformer import Transformer
from titanmoe.moe.layer import MoE
from titanmoe.ops import counter_rng
from titanmoe.tokens import Tokens


class CurrentTokens:
    """The tokens that a stage's modules are computing in training: their global indices, which adapters read."""

    def __init__(self) -> None:
        self.indices: tuple[Tensor, ...] = ()
        """Indices of the attention slice (B, S) and of this rank's own tokens (B, s); empty outside of training."""

    def during(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that has one `Tokens` among its arguments: while it runs, `indices` are those of these tokens.

        The wrapper takes positional arguments only. Without gradients (torch.no_grad), nothing is set.
        """

        def run(*args: Any) -> Any:
            (tokens,) = (argument for argument in args if isinstance(argument, Tokens))
            if not torch.is_grad_enabled():
                return method(*args)
            return self._run((tokens.index_BS, tokens.index_T.view(len(tokens.index_BS), -1)), method, *args)

        return run

    def remember(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function: while it runs later, as in a recomputation, `indices` are again what they are now."""
        indices = self.indices
        return lambda *args: self._run(indices, function, *args)

    def _run(self, indices: tuple[Tensor, ...], function: Callable[..., Any], *args: Any) -> Any:
        """Return function(*args), with `indices` set to these while it runs, and then to those before."""
        before, self.indices = self.indices, indices
        try:
            return function(*args)
        finally:
            self.indices = before

    def index_of(self, x: Tensor) -> Tensor:
        """Return the global index of the token in each row of x, in the shape of x without its last dim.

        Call it only while `indices` are set. x has all tokens of the attention slice, or those that this rank owns, as
        its number of rows tells, in their order: (B, S, D), (B, s, D), or the slice's segments, sample by sample.
        """
        rows = x.shape[:-1]
        return next(index for index in self.indices if index.numel() == rows.numel()).view(rows)


class InputDropout(nn.Module):
    """The dropout of the inputs of one matrix's adapters."""

    def __init__(self, name: str, inputs: int, rate: float, seed: int):
        """Make the dropout of the adapters of the matrix `name`, whose full input is `inputs` wide.

        Args:
            rate: probability with which an element is dropped.
            seed: training.seed.
        """
        super().__init__()
        self.name, self.inputs, self.seed = name, inputs, seed
        self.dropped = min(round(rate * 2**16), 2**16 - 1)
        """Number of values, of 2^16, of an element's random number that drop it."""
        # A tensor, so that all layers and steps have one graph.
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def begin_step(self, step: int) -> None:
        """Set the key of the random numbers that drop elements in this optimizer step. Call it before each step."""
        self.key.fill_(counter_rng.key("dropout", self.seed, step, self.name))

    def forward(self, x: Tensor, index: Tensor, rank: int) -> Tensor:
        """Return x with elements dropped and the others divided by 1 - rate, the rate rounded to a multiple of 2^-16.

        It drops in evaluation too: adapters call it in training only.

        Args:
            x: the input, or this rank's shard of its last dim.
            index: global index of the token in each row of x, in the shape of x without its last dim.
            rank: this rank's index among those that shard the input, if it is sharded.
        """
        width = x.shape[-1]
        first = rank * width if width < self.inputs else 0
        before, numbers = first // 4, -(-self.inputs // 4)
        number = torch.arange(before, -(-(first + width) // 4), device=x.device) + index.unsqueeze(-1) * numbers
        draws = counter_rng.bits(self.key, number).view(torch.int16)[..., first - 4 * before :][..., :width]
        return x.where(draws >= self.dropped - 2**15, 0) / (1 - self.dropped * 2.0**-16)


def tell_tokens(model: Transformer) -> CurrentTokens:
    """Wrap the blocks' methods of a stage, in place, to set a `CurrentTokens` while they run, and return that object.

    The methods run mixer, dense network and shared expert; routed experts get their indices by `send_indices`. Also
    sets each block's `remember`, for recomputation. Call it before recomputation wraps the same methods.
    """
    tokens = CurrentTokens()
    for block in model.blocks().values():
        block.attend = tokens.during(block.attend)
        if block.moe is None:
            block.feed = tokens.during(block.feed)
        elif block.moe.shared is not None:
            block.moe.run_shared = tokens.during(block.moe.run_shared)
        block.remember = tokens.remember
    return tokens


INDEX_COLUMNS = 8
"""Columns in which a token sent to experts has its index: digits to the base 256, which all dtypes have exactly."""


def send_indices(moe: MoE) -> None:
    """Replace a layer's `dispatch`, in place: in training it appends each token's global index to the token's vector.

    The index takes INDEX_COLUMNS more columns, and `take_indices` splits them off at the experts.
    """
    plain = moe.dispatch

    def dispatch(x_TD: Tensor, tokens: Tokens, *routing: Any) -> Any:
        if torch.is_grad_enabled():
            x_TD = torch.cat((x_TD, to_digits(tokens.index_T).to(x_TD.dtype)), 1)
        return plain(x_TD, tokens, *routing)

    moe.dispatch = dispatch


def to_digits(index_T: Tensor) -> Tensor:
    """Return the digits of each index to the base 256, the lowest first: (T, INDEX_COLUMNS)."""
    return (index_T.unsqueeze(1) >> _shifts(index_T)) & 255


def take_indices(x_RP: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
    """Split what `send_indices` has sent into the routed tokens (R, D) and their indices (R,).

    Args:
        x_RP: the routed tokens, with or without the index.
        dim: D. If x_RP is not wider, it is returned as it is, with None for the indices.
    """
    if x_RP.shape[1] == dim:
        return x_RP, None
    x_RD, digits_R8 = x_RP.split([dim, INDEX_COLUMNS], 1)
    return x_RD, (digits_R8.detach().to(torch.int64) << _shifts(x_RP)).sum(1)


def _shifts(x: Tensor) -> Tensor:
    """Return the number of bits below each digit, 0, 8, ..., 56, on x's device; of x nothing else is used."""
    return torch.arange(0, 8 * INDEX_COLUMNS, 8, device=x.device)
