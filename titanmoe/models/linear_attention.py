"""Linear attention: a state of fixed size per head instead of keys and values (titanmoe.ops.gated_delta_rule).

Gated DeltaNet (arXiv 2412.06464) has beta = sigmoid(wb x) and decay = -exp(A_log) softplus(wa x + dt_bias), a
logarithm, both (R, c, H). GLA (own.linear_gate = "gla", arXiv 2312.06635) has no beta, and decay = log sigmoid(wg_b
wg_a x) / 16, (R, c, K, k). Queries, keys and values go through a convolution, heads through norm, SiLU(wz x) and wo.
`until` says where the document of each position ends, also before the segment; None if all are in one document.

Shapes: B samples, S positions of the attention slice, s owned positions (S over tp), D model, R segments of this rank
(titanmoe.models.sequence_segments), c positions of a segment, w positions before it that a convolution sees, C
channels, X = H * v, K key heads and H value heads of this rank, k and v the widths of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanmoe.comm.collectives import NO_GROUP, all_gather_autograd, reduce_scatter_autograd, to_local
from titanmoe.config.schema import Model
from titanmoe.mask import Mask
from titanmoe.models.layers import Linear, RMSNorm, constant, promote, swiglu, use_recomputable
from titanmoe.models.mixers.gated_delta import GLA_RANK, Heads
from titanmoe.models.sequence_segments import SequenceSegments
from titanmoe.ops import counter_rng, gated_delta_rule

GLA_TEMPERATURE = 16
"""Divisor of the logarithm of the decay in gated linear attention."""


def log_of_uniform(key: int, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return initial values of A_log, in the shape of `index`: logarithms of random numbers uniform in [0.01, 16).

    They are computed in float64, because devices differ in the last bit of a float32 logarithm.

    Args:
        key: key of the random numbers.
        index: indices of the elements in the full parameter, row-major.
    """
    return torch.log(0.01 + 15.99 * counter_rng.uniform(key, index, torch.float64)).to(dtype)


def softplus(x: Tensor) -> Tensor:
    """Return log(e^x + 1).

    torch 2.13 compiles the backward of its own softplus with other strides than the tensors have.
    """
    return torch.logaddexp(x, x.new_zeros(()))


def short_convolution(x_RcC: Tensor, before_RwC: Tensor, taps: Tensor, until: Tensor | None) -> Tensor:
    """Return SiLU of each channel's weighted sum over the last w + 1 positions of the same document, (R, c, C).

    Args:
        x_RcC: inputs of the segments.
        before_RwC: the last inputs before each segment.
        taps: weights of each channel, (C, w + 1); the last one is that of the position itself.
        until: where the document of each position ends, (R, at least w + c); None if all positions are in one.
    """
    length, last = x_RcC.shape[1], before_RwC.shape[1]
    padded = torch.cat((before_RwC, x_RcC), 1)
    y_RcC = padded[:, last:] * taps[:, last]
    for distance in range(1, last + 1):
        earlier_RcC = padded[:, last - distance : last - distance + length] * taps[:, last - distance]
        if until is not None:
            end = until.shape[1] - distance
            same_Rc = until[:, end - length : end] == until[:, -length:]
            earlier_RcC = earlier_RcC.where(same_Rc.unsqueeze(-1), 0)
        y_RcC = y_RcC + earlier_RcC
    return F.silu(y_RcC)


class GatedDelta(nn.Module):
    """The linear attention layer of a block: gated delta rule, or gated linear attention."""

    recomputable_methods = ("convolve", "down")
    initial = {"dt_bias": constant(1), "A_log": log_of_uniform}

    def __init__(self, model: Model, layer: int, dtype: torch.dtype, kernels: str = "auto"):
        super().__init__()
        heads = Heads.of(model)
        widths = heads.key_width, heads.key_width, heads.value_width
        self.wq, self.wk, self.wv = (Linear(model.dim, width, dtype=dtype) for width in widths)
        self.wz = Linear(model.dim, heads.value_width, dtype=dtype)
        self.wo = Linear(heads.value_width, model.dim, dtype=dtype)
        taps = (nn.Parameter(torch.empty(width, heads.conv_width, dtype=dtype)) for width in widths)
        self.conv_q, self.conv_k, self.conv_v = taps
        self.norm = RMSNorm(heads.value_dim, model.norm_eps, dtype, kernels=kernels)
        self.wb = self.wa = self.dt_bias = self.A_log = self.wg_a = self.wg_b = None
        if heads.gate == "gla":
            self.wg_a = Linear(model.dim, GLA_RANK, dtype=dtype)
            self.wg_b = Linear(GLA_RANK, heads.key_width, bias=True, dtype=dtype)
        else:
            self.wb, self.wa = (Linear(model.dim, heads.values, dtype=dtype) for _ in "ba")
            self.dt_bias, self.A_log = (nn.Parameter(torch.empty(heads.values, dtype=dtype)) for _ in range(2))
        self.heads, self.kernels, self.tp = heads, kernels, NO_GROUP
        self.segments = SequenceSegments()
        self.use_recomputable = use_recomputable

    def forward(self, x_BsD: Tensor, rope: tuple[Tensor, Tensor], mask: Mask) -> Tensor:
        """Return the output (B, s, D) for the tokens that this rank owns. Collective over tp and, by `segments`, cp.

        Args:
            x_BsD: normed hidden states of these tokens.
            rope: not used.
            mask: says where documents end; its window is not used.
        """
        qkv, z, decay, beta = self.project(self.segments.split(all_gather_autograd(x_BsD, 1, self.tp)))
        out_RcHv = self.mix(qkv, decay, beta, mask)
        return reduce_scatter_autograd(self.segments.join(self.down(out_RcHv, z)), 1, self.tp)

    # A method so that generation can replace it.
    def mix(self, qkv: Sequence[Tensor], decay: Tensor, beta_RcH: Tensor | None, mask: Mask) -> Tensor:
        """Return the recurrence's output (R, c, H, v), for R segments of c positions. Collective over cp.

        A sample has several segments on a rank with the zigzag placement.

        Args:
            qkv: projected queries, keys and values before the convolution, (R, c, C) each.
            mask: says where documents end.
        """
        last = self.heads.conv_width - 1
        before = self.segments.inputs_before(qkv, last)
        until = None if mask.until_BL is None else self.segments.of_full(mask.until_BL, max(1, last))
        return self.use_recomputable(
            lambda: self.convolve(qkv, before, until), lambda q, k, v: self.recur(q, k, v, decay, beta_RcH, until)
        )

    def project(self, x_RcD: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor | None]:
        """Return ([queries, keys, values] before the convolution, z before SiLU, logarithm of the decay, beta or None).

        Queries, keys, values and z are (R, c, channels); decay and beta as `gates` returns them.
        """
        qkvz = []
        for linear in (self.wq, self.wk, self.wv, self.wz):
            y_RcC, x_RcD = linear(x_RcD, pass_on=True)
            qkvz.append(y_RcC)
        return qkvz[:3], qkvz[3], *self.gates(x_RcD)

    def gates(self, x_RcD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logarithm of the decay, and beta or, in GLA, None; both in float32 at least."""
        if self.wa is None:
            decay = -softplus(-promote(self.wg_b(self.wg_a(x_RcD)))) / GLA_TEMPERATURE
            return decay.unflatten(-1, (-1, self.heads.key_dim)), None
        b_RcH, x_RcD = self.wb(x_RcD, pass_on=True)
        A_log, bias = (promote(to_local(p)) for p in (self.A_log, self.dt_bias))
        return -A_log.exp() * softplus(promote(self.wa(x_RcD)) + bias), promote(b_RcH).sigmoid()

    def convolve(self, qkv: Sequence[Tensor], before: Sequence[Tensor], until: Tensor | None) -> tuple[Tensor, ...]:
        """Return queries, keys and values after the convolution, each (R, c, heads, width of a head).

        Args:
            qkv: projected queries, keys and values, (R, c, C) each.
            before: the last inputs of each of the three before each segment, (R, w, C) each.
            until: where the document of each position ends, (R, at least w + c), or None.
        """
        taps, widths = (self.conv_q, self.conv_k, self.conv_v), (self.heads.key_dim,) * 2 + (self.heads.value_dim,)
        return tuple(
            short_convolution(x, x_before, to_local(taps), until).unflatten(-1, (-1, width))
            for x, x_before, taps, width in zip(qkv, before, taps, widths, strict=True)
        )

    def recur(
        self,
        q_RcKk: Tensor,
        k_RcKk: Tensor,
        v_RcHv: Tensor,
        decay: Tensor,
        beta_RcH: Tensor | None,
        until: Tensor | None,
    ) -> Tensor:
        """Return the recurrence's output (R, c, H, v). Collective over cp: a segment begins with another's last state.

        Queries, keys and values are those after the convolution. `until` has at least one position before the segment.
        """
        length = q_RcKk.shape[1]
        documents = (None, None) if until is None else (until[:, -length:], until[:, -length - 1])
        chunks = gated_delta_rule.make_segment(
            q_RcKk, k_RcKk, v_RcHv, decay, beta_RcH, *documents, kernels=self.kernels
        )
        before = self.segments.states_before(*chunks.state_map()) if len(self.segments.order) > 1 else None
        return chunks.forward(before)[0]

    def down(self, out_RcHv: Tensor, z_RcX: Tensor) -> Tensor:
        """Return wo (norm(out) * SiLU(z)), (R, c, D); with tp this rank's summand of it.

        `out_RcHv` is the recurrence's output, `z_RcX` the product with wz before SiLU.
        """
        z, normed = (promote(x) for x in (z_RcX, self.norm(out_RcHv).flatten(2)))
        return self.wo(swiglu(z, normed).to(z_RcX.dtype))
