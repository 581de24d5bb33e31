"""Multi-token prediction (arXiv 2412.19437, section 2.2): one more block, which predicts the token after next.

At position i it sees the hidden state of i, before the final norm, and the embedding of token i + 1; what it makes of
them goes through the model's own head. The published checkpoints have the embedding first in `project`'s columns.
Trained beside the model: its cross-entropy, times training.mtp_weight, adds its gradient to that of the loss.

Shapes: B samples, s owned positions, D model, M microbatches of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanmoe.config.schema import Model
from titanmoe.models.layers import Linear, RMSNorm
from titanmoe.tokens import Tokens


class _Beside(torch.autograd.Function):
    """The loss unchanged; its gradient is also that of the other."""

    @staticmethod
    def forward(ctx, loss, other):
        return loss.clone()  # a view would lose FSDP its hooks

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


class MultiToken(nn.Module):
    def __init__(self, model: Model, weight: float, block: nn.Module, microbatches: int, dtype: torch.dtype):
        super().__init__()
        dim, eps = model.dim, model.norm_eps
        self.hidden_norm = RMSNorm(dim, eps, dtype)
        self.embed_norm = RMSNorm(dim, eps, dtype)
        self.project = Linear(2 * dim, dim, dtype=dtype)
        self.block = block
        self.norm = RMSNorm(dim, eps, dtype)
        self.weight = weight
        # Indexed by microbatch, whatever order a schedule runs them in; this rank's, sums over labels.
        self.register_buffer("loss_M", torch.zeros(microbatches, dtype=torch.float64), persistent=False)

    def forward(self, x_BsD: Tensor, next_BsD: Tensor, rope: tuple[Tensor, Tensor], tokens: Tokens) -> Tensor:
        both = torch.cat((self.embed_norm(next_BsD), self.hidden_norm(x_BsD)), -1)
        return self.norm(self.block(self.project(both), rope, tokens))

    def beside(self, loss: Tensor, own: Tensor, microbatch: Tensor) -> Tensor:
        with torch.no_grad():
            self.loss_M.index_copy_(0, microbatch.view(1), own.view(1).to(torch.float64))
        return _Beside.apply(loss, self.weight * own)
