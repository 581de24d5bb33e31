"""Multi-token prediction (arXiv 2412.19437, section 2.2): an extra block that predicts the token after next.

At position i it sees the hidden state of i, before the final norm or after it (`model.mtp_after_norm`), and the
embedding of token i + 1; its output goes through the model's own head. In the published checkpoints the embedding comes
first in `project`'s columns. It is trained along with the model: its cross-entropy, times training.mtp_weight, adds its
gradient to that of the loss.

Shapes: B samples, S positions of the attention slice, s owned positions (S over tp), D model, M microbatches of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanmoe.config.schema import Model
from titanmoe.models.layers import Linear, RMSNorm
from titanmoe.tokens import Tokens


class _AddGradient(torch.autograd.Function):
    """Returns the scores unchanged; the gradients of the first, the losses, flow to the other losses as well."""

    @staticmethod
    def forward(ctx, scores_NBS, other_loss_BS):
        return scores_NBS.clone()  # on a view, FSDP would lose its hooks

    @staticmethod
    def backward(ctx, grad_NBS):
        return grad_NBS, grad_NBS[0]


class MultiToken(nn.Module):
    def __init__(
        self, model: Model, weight: float, block: nn.Module, microbatches: int, dtype: torch.dtype, kernels: str
    ):
        super().__init__()
        dim, norm = model.dim, (model.dim, model.norm_eps, dtype, model.norm_adds_one, kernels)
        self.hidden_norm = RMSNorm(*norm)
        self.embed_norm = RMSNorm(*norm)
        self.project = Linear(2 * dim, dim, dtype=dtype)
        self.block = block
        self.norm = RMSNorm(*norm)
        self.weight = weight
        # Indexed by microbatch, whatever order a schedule runs them in; this rank's sums over labels.
        self.register_buffer("loss_M", torch.zeros(microbatches, dtype=torch.float64), persistent=False)

    def forward(self, x_BsD: Tensor, next_BsD: Tensor, rope: tuple[Tensor, Tensor], tokens: Tokens) -> Tensor:
        both = torch.cat((self.embed_norm(next_BsD), self.hidden_norm(x_BsD)), -1)
        return self.norm(self.block(self.project(both), rope, tokens))

    def add_loss(self, scores_NBS: Tensor, mtp_loss_BS: Tensor, microbatch: Tensor) -> Tensor:
        with torch.no_grad():
            self.loss_M.index_copy_(0, microbatch.view(1), mtp_loss_BS.sum().view(1).to(torch.float64))
        return _AddGradient.apply(scores_NBS, self.weight * mtp_loss_BS)
