"""The caches of attention: keys and values, or the latents of latent attention.

Shapes: T tokens of a forward, B texts of this rank, n new tokens of each, L positions, H query heads and G key
heads of this rank, g query heads of each key head, h query and key width, v value width; of latent attention r a
latent, p the dims of a key with RoPE; c a key and what is cached with it, X = B * G, Y = g * n.
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
from titanmoe.generate.cached_texts import CachedTexts
from titanmoe.mask import Mask
from titanmoe.models.latent_attention import LatentAttention
from titanmoe.models.layers import rotate

UNIT = 16
"""Multiple that prompts are padded to in attention, whose kernels on GPUs read masks in aligned rows."""


class CachedKeys(Cache):
    """Cache of keys and values after RoPE and norms, for every mixer that calls `attend` with them."""

    def __init__(self, mixer: Any, texts: CachedTexts):
        self.attend, self.texts = mixer.attend, texts
        mixer.attend = self

    @staticmethod
    def size(model: Model, layer: int, tp: int) -> CacheSize:
        return CacheSize(2 * max(1, model.num_kv_heads // tp) * model.head_dim, window(model, layer))

    def __call__(
        self, q_1THh: Tensor, k_1TGh: Tensor, v_1TGv: Tensor, mask: Mask, sinks_H: Tensor | None = None
    ) -> Tensor:
        texts = self.texts
        if texts.reads_prompts:
            if not self.stored:
                self.stored = [PerWindow(texts, mask.window) if mask.window else PerToken(texts)]
            self.stored[0].add_prompts(torch.cat((k_1TGh, v_1TGv), -1))
            return within_prompts(self.attend, texts, q_1THh, k_1TGh, v_1TGv, mask, sinks_H=sinks_H)
        q_BnHh, kv_1TGc = texts.split(q_1THh), torch.cat((k_1TGh, v_1TGv), -1)
        k_BGLh, v_BGLv = self.stored[0].add(texts.split(kv_1TGc)).split((k_1TGh.shape[-1], v_1TGv.shape[-1]), -1)
        mask_XYL = texts.mask(q_BnHh, k_BGLh, mask.window)
        out_BnHv = last_attention(q_BnHh, k_BGLh, v_BGLv, mask_XYL, q_BnHh.shape[-1] ** -0.5, sinks_H)
        return texts.join(out_BnHv, q_1THh.shape[1])


class CachedLatents(Cache):
    """Cache of latent attention: each token's latent and the dims of its key with RoPE, shared by all heads.

    New tokens attend to them as one key head. A query is multiplied by the rows of `wkv_b` that make its head's keys
    (q . Wn l = (Wn^T q) . l), and the attended latents by the rows that make values. Prompts are computed as in
    training.
    """

    def __init__(self, mixer: LatentAttention, texts: CachedTexts):
        self.mixer, self.mix, self.texts, self.stored = mixer, mixer.mix, texts, [PerToken(texts)]
        mixer.attend, mixer.mix = partial(within_prompts, mixer.attend, texts), self

    @staticmethod
    def size(model: Model, layer: int, tp: int) -> CacheSize:
        return CacheSize(model.kv_lora_rank + model.qk_rope_head_dim)

    def __call__(
        self, source_1Tr: Tensor, latent_1Tr: Tensor, key_1Tp: Tensor, rope: tuple[Tensor, Tensor], mask: Mask
    ) -> Tensor:
        mixer, texts = self.mixer, self.texts
        key_1T1c = torch.cat((latent_1Tr.unsqueeze(2), rotate(key_1Tp.unsqueeze(2), rope, mixer.kernels)), -1)
        if texts.reads_prompts:
            self.stored[0].add_prompts(key_1T1c)
            return self.mix(source_1Tr, latent_1Tr, key_1Tp, rope, mask)
        wn_Hnr, wv_Hvr = (
            mixer.wkv_b.effective_weight().unflatten(0, (-1, sum(mixer.key_value))).split(mixer.key_value, 1)
        )
        q_BnHn, q_BnHp = texts.split(mixer.queries(source_1Tr, rope)).split(mixer.query, -1)
        q_BnHc = torch.cat((torch.einsum("BtHn,Hnr->BtHr", q_BnHn, wn_Hnr), q_BnHp), -1)
        k_B1Lc = self.stored[0].add(texts.split(key_1T1c))
        mask_XYL, v_B1Lr = texts.mask(q_BnHc, k_B1Lc, 0), k_B1Lc[..., : mixer.latent[0]]
        out_BnHr = last_attention(q_BnHc, k_B1Lc, v_B1Lr, mask_XYL, sum(mixer.query) ** -0.5)
        return texts.join(torch.einsum("BtHr,Hvr->BtHv", out_BnHr, wv_Hvr), source_1Tr.shape[1])


def within_prompts(
    attend: Callable[..., Tensor],
    texts: CachedTexts,
    q_1THh: Tensor,
    k_1TGh: Tensor,
    v_1TGv: Tensor,
    mask: Mask,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the attention output (1, T, H, v) of prompts that are concatenated, each attending within itself.

    Positions after the last prompt's end are 0.

    Args:
        attend: the attention of training, called with (q, k, v, mask, sinks_H) of one prompt at a time, padded at its
            end; returns (1, T, H, v).
        texts: has the prompts' numbers of tokens.
        q_1THh: queries of all prompts.
        k_1TGh: keys.
        v_1TGv: values.
        mask: causal, and with the layer's window.
        sinks_H: a logit of each head that takes part in the softmax without a value; None without sinks.
    """
    out_1THv = q_1THh.new_zeros(*q_1THh.shape[:3], v_1TGv.shape[-1])
    for first, end in texts.spans:
        n, window = end - first, mask.window
        unit = 4 * window if 0 < 4 * window < n else UNIT
        padded = [F.pad(x[:, first:end], (0, 0, 0, 0, 0, -n % unit)) for x in (q_1THh, k_1TGh, v_1TGv)]
        out_1THv[:, first:end] = attend(*padded, mask, sinks_H)[:, :n]
    return out_1THv


def last_attention(
    q_BnHh: Tensor, k_BGLh: Tensor, v_BGLv: Tensor, mask_XYL: Tensor, scale: float, sinks_H: Tensor | None = None
) -> Tensor:
    """Return the attention output (B, n, H, v) of each text's new tokens over cached keys.

    Args:
        q_BnHh: queries of the new tokens.
        k_BGLh: cached keys.
        v_BGLv: cached values of the same positions.
        mask_XYL: what is added to the logits (`CachedTexts.mask`).
        scale: factor of the logits.
        sinks_H: a logit of each head that takes part in the softmax without a value; None without sinks.
    """
    # Two batched products and not F.scaled_dot_product_attention: under a mask, its kernels for GPUs neither share keys
    # among grouped queries nor spread the positions of few long texts over a GPU.
    (B, n, _, h), (_, G, L, _) = q_BnHh.shape, k_BGLh.shape
    q_XYh = q_BnHh.unflatten(2, (G, -1)).permute(0, 2, 3, 1, 4).reshape(B * G, -1, h)
    logits_XYL = torch.baddbmm(mask_XYL, q_XYh, k_BGLh.flatten(0, 1).transpose(1, 2), alpha=scale)
    if sinks_H is not None:
        sinks_XY1 = sinks_H.to(q_BnHh.dtype).view(1, G, -1, 1).expand(B, G, -1, n).reshape(B * G, -1, 1)
        logits_XYL = torch.cat((logits_XYL, sinks_XY1), -1)
    out_XYv = logits_XYL.softmax(-1)[..., :L] @ v_BGLv.flatten(0, 1)
    return out_XYv.view(B, G, -1, n, v_BGLv.shape[-1]).permute(0, 3, 1, 2, 4).flatten(2, 3)
