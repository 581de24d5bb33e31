"""The caches of attention: keys and values, or the latents of latent attention.

Shapes: T tokens of a forward, B rows of this rank, n new tokens of each, L positions, H query heads and G key
heads of this rank, g query heads of each key head, h query and key width, v value width; of latent attention r a
latent, p the dims of a key with RoPE, c both concatenated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.config.blocks import window
from titanmoe.config.schema import Model
from titanmoe.generate.cache import Cache, CacheSize, PerToken, PerWindow
from titanmoe.generate.cached_rows import Rows
from titanmoe.mask import Mask
from titanmoe.models.latent_attention import LatentAttention
from titanmoe.models.layers import promote, rotate

UNIT = 16
"""Multiple that prompts are padded to in attention, whose kernels on GPUs read masks in aligned rows."""


class CachedKeys(Cache):
    """Cache of keys and values after RoPE and norms, for every mixer that calls `attend` with them."""

    def __init__(self, mixer: Any, rows: Rows):
        self.attend, self.rows = mixer.attend, rows
        mixer.attend = self

    @staticmethod
    def size(model: Model, layer: int, tp: int) -> CacheSize:
        return CacheSize(2 * max(1, model.num_kv_heads // tp) * model.head_dim, window(model, layer))

    def __call__(
        self, q_1THh: Tensor, k_1TGh: Tensor, v_1TGv: Tensor, mask: Mask, sinks_H: Tensor | None = None
    ) -> Tensor:
        rows = self.rows
        if rows.reads_prompts:
            if not self.stored:
                self.stored = [PerWindow(rows, mask.window) if mask.window else PerToken(rows) for _ in range(2)]
            for each, x in zip(self.stored, (k_1TGh, v_1TGv), strict=True):
                each.read_prompts(x)
            return within_prompts(self.attend, rows, q_1THh, k_1TGh, v_1TGv, mask, sinks_H)
        q_BnHh, k_BnGh, v_BnGv = (rows.split(x) for x in (q_1THh, k_1TGh, v_1TGv))
        k_GBLh, v_GBLv = (each.add(x) for each, x in zip(self.stored, (k_BnGh, v_BnGv), strict=True))
        out_BnHv = last_attention(q_BnHh, k_GBLh, v_GBLv, rows.place_Bn, q_BnHh.shape[-1] ** -0.5, mask.window, sinks_H)
        return rows.join(out_BnHv, q_1THh.shape[1])


class CachedLatents(Cache):
    """Cache of latent attention: each token's latent and the dims of its key with RoPE, shared by all heads.

    New tokens attend to them as one key head. A query is multiplied by the rows of `wkv_b` that make its head's keys
    (q . Wn l = (Wn^T q) . l), and the attended latents by the rows that make values. Prompts are computed as in
    training.
    """

    def __init__(self, mixer: LatentAttention, rows: Rows):
        self.mixer, self.mix, self.rows, self.stored = mixer, mixer.mix, rows, [PerToken(rows)]
        mixer.attend, mixer.mix = partial(within_prompts, mixer.attend, rows), self

    @staticmethod
    def size(model: Model, layer: int, tp: int) -> CacheSize:
        return CacheSize(model.kv_lora_rank + model.qk_rope_head_dim)

    def __call__(
        self, source_1Tr: Tensor, latent_1Tr: Tensor, key_1Tp: Tensor, rope: tuple[Tensor, Tensor], mask: Mask
    ) -> Tensor:
        mixer, rows = self.mixer, self.rows
        key_1T1c = torch.cat((latent_1Tr.unsqueeze(2), rotate(key_1Tp.unsqueeze(2), rope, mixer.kernels)), -1)
        if rows.reads_prompts:
            self.stored[0].read_prompts(key_1T1c)
            return self.mix(source_1Tr, latent_1Tr, key_1Tp, rope, mask)
        wn_Hnr, wv_Hvr = (
            mixer.wkv_b.effective_weight().unflatten(0, (-1, sum(mixer.key_value))).split(mixer.key_value, 1)
        )
        q_BnHn, q_BnHp = rows.split(mixer.queries(source_1Tr, rope)).split(mixer.query, -1)
        q_BnHc = torch.cat((torch.einsum("BtHn,Hnr->BtHr", q_BnHn, wn_Hnr), q_BnHp), -1)
        k_1BLc = self.stored[0].add(rows.split(key_1T1c))
        v_1BLr = k_1BLc[..., : mixer.latent[0]]
        out_BnHr = last_attention(q_BnHc, k_1BLc, v_1BLr, rows.place_Bn, sum(mixer.query) ** -0.5)
        return rows.join(torch.einsum("BtHr,Hvr->BtHv", out_BnHr, wv_Hvr), source_1Tr.shape[1])


def within_prompts(
    attend: Callable[..., Tensor],
    rows: Rows,
    q_1THh: Tensor,
    k_1TGh: Tensor,
    v_1TGv: Tensor,
    mask: Mask,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the attention output (1, T, H, v) of prompts that are concatenated, each attending within itself.

    Args:
        attend: the attention of training, called once for each prompt.
        rows: the prompts' numbers of tokens.
        q_1THh: queries of all prompts.
        k_1TGh: keys.
        v_1TGv: values.
        mask: causal, and with the layer's window.
        sinks_H: a logit of each head that takes part in the softmax without a value; None without sinks.
    """
    out_1THv = q_1THh.new_zeros(*q_1THh.shape[:3], v_1TGv.shape[-1])
    for first, end in rows.spans:
        n, window = end - first, mask.window
        unit = 4 * window if 0 < 4 * window < n else UNIT
        padded = [F.pad(x[:, first:end], (0, 0, 0, 0, 0, -n % unit)) for x in (q_1THh, k_1TGh, v_1TGv)]
        out_1THv[:, first:end] = attend(*padded, mask, sinks_H)[:, :n]
    return out_1THv


def last_attention(
    q_BnHh: Tensor,
    k_GBLh: Tensor,
    v_GBLv: Tensor,
    place_Bn: Tensor,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the attention output (B, n, H, v) of each row's new tokens over the cached keys up to their positions.

    Args:
        q_BnHh: queries of the new tokens.
        k_GBLh: cached keys; with a window those of each row's last L positions, some of which may be before its first.
        v_GBLv: cached values of the same positions.
        place_Bn: positions of the new tokens.
        scale: factor of the logits.
        window: number of last positions that a token attends to; 0 for all.
        sinks_H: a logit of each head that takes part in the softmax without a value; None without sinks.
    """
    q_GBgnh = q_BnHh.unflatten(2, (len(k_GBLh), -1)).permute(2, 0, 3, 1, 4)
    groups = q_GBgnh.shape[2:4]
    scores_GBgnL = promote(q_GBgnh.flatten(2, 3) @ k_GBLh.transpose(-1, -2)).unflatten(2, groups) * scale
    place_L, place_Bn1 = torch.arange(k_GBLh.shape[2], device=q_BnHh.device), place_Bn.unsqueeze(2)
    if window:
        place_B1L = place_L + place_Bn1[:, -1:] + 1 - len(place_L)
        hidden_BnL = (place_B1L > place_Bn1) | (place_B1L <= place_Bn1 - window) | (place_B1L < 0)
    else:
        hidden_BnL = place_L > place_Bn1
    scores_GBgnL.masked_fill_(hidden_BnL.unsqueeze(1), -torch.inf)
    if sinks_H is not None:
        sinks = promote(sinks_H).view(len(k_GBLh), 1, -1, 1, 1).expand(*scores_GBgnL.shape[:4], 1)
        scores_GBgnL = torch.cat((scores_GBgnL, sinks), -1)
    weights = scores_GBgnL.softmax(-1)[..., : k_GBLh.shape[2]].to(v_GBLv.dtype)
    return (weights.flatten(2, 3) @ v_GBLv).unflatten(2, groups).permute(1, 3, 0, 2, 4).flatten(2, 3)
