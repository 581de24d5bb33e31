"""The gated delta rule (arXiv 2412.06464) and gated linear attention (GLA, arXiv 2312.06635), a chunk at a time.

A head has a state S in place of keys and values, and each token changes it:

    delta    S <- e^decay (I - beta k k^T) S + beta k v^T    decay a number of each head; q and k are scaled to length 1
    GLA      S <- e^decay * S + k v^T                        decay a number of each row of S; no beta
    both     out = S^T q / sqrt(length of q)

Where a document begins, S is 0 before its first token. Decays are logarithms and at most 0.

What a chunk of tokens does to the state, and what it reads from it, is linear:

    S_after = carry S + gain        out = read S + own

So these four are computed for all chunks at once, and only S goes from chunk to chunk. A run of tokens does the same:
its `map` is what a rank of context parallelism sends of it.

Every exponent is a sum of decays from one token to a later one. None is positive, so nothing overflows.

Autograd keeps the inputs as they are and no more: backward computes everything else again.

Shapes: B samples, S tokens of a run, H value heads, of which each of R key heads serves G consecutive ones, k and v
their widths; N chunks of C tokens; Z is B times H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 64
"""Tokens, a power of 2."""


def of_length_one(x: Tensor) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class ChunkedRun(NamedTuple):
    """A run of tokens, computed in chunks."""

    q_BSRk: Tensor
    k_BSRk: Tensor
    v_BSHv: Tensor
    decay: Tensor
    beta_BSH: Tensor | None
    begins_BS: Tensor
    """Whether a document begins."""

    def map(self) -> tuple[Tensor, Tensor]:
        """M (B, H, k, k) and S (B, H, k, v) of the whole run: state_out = M state_in + S."""
        return _again_in_backward(_map, *self)

    def run(self, state_BHkv: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The outputs (B, S, H, v), in v's dtype, and the state after the run, in float32 or wider."""
        return _again_in_backward(_run, state_BHkv, *self)


def cut(
    q_BSRk: Tensor,
    k_BSRk: Tensor,
    v_BSHv: Tensor,
    decay: Tensor,
    beta_BSH: Tensor | None,
    document_BS: Tensor | None = None,
    before_B: Tensor | None = None,
) -> ChunkedRun:
    """q and k as projected, neither repeated for each value head nor scaled. decay: (B, S, H), or (B, S, H, k) and no
    beta for GLA. document_BS: numbers that change where a document begins; None: nowhere. before_B: that of the token
    before the run; None: the run goes on with the document of the incoming state.
    """
    if document_BS is None:
        begins = torch.zeros(v_BSHv.shape[:2], dtype=torch.bool, device=v_BSHv.device)
    else:
        before = document_BS[:, 0] if before_B is None else before_B
        begins = document_BS.diff(dim=1, prepend=before.unsqueeze(1)) != 0
    return ChunkedRun(q_BSRk, k_BSRk, v_BSHv, decay, beta_BSH, begins)


def step(
    state_BHkv: Tensor, q_BRk: Tensor, k_BRk: Tensor, v_BHv: Tensor, decay: Tensor, beta_BH: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token: its output (B, H, v), and the state after it. decay: (B, H), or (B, H, k) for GLA."""
    R, wide = q_BRk.shape[1], state_BHkv.dtype
    state, v, decay = (x.to(wide).unflatten(1, (R, -1)) for x in (state_BHkv, v_BHv, decay))
    q, k = (x.unsqueeze(2) for x in _scaled(q_BRk.to(wide), k_BRk.to(wide), beta_BH))
    state = state * (decay.exp() if beta_BH is None else decay.exp().unsqueeze(-1)).unsqueeze(-1)
    if beta_BH is not None:
        v = (v - (k.unsqueeze(-2) @ state).squeeze(-2)) * beta_BH.to(wide).unflatten(1, (R, -1)).unsqueeze(-1)
    state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
    out = (q.unsqueeze(-2) @ state).squeeze(-2)
    return out.flatten(1, 2).to(v_BHv.dtype), state.flatten(1, 2)


def _scaled(q: Tensor, k: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    if beta is not None:
        q, k = of_length_one(q), of_length_one(k)
    return q * q.shape[-1] ** -0.5, k


def _again_in_backward(function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


class _Parts(NamedTuple):
    carry: Tensor
    """(Z, N, k, k); for GLA its diagonal, (Z, N, k, 1)."""
    gain_ZNkv: Tensor
    read_ZNCk: Tensor
    own_ZNCv: Tensor


def _map(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    carry, gain, _, _ = _parts(*inputs)
    k, v = gain.shape[-2:]
    identity = torch.eye(k, k + v, dtype=gain.dtype, device=gain.device).expand(len(gain), -1, -1)
    after = _states(carry, F.pad(gain, (k, 0)), identity)[-1].unflatten(0, (len(inputs[0]), -1))
    return after[..., :k], after[..., k:]


def _run(state_BHkv: Tensor | None, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    carry, gain, read, own = _parts(*inputs)
    (B, S), dtype = inputs[0].shape[:2], inputs[2].dtype
    begin = torch.zeros_like(gain[:, 0]) if state_BHkv is None else state_BHkv.to(gain.dtype).flatten(0, 1)
    *before, after = _states(carry, gain, begin)
    out_ZSv = (own + read @ torch.stack(before, 1)).flatten(1, 2)[:, :S]
    return out_ZSv.to(dtype).unflatten(0, (B, -1)).transpose(1, 2), after.unflatten(0, (B, -1))


def _states(carry: Tensor, gain_ZNkv: Tensor, state_Zkv: Tensor) -> list[Tensor]:
    """Before each chunk, and after the last one."""
    states, then = [state_Zkv], torch.addcmul if carry.shape[-1] == 1 else torch.baddbmm
    for c, g in zip(carry.unbind(1), gain_ZNkv.unbind(1), strict=True):
        states.append(then(g, c, states[-1]))
    return states


def _parts(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, begins: Tensor) -> _Parts:
    length, R = q.shape[1:3]
    C = min(CHUNK, 1 << (length - 1).bit_length())
    wide = torch.promote_types(torch.promote_types(v.dtype, decay.dtype), torch.float32)

    def chunks(x_BSHx: Tensor) -> Tensor:
        """(B, R, G, N, C, x), filled up with tokens that change nothing."""
        x = F.pad(x_BSHx.to(wide), (0, 0, 0, 0, 0, -length % C))
        return x.unflatten(1, (-1, C)).movedim(3, 1).unflatten(1, (R, -1))

    q, k = _scaled(chunks(q), chunks(k), beta)
    since = chunks(decay if beta is None else decay.unsqueeze(-1)).cumsum(4)
    end = since[..., -1:, :]
    # The number of documents that have begun since the chunk did.
    document = F.pad(begins, (0, -length % C)).unflatten(1, (-1, C)).cumsum(2)[:, None, None, :, :, None]
    last = document[..., -1:, :]
    through = end.exp().masked_fill(last != 0, 0)
    q_before, k_before = (x * since.exp().masked_fill(document != 0, 0) for x in (q, k))
    k_after = k * (end - since).exp().masked_fill(document != last, 0)
    seen = (document == document.mT).tril()
    if beta is None:
        weights = _gla_weights(q, k, since).masked_fill(~seen, 0)
        parts = through.mT, k_after.mT @ chunks(v), q_before, weights @ chunks(v)
    else:
        kept = (since - since.mT).masked_fill(~seen, -torch.inf).exp()
        beta = chunks(beta.unsqueeze(-1))
        # What each token writes: of the state before the chunk, and for itself.
        both = torch.linalg.solve_triangular(
            k @ k.mT * kept * beta, torch.cat((k_before, chunks(v)), -1) * beta, upper=False, unitriangular=True
        )
        widths = k.shape[-1], v.shape[-1]
        carry, gain = (k_after.mT @ both).split(widths, -1)
        read, own = (q @ k.mT * kept @ both).split(widths, -1)
        parts = torch.eye(widths[0], dtype=wide, device=k.device) * through - carry, gain, q_before - read, own
    return _Parts(*(x.flatten(0, 2) for x in parts))


def _gla_weights(q: Tensor, k: Tensor, since: Tensor) -> Tensor:
    """Of each pair of tokens of a chunk: the sum over k of q k e^decay between them, for those not in order 0.

    Twice as many tokens at a time: between two halves, decays add up to the first's end and on from there.
    """
    weights = (q * k).sum(-1, keepdim=True).unsqueeze(-1).expand(*since.shape[:-1], 1, 1)
    while (half := weights.shape[-1]) < since.shape[-2]:
        (_, q_late), (k_early, _), (early, late) = (x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (q, k, since))
        middle = early[..., -1:, :]
        across = q_late * (late - middle).exp() @ (k_early * (middle - early).exp()).mT
        first, second = weights.unflatten(-3, (-1, 2)).unbind(-3)
        weights = torch.cat((F.pad(first, (0, half)), torch.cat((across, second), -1)), -2)
    return weights.squeeze(-3)
