"""The embedding, and the head with its losses, with the vocabulary sharded over tp, or over pp and tp.

In the second case, [parallelism] vocab = "pipeline", they are in no stage (titanmoe.models.vocabulary_shards).

Shapes: B samples, S positions of the attention slice, s owned positions (S over tp), T = B * S tokens, D model, V this
rank's vocabulary, v a slice of it, N values that the head returns for each label, K candidate ids, C = K + 1 classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm.collectives import (
    NO_GROUP,
    Group,
    all_gather,
    all_gather_autograd,
    all_reduce,
    reduce_scatter_autograd,
    to_local,
)
from titanmoe.config.schema import Model
from titanmoe.models.candidate_classes import candidate_log_probs, top_k_log_probs
from titanmoe.models.layers import RMSNorm, promote
from titanmoe.models.logit_slices import (
    LossOptions,
    Statistics,
    chunked_cross_entropy,
    divide,
    existing_rows,
    vocabulary_rows,
)
from titanmoe.ops import device
from titanmoe.ops.autograd_functions import as_non_leaf
from titanmoe.tokens import IGNORE


class Vocabulary(nn.Module):
    """A layer whose weight has a row for each id, sharded over the ranks of tp or of another group."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size
        self.tp = NO_GROUP
        self.pp_tp: Group | None = None
        """Group of the ranks that shard the rows; None if these are the ranks of tp, which share the tokens."""

    @property
    def sharded_over(self) -> Group:
        """The ranks that shard the rows."""
        return self.pp_tp or self.tp

    @property
    def shard_rows(self) -> int:
        """Number of rows of a rank, rounded up: the last has fewer if the number of ranks does not divide the ids."""
        return -(-self.vocab_size // self.sharded_over.size)


class Embedding(Vocabulary):
    """A lookup of ids in a matrix whose rows are sharded."""

    def __init__(self, vocab_size: int, dim: int, dtype: torch.dtype | None = None):
        super().__init__(vocab_size)
        self.weight = nn.Parameter(torch.empty(vocab_size, dim, dtype=dtype))

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Return the embeddings (B, s, D) of the tokens that this rank owns. Collective over tp.

        If ranks of other pipeline stages have rows too, it is this stage's summand of the embeddings.

        Args:
            ids_BS: ids of the attention slice, the same on all ranks of tp.
        """
        weight = to_local(self.weight)
        if self.sharded_over.size == 1:
            return F.embedding(ids_BS, weight)
        row_BS, is_own_BS = vocabulary_rows(ids_BS, self.shard_rows, self.sharded_over)
        return reduce_scatter_autograd(F.embedding(row_BS, weight) * is_own_BS.unsqueeze(-1), 1, self.tp)


class _CrossEntropy(torch.autograd.Function):
    """logsumexp(logits) - logit[label] of each token, and the entropy of its distribution or None.

    Both are 0 without a label. Only this rank's columns of the logits are in memory.
    """

    @staticmethod
    def forward(ctx, logits_TV, label_T, tp, with_entropy):
        has_label_T = label_T != IGNORE
        row_T, is_own_T = vocabulary_rows(label_T, logits_TV.shape[1], tp)
        top_T = all_reduce(logits_TV.amax(1), tp, "max")
        lower_TV = logits_TV - top_T.unsqueeze(1)
        exp_TV = torch.exp(lower_TV)
        label_logit_T = (logits_TV.gather(1, row_T.unsqueeze(1)).squeeze(1) - top_T) * (is_own_T & has_label_T)
        sums = [exp_TV.sum(1), label_logit_T, *([(exp_TV * lower_TV).sum(1)] if with_entropy else [])]
        total_T, label_logit_T, *weighted = all_reduce(torch.stack(sums), tp)
        softmax_TV, entropy_T = exp_TV.div_(total_T.unsqueeze(1)), None
        if with_entropy:
            entropy_T = (total_T.log() - weighted[0] / total_T) * has_label_T
        ctx.save_for_backward(softmax_TV, row_T, is_own_T & has_label_T, has_label_T, entropy_T)
        return (total_T.log() - label_logit_T) * has_label_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T, grad_entropy_T):
        softmax_TV, row_T, is_own_T, has_label_T, entropy_T = ctx.saved_tensors
        grad_TV = softmax_TV * has_label_T.unsqueeze(1)
        grad_TV.scatter_add_(1, row_T.unsqueeze(1), -is_own_T.unsqueeze(1).to(grad_TV.dtype))
        grad_TV *= grad_T.unsqueeze(1)
        if entropy_T is not None:  # d entropy / d logit = -p (log p + entropy); torch.special.entr(p) is -p log p
            scale_T1 = (grad_entropy_T * has_label_T).unsqueeze(1)
            grad_TV += (torch.special.entr(softmax_TV) - softmax_TV * entropy_T.unsqueeze(1)) * scale_T1
        return grad_TV, None, None, None


def cross_entropy(
    logits_TV: Tensor, label_T: Tensor, tp: Group, with_entropy: bool = False, temperature: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Return each token's cross-entropy (T,), and the entropy (T,) of its distribution or None. Collective over tp.

    Both are differentiable, in float32 at least, and 0 without a label.

    Args:
        logits_TV: logits of this rank's vocabulary.
        label_T: ids of the labels, IGNORE where there is none.
        tp: the ranks that shard the vocabulary.
        temperature: divides the logits.
    """
    return _CrossEntropy.apply(promote(divide(logits_TV, temperature)), label_T, tp, with_entropy)


CHUNK_BYTES, CHUNK_BYTES_GPU = 32 * 2**20, 2**30
"""Bytes of logits at a time, in the dtype that the loss computes in, if the recipe leaves the number of chunks open.

A CPU has them in its caches. On a GPU every slice adds to the gradient of all hidden states in memory, so slices are
wide.
"""


def chunk_count(tokens: int, vocabulary: int, logit_bytes: int, setting: int, slice_bytes: int = CHUNK_BYTES) -> int:
    """Return the number of slices, from 1 to `vocabulary`, whose logits the loss computes one after the other.

    Args:
        vocabulary: number of ids in this rank's shard of the vocabulary.
        logit_bytes: bytes of a logit.
        setting: training.loss_chunks: the number of slices; 0 for one, -1 for slices of at most `slice_bytes`.
        slice_bytes: most bytes of the logits of a slice.
    """
    count = -(-tokens * vocabulary * logit_bytes // slice_bytes) if setting == -1 else setting
    return min(max(count, 1), vocabulary)


class HeadOutput(NamedTuple):
    """The head's output for each position's label, in float32 at least, differentiable; 0 where there is no label."""

    loss_BS: Tensor
    """Cross-entropy: -log p of the label."""
    entropy_BS: Tensor | None = None
    """Entropy of the predicted distribution in nats; None unless the objective asks for it."""
    classes_CBS: Tensor | None = None
    """log p of each candidate id, with the head's temperature, and last of all other ids together.

    None unless there are candidates.
    """

    @classmethod
    def of(cls, output_NBS: Tensor) -> HeadOutput:
        """Split the head's output: N = 1 is the loss, N = 2 loss and entropy, a larger N the loss and N - 1 classes.

        Not for teacher mode, whose output has no loss.
        """
        return cls(*output_NBS) if len(output_NBS) < 3 else cls(output_NBS[0], classes_CBS=output_NBS[1:])


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """The choice of values that the head returns for each label, besides the cross-entropy."""

    with_entropy: bool = False
    """Whether to return the entropy of the distribution."""
    candidates: int = 0
    """Number of candidate ids, given by the batch, whose log-probabilities to return."""
    top_k: int = 0
    """Number of top-k ids to return with their log-probabilities, instead of all else. Not differentiable."""
    temperature: float = 1.0
    """Divisor of the logits whose log-probabilities are returned."""


LOSS_ONLY = HeadOptions()
"""The cross-entropy alone."""


class Head(Vocabulary):
    """The final norm, the projection to the vocabulary, and the loss.

    With labels it returns each label's HeadOutput as one tensor (N, B, S), which pipelines can send; without labels it
    returns logits. `HeadOptions` chooses the values: besides the cross-entropy the entropy, or the log-probabilities of
    candidate ids; or instead of it the top-k ids and their log-probabilities (teacher mode).
    """

    def __init__(
        self,
        model: Model,
        *,
        chunks: int,
        dtype: torch.dtype | None = None,
        kernels: str = "auto",
        options: HeadOptions = LOSS_ONLY,
        with_norm: bool = True,
    ):
        super().__init__(model.vocab_size)
        self.norm = (
            RMSNorm(model.dim, model.norm_eps, dtype, model.norm_adds_one, kernels) if with_norm else nn.Identity()
        )
        self.weight = nn.Parameter(torch.empty(model.vocab_size, model.dim, dtype=dtype))
        self.chunks, self.kernels = chunks, kernels
        self.with_entropy, self.candidates = options.with_entropy, options.candidates
        self.top_k, self.temperature = options.top_k, options.temperature
        self.loss_temperature = 1.0
        """Divisor of the logits that the loss is computed from, other than that of multi-token prediction."""
        self.ids = 0
        """Number of ids that exist, if the vocabulary is padded: the others get no probability. 0: all."""

    @property
    def num_values(self) -> int:
        """Number of values that the head returns for each label: N of the HeadOutput (N, B, S).

        K candidates add K + 1: all other ids count together. In teacher mode it is 2 K + 1.
        """
        if self.top_k:
            return 2 * self.top_k + 1
        return 1 + self.with_entropy + (self.candidates + 1 if self.candidates else 0)

    def forward(
        self,
        x_BsD: Tensor,
        labels_BS: Tensor | None = None,
        mtp: tuple[Tensor | Callable[[Tensor], Tensor], Tensor] | None = None,
        candidates_BSK: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the labels' HeadOutput (N, B, S), or logits (B, S, vocabulary) without labels. Collective over tp.

        With `mtp` it returns a pair. If all pipeline stages share the head, with labels it returns statistics (K, T) of
        this rank's logits, for `merge_statistics`. Logits have no gradient if tp exceeds 1.

        Args:
            x_BsD: hidden states of the tokens that this rank owns.
            labels_BS: ids to predict, IGNORE where there is none.
            mtp: hidden states of multi-token prediction, already normed, or a function that computes them from this
                head's normed hidden states; and their labels. Their losses (B, S) are returned second. Not used,
                so that there is no pair, without labels, for candidates and top-k, or if all stages share the head.
            candidates_BSK: ids whose log-probabilities to return, if the head has candidates.
        """
        normed_BsD = self.norm(x_BsD)
        if labels_BS is None:
            return all_gather(F.linear(all_gather_autograd(normed_BsD, 1, self.tp), to_local(self.weight)), 2, self.tp)
        if self.pp_tp is not None:
            return self.statistics(normed_BsD, labels_BS)
        if self.candidates or self.top_k:
            return self.classes(normed_BsD, labels_BS, candidates_BSK)
        output_NBS = self.loss_and_entropy(normed_BsD, labels_BS, self.with_entropy, self.loss_temperature)
        if mtp is None:
            return output_NBS
        mtp_BsD, later_BS = mtp
        if not isinstance(mtp_BsD, Tensor):
            mtp_BsD = mtp_BsD(normed_BsD)
        return output_NBS, self.loss_and_entropy(mtp_BsD, later_BS, False)[0]

    def classes(self, normed_BsD: Tensor, labels_BS: Tensor, candidates_BSK: Tensor | None) -> Tensor:
        """Return the head's output (N, B, S) for candidate ids or, in teacher mode, top-k ids. Collective over tp.

        With K candidates it is the loss, then log-probabilities of the candidates and of all other ids together; these
        are 0 if no candidates are given, as in validation. With top-k it is the K ids, as floating-point numbers, then
        K + 1 log-probabilities. `loss_temperature` and `with_entropy` are not used, and `ids` only for the loss without
        given candidates.

        Args:
            normed_BsD: normed hidden states of the tokens that this rank owns.
            labels_BS: ids to predict, IGNORE where there is none.
        """
        x_TD, weight_VD, chunks = self._inputs(normed_BsD)
        options = (self.tp, chunks, self.temperature)
        if self.top_k:
            ids_TK, log_p_CT = top_k_log_probs(x_TD, weight_VD, self.top_k, *options)
            numbers_NT = torch.cat((ids_TK.t().to(log_p_CT.dtype), log_p_CT))
        elif candidates_BSK is None:
            loss_BS = self.loss_and_entropy(normed_BsD, labels_BS, False)
            return F.pad(loss_BS, (0, 0, 0, 0, 0, self.num_values - 1))
        else:
            inputs = x_TD, weight_VD, labels_BS.flatten(), candidates_BSK.flatten(0, 1)
            loss_T, log_p_CT = candidate_log_probs(*inputs, *options)
            numbers_NT = torch.cat((loss_T.unsqueeze(0), log_p_CT))
        return numbers_NT.unflatten(1, labels_BS.shape).clone()  # on a view, FSDP would lose its hooks

    def loss_and_entropy(
        self, normed_BsD: Tensor, labels_BS: Tensor, with_entropy: bool, temperature: float = 1.0
    ) -> Tensor:
        """Return each label's cross-entropy (1, B, S), or cross-entropy and entropy (2, B, S). Collective over tp.

        Ids from `ids` on get no probability.

        Args:
            normed_BsD: normed hidden states of this rank's owned tokens.
            labels_BS: ids of the labels, IGNORE where there is none.
            temperature: divides the logits.
        """
        x_TD, weight_VD, chunks = self._inputs(normed_BsD)
        label_T = labels_BS.flatten()
        if self.ids:
            weight_VD, label_T = existing_rows(weight_VD, label_T, self.ids, self.shard_rows, self.tp)
        if chunks > 1:
            options = {"with_entropy": with_entropy, "temperature": temperature}
            values = chunked_cross_entropy(x_TD, weight_VD, label_T, self.tp, chunks, kernels=self.kernels, **options)
        else:
            values = cross_entropy(F.linear(x_TD, weight_VD), label_T, self.tp, with_entropy, temperature)
        # A copy: on a view, FSDP would lose its hooks.
        return torch.stack([x_T.view_as(labels_BS) for x_T in values if x_T is not None])

    @torch.compiler.disable  # as `chunked_cross_entropy`
    def statistics(self, normed_BsD: Tensor, labels_BS: Tensor) -> Tensor:
        """Return statistics (K, T) of this rank's logits, for `merge_statistics`. Collective over tp.

        They are the largest logit, the sum of exp(logit - largest), the label's logit (0 if another rank has it) and,
        for the entropy, the sum of exp(logit - largest) * (logit - largest). Their backward gets other numbers than
        their gradient (`Statistics`).

        Args:
            normed_BsD: normed hidden states of this rank's owned tokens.
            labels_BS: label of each position of the attention slice.
        """
        x_TD, weight_VD, chunks = self._inputs(normed_BsD)
        inputs = weight_VD, labels_BS.flatten(), self.ids or self.vocab_size, self.shard_rows
        weight_VD, label_T = existing_rows(*inputs, self.sharded_over)
        row_T, is_own_T = vocabulary_rows(label_T, weight_VD.shape[0], self.sharded_over)
        options = LossOptions(chunks, self.kernels, self.with_entropy, self.loss_temperature)
        return Statistics.apply(as_non_leaf(x_TD), as_non_leaf(weight_VD), row_T.where(is_own_T, -1), options)

    def _inputs(self, normed_BsD: Tensor) -> tuple[Tensor, Tensor, int]:
        """Gather the hidden states over tp. Return (hidden states (T, D), this rank's weight (V, D), slices of it).

        The last is the number of slices of the vocabulary that the loss computes one after the other.
        """
        x_TD, weight_VD = all_gather_autograd(normed_BsD, 1, self.tp).flatten(0, 1), to_local(self.weight)
        # With candidates a slice is in memory twice, the second time without the candidates.
        width = torch.promote_types(x_TD.dtype, torch.float32).itemsize * (2 if self.candidates or self.top_k else 1)
        most = device.choose(x_TD, CHUNK_BYTES_GPU, cpu=CHUNK_BYTES, compiled=True)
        return x_TD, weight_VD, chunk_count(x_TD.shape[0], weight_VD.shape[0], width, self.chunks, most)
