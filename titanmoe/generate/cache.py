"""What attention remembers of earlier tokens, and the head at the end of each row.

A forward's tokens are concatenated into one row, as if they were one sample: first all prompts, later one token of
each, or several where a conversation goes on. So no prompt is padded to the length of another, tp splits the tokens as
it does a sequence, and the MoE layers see only real tokens. Only attention knows which tokens belong together. It is
cached where it is called with keys and values, after RoPE and norms, so that all kinds of attention are cached the same
way.

Shapes: T tokens of a forward, B rows (prompts) of this rank, n new tokens of each, L positions, H query heads and G key
heads of this rank, g query heads of each key head, h head width, v value width, D model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm.collectives import all_gather, gather, local
from titanmoe.mask import Mask
from titanmoe.models.layers import promote
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary import Head

UNIT = 16
"""Within attention, prompts are padded to multiples of this: its kernels on GPUs read masks in aligned rows."""


class Rows:
    """How many positions of each row are cached, and how many the current forward adds."""

    def __init__(self, device: torch.device):
        self.device, self.capacity = device, 0
        self.num_cached: list[int] = []
        self.num_new: list[int] = []
        self.row_B1 = self.place_Bn = self.numbers([])
        """Rows and positions of the tokens that a forward adds. Kept here, so that layers make no copies."""

    def begin(self, lengths: list[int], most: int) -> None:
        """The forward of all prompts comes next. most: tokens that may follow a prompt."""
        self.num_cached, self.num_new = [0] * len(lengths), lengths
        self.capacity = max(lengths, default=0) + most

    def advance(self, count: int = 1) -> None:
        """A forward of so many more tokens of each row comes next."""
        self.num_cached = self.ends
        self.num_new = [count] * len(self.num_cached)
        self.row_B1 = self.numbers(range(len(self.num_cached))).unsqueeze(1)
        self.place_Bn = self.numbers(self.num_cached).unsqueeze(1) + torch.arange(count, device=self.device)

    def go_on(self, kept: int, count: int, most: int) -> None:
        """Of the only row the first positions are kept, and a forward of `count` more tokens comes next."""
        self.num_cached, self.num_new = [kept], [0]
        self.capacity = max(self.capacity, kept + count + most)
        self.advance(count)

    def keep(self, rows: list[int]) -> None:
        self.num_cached, self.num_new = [self.num_cached[i] for i in rows], [self.num_new[i] for i in rows]

    @property
    def begins(self) -> bool:
        return not any(self.num_cached)

    @property
    def ends(self) -> list[int]:
        """Positions cached after the forward."""
        return [num_cached + num_new for num_cached, num_new in zip(self.num_cached, self.num_new, strict=True)]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and end of each row's tokens in the forward."""
        out, first = [], 0
        for num_new in self.num_new:
            out.append((first, first + num_new))
            first += num_new
        return out

    def numbers(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


class CachedAttention:
    """Replaces an attention's `attend`; the original still attends within prompts."""

    def __init__(self, attend: Callable[..., Tensor], rows: Rows):
        self.attend, self.rows = attend, rows
        self.k_BGLh: Tensor | None = None
        self.v_BGLv: Tensor | None = None

    def __call__(
        self,
        q_1THh: Tensor,
        k_1TGh: Tensor,
        v_1TGv: Tensor,
        mask: Mask,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        window = mask.window
        rows, (q, k, v) = self.rows, (q_1THh, k_1TGh, v_1TGv)
        out_1THv = q.new_zeros(*q.shape[:3], v.shape[-1])
        if rows.begins:
            self.k_BGLh, self.v_BGLv = (
                x.new_zeros(len(rows.num_new), x.shape[2], rows.capacity, x.shape[3]) for x in (k, v)
            )
            for row, (first, end) in enumerate(rows.spans):
                n = end - first
                unit = 4 * window if 0 < 4 * window < n else UNIT
                padded = [F.pad(x[:, first:end], (0, 0, 0, 0, 0, -n % unit)) for x in (q, k, v)]
                out_1THv[:, first:end] = self.attend(*padded, mask, sinks_H)[:, :n]
                self.k_BGLh[row, :, :n] = k[0, first:end].transpose(0, 1)
                self.v_BGLv[row, :, :n] = v[0, first:end].transpose(0, 1)
        elif count := sum(rows.num_new):
            q_BnHh, k_BnGh, v_BnGv = (x[0, :count].unflatten(0, (len(rows.num_new), -1)) for x in (q, k, v))
            missing = rows.capacity - self.k_BGLh.shape[2]
            if missing > 0:
                self.k_BGLh, self.v_BGLv = (F.pad(x, (0, 0, 0, missing)) for x in (self.k_BGLh, self.v_BGLv))
            self.k_BGLh[rows.row_B1, :, rows.place_Bn] = k_BnGh
            self.v_BGLv[rows.row_B1, :, rows.place_Bn] = v_BnGv
            longest = max(rows.ends)
            k_BGLh, v_BGLv = self.k_BGLh[:, :, :longest], self.v_BGLv[:, :, :longest]
            out_BnHv = last_attention(q_BnHh, k_BGLh, v_BGLv, rows.place_Bn, window, sinks_H)
            out_1THv[0, :count] = out_BnHv.flatten(0, 1)
        return out_1THv

    def keep(self, row_B: Tensor) -> None:
        self.k_BGLh, self.v_BGLv = self.k_BGLh[row_B], self.v_BGLv[row_B]


def last_attention(
    q_BnHh: Tensor, k_BGLh: Tensor, v_BGLv: Tensor, place_Bn: Tensor, window: int = 0, sinks_H: Tensor | None = None
) -> Tensor:
    """(B, n, H, v): each row's last tokens to the keys up to their places, of which a window keeps the last."""
    q_BGgnh = q_BnHh.transpose(1, 2).unflatten(1, (k_BGLh.shape[1], -1))
    scores = q_BGgnh.flatten(2, 3) @ k_BGLh.transpose(-1, -2)
    scores_BGgnL = promote(scores).unflatten(2, q_BGgnh.shape[2:4]) / math.sqrt(q_BnHh.shape[-1])
    place_L, place_Bn1 = torch.arange(k_BGLh.shape[2], device=q_BnHh.device), place_Bn.unsqueeze(2)
    hidden_BnL = place_L > place_Bn1
    if window:
        hidden_BnL |= place_L <= place_Bn1 - window
    scores_BGgnL.masked_fill_(hidden_BnL[:, None, None], -torch.inf)
    if sinks_H is not None:
        sinks = promote(sinks_H).view(*q_BGgnh.shape[1:3], 1, 1).expand(*scores_BGgnL.shape[:4], 1)
        scores_BGgnL = torch.cat((scores_BGgnL, sinks), -1)
    shares = scores_BGgnL.softmax(-1)[..., : k_BGLh.shape[2]].to(v_BGLv.dtype)
    return (shares.flatten(2, 3) @ v_BGLv).unflatten(2, q_BGgnh.shape[2:4]).flatten(1, 2).transpose(1, 2)


class LastHead(nn.Module):
    """Logits (1, B, V), of the last token of each row."""

    def __init__(self, head: Head, rows: Rows):
        super().__init__()
        self.head, self.rows = head, rows

    def forward(self, x_1sD: Tensor, labels: None, kept_BSK: None = None) -> Tensor:
        last_B = self.rows.numbers([end - 1 for _, end in self.rows.spans])
        x_1BD = self.head.norm(gather(x_1sD, 1, self.head.tp)[:, last_B])
        if not len(last_B):
            return x_1BD
        return all_gather(F.linear(x_1BD, local(self.head.weight)), 2, self.head.tp)


def add_caches(model: Transformer, rows: Rows) -> list[CachedAttention]:
    """Gives every attention of the model a cache, and the head the ends of rows."""
    caches = []
    for block in model.blocks().values():
        block.attention.attend = CachedAttention(block.attention.attend, rows)
        caches.append(block.attention.attend)
    model.head = LastHead(model.head, rows)
    return caches
