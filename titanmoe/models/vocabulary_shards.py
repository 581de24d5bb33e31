"""The modules of [parallelism] vocab = "pipeline", where all pipeline stages share the embedding and the head.

The rows of both are sharded over pp and tp together. No stage has them: each rank has `VocabularyShards` beside its
stages, and the last stage ends with the norm before the head. titanmoe.parallel.vocabulary_pipeline runs them.

Shapes: B samples, S positions of the attention slice, s owned positions (S over tp), T = B * S tokens, D model, K
statistics.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titanmoe.config.schema import Config
from titanmoe.models.layers import RMSNorm
from titanmoe.models.vocabulary import LOSS_ONLY, Embedding, Head, HeadOptions
from titanmoe.tokens import Tokens


class FinalNorm(nn.Module):
    """The last layer of the last pipeline stage where all stages share the head: its norm, without the projection."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.norm = norm

    def forward(
        self,
        x_BsD: Tensor,
        labels_BS: Tensor | None = None,
        mtp: tuple[Tensor | Callable[[Tensor], Tensor], Tensor] | None = None,
        candidates_BSK: None = None,
    ) -> Tensor:
        """Return the normed hidden states (B, s, D) of the tokens that this rank owns.

        With `mtp` it returns (2 B, s, D): behind these the hidden states of multi-token prediction.

        Args:
            x_BsD: hidden states before the norm.
            labels_BS: not used, here for the interface of `Head`, as `candidates_BSK`.
            mtp: hidden states of multi-token prediction, already normed, or a function that computes them from the
                normed hidden states; and their labels, which are not used. None without.
        """
        normed_BsD = self.norm(x_BsD)
        if mtp is None:
            return normed_BsD
        mtp_BsD, _ = mtp
        if not isinstance(mtp_BsD, Tensor):
            mtp_BsD = mtp_BsD(normed_BsD)
        return torch.cat((normed_BsD, mtp_BsD))


class VocabularyShards(nn.Module):
    """This rank's rows of the embedding and of the head's weight, which are sharded over pp and tp together.

    It is listed beside the stages of the rank, and has their interface as far as it is used for all of them.
    """

    mtp = embed_copy = None
    summed_over: dict[str, str]
    """{}, as no rank has the rows of another; in the interface of a stage."""

    def __init__(self, config: Config, dtype: torch.dtype, head_options: HeadOptions = LOSS_ONLY):
        """Build both layers, not yet sharded, on the current device (meta in training), with parameters in `dtype`."""
        super().__init__()
        self.shape, self.dtype = config.model, dtype
        self.embed = Embedding(config.model.vocab_size, config.model.dim, dtype)
        options = {"chunks": config.training.loss_chunks, "kernels": config.moe.kernels, "with_norm": False}
        self.head = Head(config.model, dtype=dtype, options=head_options, **options)
        self.tie()

    def forward(self, x: Tensor, tokens: Tokens, labels_BS: Tensor | None = None) -> Tensor:
        """Return this stage's summand (B, s, D) of the embeddings of ids x (B, S), or with labels statistics (K, T).

        Collective over tp. With labels x are normed hidden states (B, s, D), and the statistics are those of the logits
        (`Head.statistics`). `tokens` tells hooks the microbatch, as in a stage's forward.
        """
        return self.embed(x) if labels_BS is None else self.head(x, labels_BS)

    def tie(self) -> None:
        """Make embedding and head one parameter, if the model ties them: a row of both is on the same rank."""
        if self.shape.tie_embeddings:
            self.head.weight = self.embed.weight

    def blocks(self) -> dict[int, nn.Module]:
        """Return {}: there are no blocks, in the interface of a stage."""
        return {}

    def moe_layers(self) -> dict[int, nn.Module]:
        """Return {}: there are no MoE layers, in the interface of a stage."""
        return {}
