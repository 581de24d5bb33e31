"""Cut the samples of a data rank to the positions that this rank works on, and move them to its device.

All tp, cp and pp ranks of a data rank get the same samples. The sequence is split over cp, which gives a rank its
attention slice, and that over tp, which gives it the tokens that it owns.

Shapes: B samples, S positions of the attention slice, L sequence, T owned tokens, N MoE layers, K top-k or candidate
ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.comm.collectives import all_gather
from titanmoe.data.batch import ROUTES, TEACHER_IDS, Batch
from titanmoe.fold.meshes import Meshes
from titanmoe.mask import Mask, ends, spans
from titanmoe.parallel.context import Placement
from titanmoe.tokens import IGNORE, Tokens


class BatchSlice(NamedTuple):
    """One rank's slice of a microbatch: ids and labels of its attention slice, and metadata of its tokens."""

    ids_BS: Tensor
    tokens: Tokens
    labels_BS: Tensor
    extra_fields: Mapping[str, Tensor]
    """Fields that the objective reads, by name: per position (B, S) or (B, S, K), or per sample (B,)."""

    @property
    def candidates_BSK(self) -> Tensor | None:
        """Ids whose log-probabilities the objective reads besides the label's; None if it reads none."""
        return self.extra_fields.get(TEACHER_IDS)


MicrobatchLoss = Callable[[Tensor, BatchSlice], Tensor]
"""Function that returns what a microbatch on this rank adds to the step's loss, from the head's scores (N, B, S)."""


def mask_of(batch: Batch) -> Mask:
    """Return the attention mask of a batch: causal, and within documents (or branches of them) if the batch has any."""
    if batch.until_BS is not None:
        return spans(batch.until_BS, batch.position_BS)
    return Mask() if batch.document_BS is None else spans(ends(batch.document_BS))


def mtp_ids_and_labels(batch: Batch, until_BS: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return for each position the id of the next token, and the label of multi-token prediction, each (B, sequence).

    The last position of a sample gets its label as the next id, or its own id if it has none. The second result
    is the token after the next. It is IGNORE at the end of a sample, and where the next token starts another document
    or one of several branches.

    Args:
        batch: full samples, before they are sharded over cp and tp.
        until_BS: index of the position after the last of each position's document; None without documents.
    """
    ids, labels = batch.tokens_BS, batch.labels_BS
    beyond = labels[:, -1:].where(labels[:, -1:] != IGNORE, ids[:, -1:])
    later = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    if until_BS is not None:
        later = later.where(until_BS == torch.cat((until_BS[:, 1:], until_BS[:, -1:]), 1), IGNORE)
    return torch.cat((ids[:, 1:], beyond), 1), later


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Start copying a CPU tensor to the device and return the copy. The host waits neither for it nor for earlier work.

    On the CPU it returns x itself.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device, non_blocking=True)


def take_slice(
    batch: Batch,
    microbatch: int,
    meshes: Meshes,
    placement: Placement,
    device: torch.device,
    with_mtp: bool = False,
    with_index: bool = False,
) -> BatchSlice:
    """Return this rank's slice of a microbatch, on its device: ids and labels cut over cp, metadata over cp and tp.

    No communication.

    The batch's field "routes" becomes `tokens.given_TNK`; the mask stays that of the full samples.

    Args:
        batch: the full samples of this data rank in one microbatch.
        microbatch: index of the microbatch in the step, a field of `tokens` by which layers count.
        with_mtp: whether `tokens` has the ids and labels that multi-token prediction reads (next_BS, later_BS).
        with_index: whether `tokens` has the indices of the attention slice's tokens, which dropout of adapters reads.
    """
    mask, parts = mask_of(batch), (batch.tokens_BS, batch.labels_BS, batch.valid_BS, batch.position_BS, batch.number_B)
    ids, labels, valid, position, number, following, later = (
        x if x is None else to_device(x, device)
        for x in (*parts, *(mtp_ids_and_labels(batch, mask.until_BL) if with_mtp else (None, None)))
    )
    samples, length = ids.shape
    place = torch.arange(length, device=device).expand(samples, length)
    first = (microbatch * meshes.data.size + meshes.data.rank) * samples
    sample = torch.arange(samples, device=device).unsqueeze(1).expand(samples, length)
    index = (first + sample if number is None else number.unsqueeze(1)) * length + place

    def over_cp(x: Tensor) -> Tensor:
        return placement.rank_slice(x, meshes.cp.rank).contiguous()

    def owned(x: Tensor) -> Tensor:
        return over_cp(x).chunk(meshes.tp.size, 1)[meshes.tp.rank].flatten(0, 1)

    extra_fields = {name: to_device(x, device) for name, x in batch.extra_fields.items()}
    routes = extra_fields.pop(ROUTES, None)
    tokens = Tokens(
        position_BS=over_cp(place if position is None else position),
        index_T=owned(index),
        sample_T=owned(sample),
        valid_T=owned(valid),
        microbatch=torch.full((), microbatch, device=device),
        mask=mask.to(partial(to_device, device=device)),
        next_BS=over_cp(following) if with_mtp else None,
        later_BS=over_cp(later) if with_mtp else None,
        given_TNK=None if routes is None else owned(routes),
        index_BS=over_cp(index) if with_index else None,
    )
    extra_fields = {name: over_cp(x) if x.dim() > 1 else x for name, x in extra_fields.items()}
    return BatchSlice(over_cp(ids), tokens, over_cp(labels), extra_fields)


def check_alike(batches: list[Batch], meshes: Meshes, device: torch.device) -> None:
    """Raise RuntimeError, on all ranks, unless the ranks of each data rank have read the same samples.

    Collective over the world; compares a checksum of the token ids. `batches` are the microbatches that this rank read.
    """
    ids = torch.cat([batch.tokens_BS.flatten() for batch in batches])
    checksum = (ids * torch.arange(1, len(ids) + 1)).sum().view(1).to(device)
    fold = meshes.fold
    sums = all_gather(checksum, 0, meshes.world).view(fold.pp, fold.dp, -1)
    if not torch.equal(sums, sums[:1, :, :1].expand_as(sums)):
        raise RuntimeError(
            "ranks of one data index have different samples: make the data source the same on all machines"
        )
