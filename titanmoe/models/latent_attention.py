"""Multi-head latent attention: keys and values of all heads come from one narrow latent vector per token.

arXiv 2405.04434, section 2.1, and arXiv 2412.19437. wq_a, q_norm and wq_b (or wq alone) make the queries; wkv_a makes
the latent, which kv_norm normalises, and then the key that RoPE rotates, one for all heads; wkv_b makes keys without
positions and values from the latent, (H, n + v) rows. RoPE's pairs are (i, i + p / 2), and DeepSeek's files are
reordered. `rope` has cos and sin of RoPE's angles for the attention slice, (B, S, 1, p) each.

Shapes: B samples, L sequence, S positions of the attention slice, s owned positions (S over tp), D model, r a latent, H
heads of this rank, h query and key width, n its part without positions, p its part with, v value width, X = H * h, m =
n + v.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanmoe.comm.collectives import NO_GROUP, all_gather_autograd, reduce_scatter_autograd
from titanmoe.config.schema import Model
from titanmoe.mask import Mask
from titanmoe.models.attention import causal_attention
from titanmoe.models.layers import Linear, RMSNorm, rotate, use_recomputable, yarn_mscale
from titanmoe.ops.autograd_functions import apply_function
from titanmoe.ops.kernels import fused

LATENT_EPS = 1e-6
"""Epsilon of the latents' norms: the published code's, whatever the model's own (Moonlight: 1e-5)."""


class LatentAttention(nn.Module):
    """Multi-head latent attention of a block."""

    def __init__(self, model: Model, layer: int, dtype: torch.dtype, kernels: str = "auto"):
        super().__init__()
        heads, latent = model.num_heads, model.kv_lora_rank
        queries = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
        self.wq = self.wq_a = self.q_norm = self.wq_b = None
        if model.q_lora_rank:
            self.wq_a = Linear(model.dim, model.q_lora_rank, dtype=dtype)
            self.q_norm = RMSNorm(model.q_lora_rank, LATENT_EPS, dtype, model.norm_adds_one, kernels)
            self.wq_b = Linear(model.q_lora_rank, queries, dtype=dtype)
        else:
            self.wq = Linear(model.dim, queries, dtype=dtype)
        self.wkv_a = Linear(model.dim, latent + model.qk_rope_head_dim, dtype=dtype)
        self.kv_norm = RMSNorm(latent, LATENT_EPS, dtype, model.norm_adds_one, kernels)
        self.wkv_b = Linear(latent, heads * (model.qk_nope_head_dim + model.v_head_dim), dtype=dtype)
        self.wo = Linear(heads * model.v_head_dim, model.dim, dtype=dtype)
        self.latent = [latent, model.qk_rope_head_dim]
        self.query = [model.qk_nope_head_dim, model.qk_rope_head_dim]
        self.key_value = [model.qk_nope_head_dim, model.v_head_dim]
        # On queries alone: every attention kernel divides by sqrt(h) itself.
        self.sharpen = yarn_mscale(model, model.rope_mscale_all_dim) ** 2
        self.kernels, self.tp = kernels, NO_GROUP
        self.attend = causal_attention
        self.use_recomputable = use_recomputable

    def forward(self, x_BsD: Tensor, rope: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """Return the output (B, s, D) for the tokens that this rank owns. Collective over tp, and over cp by `attend`.

        Args:
            x_BsD: normed hidden states of these tokens.
            mask: which positions see each other.
        """
        # Latents are computed from the rank's own tokens and gathered over tp: they are narrower than the residual
        # stream.
        both_Bsr, x_BsD = self.wkv_a(x_BsD, pass_on=True)
        latent_Bsr, key_Bsp = both_Bsr.split(self.latent, -1)
        both_BSr = all_gather_autograd(torch.cat((self.kv_norm(latent_Bsr), key_Bsp), -1), 1, self.tp)
        latent_BSr, key_BSp = both_BSr.split(self.latent, -1)
        source_Bsr = self.q_norm(self.wq_a(x_BsD)) if self.wq is None else x_BsD
        source_BSr = all_gather_autograd(source_Bsr, 1, self.tp)
        out_BSHv = self.mix(source_BSr, latent_BSr, key_BSp, rope, mask)
        return reduce_scatter_autograd(self.wo(out_BSHv.flatten(2)), 1, self.tp)

    # A method so that generation can replace it.
    def mix(
        self, source_BSr: Tensor, latent_BSr: Tensor, key_BSp: Tensor, rope: tuple[Tensor, Tensor], mask: Mask
    ) -> Tensor:
        """Return attention's output of each head (B, S, H, v). Collective over cp, by `attend`.

        The inputs are of all positions of the attention slice, gathered over tp.

        Args:
            source_BSr: the normed query latent or, if there is none, the block's normed hidden states (B, S, D).
            latent_BSr: the normed key-value latent.
            key_BSp: the part of the key that RoPE rotates, before RoPE, one for all heads.
        """
        if self.wq is None:
            return self.use_recomputable(
                lambda: (self.queries(source_BSr, rope), *self.keys_and_values(latent_BSr, key_BSp, rope)),
                lambda q, k, v: self.attend(q, k, v, mask),
            )
        q_BSHh = self.queries(source_BSr, rope)  # a product of the full width: not recomputed
        return self.use_recomputable(
            lambda: self.keys_and_values(latent_BSr, key_BSp, rope), lambda k, v: self.attend(q_BSHh, k, v, mask)
        )

    def queries(self, source_BSr: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return the queries of this rank's heads (B, S, H, h), with RoPE applied, times YaRN's factor on logits.

        `source_BSr` is the normed query latent or, if there is none, the block's normed hidden states (B, S, D).
        """
        if self.sharpen != 1:  # here, because it is narrower than all queries
            source_BSr = source_BSr * self.sharpen
        q_BSX = (self.wq_b if self.wq is None else self.wq)(source_BSr)
        if self.in_one_pass(q_BSX):
            from titanmoe.ops.kernels.latent_heads import Queries

            width = sum(self.query)
            return apply_function(Queries, q_BSX, q_BSX.shape[-1] // width, *rope).unflatten(-1, (-1, width))
        q_BSHn, q_BSHp = q_BSX.unflatten(-1, (-1, sum(self.query))).split(self.query, -1)
        return torch.cat((q_BSHn, rotate(q_BSHp, rope, self.kernels)), -1)

    def keys_and_values(
        self, latent_BSr: Tensor, key_BSp: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return keys (B, S, H, h), with RoPE applied, and values (B, S, H, v) of this rank's heads.

        Args:
            latent_BSr: the normed key-value latent.
            key_BSp: the part of the key that RoPE rotates, before RoPE, one for all heads.
        """
        kv_BSHm, key_BS1p = self.wkv_b(latent_BSr).unflatten(-1, (-1, sum(self.key_value))), key_BSp.unsqueeze(2)
        if self.in_one_pass(kv_BSHm):
            from titanmoe.ops.kernels.latent_heads import KeysAndValues

            return apply_function(KeysAndValues, kv_BSHm, key_BS1p, self.key_value[1], *rope)
        k_BSHn, v_BSHv = kv_BSHm.split(self.key_value, -1)
        k_BSHp = rotate(key_BS1p, rope, self.kernels).expand(-1, -1, k_BSHn.shape[2], -1)
        return torch.cat((k_BSHn, k_BSHp), -1), v_BSHv

    def in_one_pass(self, x: Tensor) -> bool:
        """Return whether Triton kernels, and not torch, split projections like x into heads and apply RoPE."""
        return fused(self.kernels, x) and not torch.compiler.is_compiling()  # the compiler fuses these by itself
