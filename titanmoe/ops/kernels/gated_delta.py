"""The gated delta rule and gated linear attention by the kernels of fla-core 0.6 (github.com/fla-org).

Reference: `titanmoe.ops.gated_delta`. **Not run yet**: no GPU was at hand. Tests put stand-ins with the same arguments
in their place.

The kernels keep what they get, with q and k of length 1 instead, and 64 numbers of 16 bits per token and value head.

Shapes: as in titanmoe.ops.gated_delta.
"""

from __future__ import annotations

from torch import Tensor

NOTHING_LEFT = -100.0
"""A decay of which float32 has nothing left; small enough for sums of decays beside it to be right to 1e-5."""


def run(
    state_BHkv: Tensor | None,
    q_BSRk: Tensor,
    k_BSRk: Tensor,
    v_BSHv: Tensor,
    decay: Tensor,
    beta_BSH: Tensor | None,
    begins_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Decays and states are in float32. A document is begun by a decay: the kernels' own way, places in a packed
    sequence, makes the host wait.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla

    if begins_BS is not None:
        decay = decay.masked_fill(begins_BS.view(*begins_BS.shape, *(1,) * (decay.ndim - 2)), NOTHING_LEFT)
    states = dict(initial_state=state_BHkv, output_final_state=True)
    if beta_BSH is not None:
        return chunk_gated_delta_rule(
            q_BSRk, k_BSRk, v_BSHv, g=decay, beta=beta_BSH, use_qk_l2norm_in_kernel=True, **states
        )
    heads = v_BSHv.shape[2]
    q, k, decay = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q_BSRk, k_BSRk, decay))
    return chunk_gla(q, k, v_BSHv, g=decay, **states)
