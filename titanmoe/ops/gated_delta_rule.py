"""The gated delta rule (arXiv 2412.06464) and gated linear attention (GLA, arXiv 2312.06635), a chunk at a time.

A head has a state S, 0 before a document's first token, which each token changes and then reads. Decays are logarithms:

    delta    S <- e^decay (I - beta k k^T) S + beta k v^T    decay: one number per head; q and k are scaled to length 1
    GLA      S <- e^decay * S + k v^T                        decay: one number per row of S; no beta
    both     out = S^T q / sqrt(width of q)

Shapes: B samples, S tokens of a segment, H value heads, of which each of R key heads serves G consecutive ones, k and v
their widths; N chunks of C tokens; Z is B times H; x is k, or 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from titanmoe.ops import device

CHUNK = 64
"""The tokens of a chunk, a power of 2."""
FLA = find_spec("fla") is not None
"""Whether fla-core is installed."""


class ChunkedSegment(NamedTuple):
    """A segment of consecutive tokens, with the inputs that the gated delta rule needs of them.

    If beta is None they are the inputs of gated linear attention.
    """

    q_BSRk: Tensor
    k_BSRk: Tensor
    v_BSHv: Tensor
    decay: Tensor
    beta_BSH: Tensor | None
    begins_BS: Tensor | None
    """Whether a document begins at each token; None if none begins in the segment."""
    kernels: str

    def state_map(self) -> tuple[Tensor, Tensor]:
        """Return the linear map of the state that the segment makes: M and N of state_after = M state_before + N.

        Returns:
            M (B, H, k, k) and N (B, H, k, v), in float32 or wider.
        """
        *tokens, kernels = self
        (B, _, H, v), k = self.v_BSHv.shape, self.k_BSRk.shape[-1]
        # A state that is wider, of which values write to the end.
        identity = torch.eye(k, k + v, dtype=_wide(self.v_BSHv, self.decay), device=self.v_BSHv.device)
        identity = identity.expand(B, H, -1, -1)
        if uses_fla(kernels, self.v_BSHv):
            q, key, v_BSHv, *others = self
            after = ChunkedSegment(q, key, F.pad(v_BSHv, (k, 0)), *others).forward(identity)[1]
        else:
            after = _recompute_in_backward(_state_after, identity, *tokens)
        return after[..., :k], after[..., k:]

    def forward(self, state_BHkv: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the segment's outputs and the state after it. Differentiable; without fla-core, backward recomputes.

        Args:
            state_BHkv: the state before the segment; None for zeros.

        Returns:
            The outputs (B, S, H, v), in v's dtype, and the state (B, H, k, v), in float32 or wider.
        """
        *tokens, kernels = self
        if uses_fla(kernels, self.v_BSHv):
            return _run_fla(state_BHkv, *tokens)
        return _recompute_in_backward(_run, state_BHkv, *tokens)


def make_segment(
    q_BSRk: Tensor,
    k_BSRk: Tensor,
    v_BSHv: Tensor,
    decay: Tensor,
    beta_BSH: Tensor | None,
    document_BS: Tensor | None = None,
    before_B: Tensor | None = None,
    *,
    kernels: str = "torch",
) -> ChunkedSegment:
    """Build a ChunkedSegment, with the tokens at which documents begin found from document numbers.

    Args:
        q_BSRk: queries as projected, neither repeated for each value head nor scaled.
        k_BSRk: keys as projected, neither repeated for each value head nor scaled.
        decay: logarithms of the decays, at most 0: (B, S, H); for GLA (B, S, R, k) or (B, S, H, k).
        beta_BSH: the strength with which each token is written; None for GLA.
        document_BS: numbers that change where a document begins; None: nowhere.
        before_B: the document number of the token before the segment; None: the first document of the segment began
            before it, and the incoming state belongs to it.
        kernels: "torch" for the formulas of this file; else kernels of fla-core where they can run.
    """
    begins = None
    if document_BS is not None:
        before = document_BS[:, 0] if before_B is None else before_B
        begins = document_BS.diff(dim=1, prepend=before.unsqueeze(1)) != 0
    return ChunkedSegment(
        q_BSRk=q_BSRk, k_BSRk=k_BSRk, v_BSHv=v_BSHv, decay=decay, beta_BSH=beta_BSH, begins_BS=begins, kernels=kernels
    )


def uses_fla(kernels: str, x: Tensor) -> bool:
    """Return whether fla-core's kernels compute the rule: if installed, on GPUs, in 16 bits, with kernels not "torch".

    Not in float32, where these kernels round to TF32 in between, nor where Triton miscompiles them.
    """
    return FLA and kernels != "torch" and x.is_cuda and x.element_size() == 2 and not is_miscompiled(x.device)


@cache
def is_miscompiled(gpu: torch.device) -> bool:
    """Return whether the installed Triton miscompiles the backward of fla-core's kernels on this GPU.

    Triton 3.4 to 3.7.0 does on Hopper (fla-org/flash-linear-attention, issue 640), where fla-core raises an error in
    backward.
    """
    triton = tuple(map(int, re.findall(r"\d+", version("triton"))[:3]))
    return device.capability(gpu)[0] == 9 and (3, 4) <= triton < (3, 7, 1)


def step_token(
    state_BHkv: Tensor, q_BRk: Tensor, k_BRk: Tensor, v_BHv: Tensor, decay: Tensor, beta_BH: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence to one token of each sample, for generation.

    Args:
        state_BHkv: the state before the token.
        q_BRk: queries as projected, neither repeated for each value head nor scaled.
        k_BRk: keys as projected, neither repeated for each value head nor scaled.
        decay: logarithms of the decays, at most 0: (B, H); for GLA (B, R, k) or (B, H, k).
        beta_BH: the strength with which the token is written; None for GLA.

    Returns:
        The token's output (B, H, v), in v's dtype, and the state after it, a new tensor (B, H, k, v).
    """
    R, wide = q_BRk.shape[1], state_BHkv.dtype
    q, k, state, v, decay = (x.to(wide).unflatten(1, (R, -1)) for x in (q_BRk, k_BRk, state_BHkv, v_BHv, decay))
    q, k = _scaled(q, k, beta_BH)
    state = state * decay.exp().view(*decay.shape[:3], -1, 1)
    if beta_BH is not None:
        v = (v - (k.unsqueeze(-2) @ state).squeeze(-2)) * beta_BH.to(wide).unflatten(1, (R, -1)).unsqueeze(-1)
    state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
    out = (q.unsqueeze(-2) @ state).squeeze(-2)
    return out.flatten(1, 2).to(v_BHv.dtype), state.flatten(1, 2)


def l2_normalize(x: Tensor) -> Tensor:
    """Return x scaled to length 1 over the last dim."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _scaled(q: Tensor, k: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return q / sqrt(its width), and k; for the delta rule, which has beta, both are scaled to length 1 first."""
    if beta is not None:
        q, k = l2_normalize(q), l2_normalize(k)
    return q * q.shape[-1] ** -0.5, k


def _wide(v: Tensor, decay: Tensor) -> torch.dtype:
    """Return the dtype to compute in: the wider one of v's and the decay's, float32 at least."""
    return torch.promote_types(torch.promote_types(v.dtype, decay.dtype), torch.float32)


def _recompute_in_backward(function: Callable, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def _state_after(state_BHkx: Tensor, *tokens: Tensor) -> Tensor:
    """Return the state after a segment from that before it, which may be wider: values write to the last columns."""
    carry, gain_ZNkv, _ = _chunks(*tokens)
    gain_ZNkx = F.pad(gain_ZNkv, (state_BHkx.shape[-1] - gain_ZNkv.shape[-1], 0))
    return _states(carry, gain_ZNkx, state_BHkx.flatten(0, 1))[-1].unflatten(0, state_BHkx.shape[:2])


def _run(state_BHkv: Tensor | None, *tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the results of `ChunkedSegment.forward` by the formulas of this file; `tokens` are the inputs."""
    carry, gain_ZNkv, reading = _chunks(*tokens)
    (B, S, H, _), dtype = tokens[2].shape, tokens[2].dtype
    begin = torch.zeros_like(gain_ZNkv[:, 0]) if state_BHkv is None else state_BHkv.to(gain_ZNkv).flatten(0, 1)
    *before, after = _states(carry, gain_ZNkv, begin)
    read_ZNCk, own_ZNCv = reading()
    out_ZSv = (own_ZNCv + read_ZNCk @ torch.stack(before, 1)).flatten(1, 2)[:, :S]
    return out_ZSv.to(dtype).unflatten(0, (B, H)).transpose(1, 2), after.unflatten(0, (B, H))


def _states(carry: Tensor, gain_ZNkv: Tensor, state_Zkv: Tensor) -> list[Tensor]:
    """Return a list of the states before each chunk and after the last chunk, (Z, k, v) each.

    Args:
        carry: (Z, N, k, k), or (Z, N, k, 1) if each chunk's matrix is diagonal.
        gain_ZNkv: what each chunk adds to the state.
        state_Zkv: the state before the first chunk.
    """
    states, after = [state_Zkv], torch.addcmul if carry.shape[-1] == 1 else torch.baddbmm
    for carry_, gain in zip(carry.unbind(1), gain_ZNkv.unbind(1), strict=True):
        states.append(after(gain, carry_, states[-1]))
    return states


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, begins: Tensor | None
) -> tuple[Tensor, Tensor, Callable[[], tuple[Tensor, Tensor]]]:
    """Compute what each chunk of C tokens does: state_after = carry @ state + gain, and outputs = read @ state + own.

    Args:
        q: queries (B, S, R, k) as projected, as keys are; v has the values (B, S, H, v).
        decay: logarithms of the decays, (B, S, H); for GLA (B, S, R, k) or (B, S, H, k).
        beta: the strength with which each token is written; None for GLA.
        begins: a mask (B, S) of the first tokens of documents; None for none.

    Returns:
        carry (Z, N, k, k) or, for GLA, (Z, N, k, 1); gain (Z, N, k, v); and a function that computes read (Z, N, C, k)
        and own (Z, N, C, v).
    """
    B, S, R = q.shape[:3]
    G, wide = v.shape[2] // R, _wide(v, decay)
    C = min(CHUNK, 1 << (S - 1).bit_length())

    def chunks(x_BSHx: Tensor) -> Tensor:
        """Return x as (B, R, G, N, C, x): N chunks of C tokens, padded with tokens that change nothing."""
        x = F.pad(x_BSHx.to(wide), (0, 0, 0, 0, 0, -S % C))
        return x.unflatten(1, (-1, C)).movedim(3, 1).unflatten(1, (R, -1))

    def heads(x: Tensor) -> Tensor:
        """Return x with the dims of samples and value heads merged to one of Z = B * H: (Z, N, ...)."""
        return x.expand(B, R, G, *x.shape[3:]).flatten(0, 2)

    if begins is None:
        begins = torch.zeros(B, S, dtype=torch.bool, device=q.device)
    begins = F.pad(begins, (0, -S % C)).unflatten(1, (-1, C))[:, None, None]
    q, k = _scaled(chunks(q), chunks(k), beta)
    if beta is None:
        carry, gain, reading = _gla(q, k, chunks(v), _decays(chunks(decay), begins))
    else:
        decays = _decays(chunks(decay.unsqueeze(-1)), begins)
        carry, gain, reading = _delta(q, k, chunks(v), chunks(beta.unsqueeze(-1)), decays)
    return heads(carry), heads(gain), lambda: tuple(heads(x) for x in reading())


class _Decays(NamedTuple):
    """The decays of the state between tokens of the same chunk. The last dim x is 1, or the width k for GLA."""

    since: Tensor
    """The logarithm of the decay from the chunk's begin to each token: (..., C, x)."""
    from_begin: Tensor
    """The decay from the chunk's begin to each token, 0 if a document begins in between."""
    to_end: Tensor
    """The decay from each token to the chunk's end, 0 if a document begins in between."""
    through: Tensor
    """The decay of the full chunk, 0 if a document begins in it: (..., 1, x)."""
    seen: Tensor
    """Whether token j is in the document of token i and not later: (..., C, C), by i and j."""


def _running_sums(x_Cx: Tensor) -> Tensor:
    """Return inclusive running sums over the second to last dim: deterministic on GPUs, unlike torch's of floats."""
    length, distance = x_Cx.shape[-2], 1
    while distance < length:
        x_Cx = x_Cx + F.pad(x_Cx[..., :-distance, :], (0, 0, distance, 0))
        distance *= 2
    return x_Cx


def _decays(decay: Tensor, begins: Tensor) -> _Decays:
    """Return a chunk's decays from each token's logarithm (..., C, x) and whether a document begins there (..., C)."""
    since, document = _running_sums(decay), begins.cumsum(-1).unsqueeze(-1)
    end, last = since[..., -1:, :], document[..., -1:, :]
    return _Decays(
        since,
        since.exp().masked_fill(document != 0, 0),
        (end - since).exp().masked_fill(document != last, 0),
        end.exp().masked_fill(last != 0, 0),
        (document == document.mT).tril(),
    )


def _delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decays: _Decays) -> tuple[Tensor, Tensor, Callable]:
    """Return carry, gain and the reading function of `_chunks` for the gated delta rule; inputs are (..., C, x)."""
    since, from_begin, to_end, through, seen = decays
    decay_between = (since - since.mT).masked_fill(~seen, -torch.inf).exp()
    widths = k.shape[-1], v.shape[-1]
    # What a token writes depends on what those before it wrote: of the state at the begin; of this chunk's values.
    writes = torch.cat((k * from_begin, v), -1) * beta
    writes = torch.linalg.solve_triangular(k @ k.mT * decay_between * beta, writes, upper=False, unitriangular=True)
    of_state, gain = ((k * to_end).mT @ writes).split(widths, -1)
    identity = torch.eye(widths[0], dtype=k.dtype, device=k.device)

    def reading() -> tuple[Tensor, Tensor]:
        of_state, of_chunk = (q @ k.mT * decay_between @ writes).split(widths, -1)
        return q * from_begin - of_state, of_chunk

    return identity * through - of_state, gain, reading


def _gla(q: Tensor, k: Tensor, v: Tensor, decays: _Decays) -> tuple[Tensor, Tensor, Callable]:
    """Return carry (diagonal), gain and the function that computes (read, own), as `_chunks` does, for GLA.

    Inputs are (..., C, x).
    """

    def reading() -> tuple[Tensor, Tensor]:
        weights = _gla_weights(q, k, decays.since).masked_fill(~decays.seen, 0)
        return q * decays.from_begin, weights @ v

    return decays.through.mT, (k * decays.to_end).mT @ v, reading


def _gla_weights(q: Tensor, k: Tensor, since: Tensor) -> Tensor:
    """Return the weight (..., C, C) of each earlier token in each token's output: sum over k of q k e^(decay).

    The decay is that between the two tokens; `since` is the sum of its logarithms since the chunk's begin. Later tokens
    get 0, but earlier ones of other documents do not. First each token with itself, then chunks twice as long each
    time, whose decays add up at the first half's end.
    """
    weights = (q * k).sum(-1, keepdim=True).unsqueeze(-1).expand(*since.shape[:-1], 1, 1)
    while (half := weights.shape[-1]) < since.shape[-2]:
        (_, q_late), (k_early, _), (early, late) = (x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (q, k, since))
        middle = early[..., -1:, :]
        across = q_late * (late - middle).exp() @ (k_early * (middle - early).exp()).mT
        first, second = weights.unflatten(-3, (-1, 2)).unbind(-3)
        weights = torch.cat((F.pad(first, (0, half)), torch.cat((across, second), -1)), -2)
    return weights.squeeze(-3)


# ---- by fla-core

NOTHING_LEFT = -100.0
"""A decay of which float32 has nothing left; small enough for sums of decays beside it to be right to 1e-5."""


def _run_fla(
    state_BHkv: Tensor | None,
    q_BSRk: Tensor,
    k_BSRk: Tensor,
    v_BSHv: Tensor,
    decay: Tensor,
    beta_BSH: Tensor | None,
    begins_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs (B, S, H, v) and the state after the segment, by the kernels of fla-core 0.6 (github.com/fla-org).

    **They have not trained on a GPU**: with the Tritons of the Hopper GPUs at hand, their backward is miscompiled
    (`is_miscompiled`). Tests put stand-ins with the same arguments in their place. Decays and states are in float32. A
    document is begun by a decay: the kernels' own interface, positions in a packed sequence, makes the host wait.

    Args:
        state_BHkv: the state before the segment; None for zeros.
        decay: logarithms of the decays, at most 0: (B, S, H); for GLA (B, S, R, k) or (B, S, H, k).
        beta_BSH: beta, how much of its value a token writes; None for GLA.
        begins_BS: whether a document begins at each token; None if none does.
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
