"""Attention by torch's flex_attention: documents, windows and sinks without a mask of the full sequence.

The least and greatest positions of each block decide which blocks of keys a block of queries sees, in
O(blocks^2) numbers; inside a block that is neither fully hidden nor fully visible, the kernel checks every pair.

Shapes: B samples, L sequence, S positions of the queries, all of them or this rank's; H query heads, G key heads,
h head width, which may differ for values; Q blocks of queries, N blocks of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from titanmoe.comm.collectives import Group, all_gather_autograd
from titanmoe.mask import Mask, sees
from titanmoe.models.layers import promote
from titanmoe.ops import device as hardware
from titanmoe.parallel.context import LseCallback, Placement

MASK_BLOCK = 128
"""Queries, and keys, of a block of the mask."""


def _least_and_greatest(x_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest value in each block of MASK_BLOCK positions, each (B, blocks).

    The last block may be short.
    """
    short = -x_BS.shape[1] % MASK_BLOCK
    blocks = torch.cat((x_BS, x_BS[:, -1:].expand(-1, short)), 1).unflatten(1, (-1, MASK_BLOCK))
    return blocks.amin(-1), blocks.amax(-1)


def _ordered(mask_BQN: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries needs, (B, 1, Q), and indices of all blocks, (B, 1, Q, N).

    The indices of the needed blocks come first: the form that BlockMask takes.

    Args:
        mask_BQN: whether a block of queries needs a block of keys.
    """
    order = mask_BQN.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return mask_BQN.sum(-1, dtype=torch.int32).unsqueeze(1), order.unsqueeze(1)


def block_mask(position_S: Tensor, length: int, mask: Mask) -> BlockMask:
    """Return flex_attention's mask for queries at some positions of the sequence and keys at all positions.

    Args:
        position_S: positions of the queries in the sequence.
        length: number of keys, the length of the sequence.
    """

    def ends(of_queries_BS: Tensor, of_keys_BL: Tensor) -> list[list[Tensor]]:
        return [
            [x.unsqueeze(dim) for x in _least_and_greatest(at)] for at, dim in ((of_queries_BS, 2), (of_keys_BL, 1))
        ]

    place_1L = torch.arange(length, device=position_S.device).unsqueeze(0)
    query, key = ends(position_S.unsqueeze(0), place_1L)
    some = query[1] >= key[0]
    every = query[0] >= key[1]
    if mask.until_BL is not None:
        until = [x.unsqueeze(1) for x in _least_and_greatest(mask.until_BL)]
        some = some & (query[0] < until[1])
        every = every & (query[1] < until[0])
    if mask.window:
        if mask.depth_BL is not None:
            query, key = ends(mask.depth_BL[:, position_S], mask.depth_BL)
        some = some & (query[0] - key[1] < mask.window)
        every = every & (query[1] - key[0] < mask.window)
    # The last block may be short: it has pairs that do not exist, so it is never fully visible.
    if len(position_S) % MASK_BLOCK:
        every = every & (torch.arange(every.shape[1], device=every.device) < every.shape[1] - 1).unsqueeze(1)
    if length % MASK_BLOCK:
        every = every & (torch.arange(every.shape[2], device=every.device) < every.shape[2] - 1)

    until_BL, depth_BL, window, _ = mask

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(until_BL, depth_BL, window, b, position_S[q], k)

    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every), *_ordered(every), MASK_BLOCK, seen, seq_lengths=(len(position_S), length)
    )


class Masks:
    """A cache of flex_attention's masks for the current microbatch, one per window, which all layers share."""

    def __init__(self, placement: Placement, rank: int):
        self.placement, self.rank = placement, rank
        self.last: dict[tuple, tuple[Tensor | None, int, BlockMask]] = {}

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions (S,) that this rank's queries have in a sequence of `length` tokens."""
        return self.placement.rank_slice(torch.arange(length, device=device).unsqueeze(0), self.rank)[0]

    def __call__(self, length: int, mask: Mask, device: torch.device) -> BlockMask:
        """Return flex_attention's mask for this rank's queries and all keys, cached unless a compiler traces the call.

        Args:
            length: length of the full sequence.
        """
        if torch.compiler.is_compiling():
            return block_mask(self.positions(length, device), length, mask)
        until = mask.until_BL
        # Halves of a microbatch are views of one tensor, made anew for each block.
        key = length, mask.window, device, None if until is None else until.storage_offset()
        now = None if until is None else (until.data_ptr(), until.shape, until._version)
        _, at, blocks = self.last.get(key, (None, 0, None))
        if at != now:
            blocks = block_mask(self.positions(length, device), length, mask)
            self.last[key] = until, now, blocks  # with the tensor, so that no other takes its place in memory
        return blocks


@functools.cache
def _kernel():
    return torch.compile(flex_attention, dynamic=False)


def flex(
    q_BSHh: Tensor,
    k_BLGh: Tensor,
    v_BLGh: Tensor,
    mask: BlockMask,
    sinks_H: Tensor | None,
    report_lse: LseCallback = None,
) -> Tensor:
    """Return attention of queries to the keys that the mask shows them, by flex_attention. No communication.

    The result is (B, S, H, width of a value). On a CPU it runs as plain operations without a backward, only to be
    compared with other implementations.

    Args:
        mask: flex_attention's mask, as `block_mask` returns it.
        sinks_H: logit of one more key of each head, whose value is zero; None without.
        report_lse: gets the log-sum-exp of each query (B, H, S), sinks left out.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BSHh, k_BLGh, v_BLGh))
    attend = flex_attention if hardware.kind(q) == "cpu" else _kernel()
    grouped = q.shape[1] != k.shape[1]
    if sinks_H is None and report_lse is None:
        return attend(q, k, v, block_mask=mask, enable_gqa=grouped).transpose(1, 2)
    out, aux = attend(q, k, v, block_mask=mask, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
    if report_lse is not None:
        report_lse(aux.lse.detach())
    if sinks_H is None:
        return out.transpose(1, 2)
    # The sink takes a fraction of the softmax: exp(lse) / (exp(lse) + exp(sink)) is left.
    fraction_left = torch.sigmoid(aux.lse - promote(sinks_H).view(-1, 1))
    return (out * fraction_left.unsqueeze(-1)).to(q.dtype).transpose(1, 2)


def flex_attention_over(
    q_BSHh: Tensor,
    k_BSGh: Tensor,
    v_BSGh: Tensor,
    mask: Mask,
    sinks_H: Tensor | None = None,
    report_lse: LseCallback = None,
    *,
    masks: Masks,
    group: Group,
    flex: Callable[..., Tensor] = flex,
) -> Tensor:
    """Return attention of this rank's queries to the full sequence, by flex_attention on gathered keys and values.

    The result is (B, S, H, width of a value). Collective over cp. Differentiable where `flex` is.

    Args:
        sinks_H: logit of one more key of each head, whose value is zero; None without.
        report_lse: gets the log-sum-exp of each query (B, H, S), sinks left out.
        flex: computes attention in place of `titanmoe.parallel.flex.flex`, with its arguments.
    """
    k, v = (masks.placement.to_sequence_order(all_gather_autograd(x, 1, group)) for x in (k_BSGh, v_BSGh))
    return flex(q_BSHh, k, v, masks(k.shape[1], mask, q_BSHh.device), sinks_H, report_lse)
