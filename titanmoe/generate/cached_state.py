"""The cache of linear attention: its state, and the last inputs of its convolution.

Shapes: T tokens of a forward, P new prompts, B texts of this rank, n new tokens of each, w earlier ones that the
convolution sees, C channels of queries, keys or values, K key heads and H value heads of this rank, k and v the widths
of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from titanmoe.config.schema import Model
from titanmoe.generate.cache import Cache, CacheSize, PerText, PerWindow
from titanmoe.generate.cached_texts import CachedTexts
from titanmoe.mask import Mask
from titanmoe.models.linear_attention import GatedDelta
from titanmoe.models.mixers.gated_delta import Heads
from titanmoe.ops import gated_delta_rule


class CachedState(Cache):
    """Cache of a gated delta mixer: its recurrent state and the last inputs of its convolution."""

    def __init__(self, mixer: GatedDelta, texts: CachedTexts):
        self.mixer, self.texts = mixer, texts
        self.inputs = [PerWindow(texts, mixer.heads.conv_width) for _ in range(3)]
        self.state = PerText(texts)
        self.stored = *self.inputs, self.state
        mixer.mix = self

    @staticmethod
    def size(model: Model, layer: int, tp: int) -> CacheSize:
        heads = Heads.of(model)
        channels, state = 2 * heads.key_width + heads.value_width, heads.key_dim * heads.value_width
        return CacheSize(channels // tp, heads.conv_width, state // tp)

    def __call__(self, qkv: Sequence[Tensor], decay: Tensor, beta_1TH: Tensor | None, mask: Mask) -> Tensor:
        texts = self.texts
        if texts.reads_prompts:
            return self.add_prompts(qkv, decay, beta_1TH)
        qkv, gates = ([None if x is None else texts.split(x) for x in xs] for xs in (qkv, (decay, beta_1TH)))
        missing = [self.mixer.heads.conv_width - 1 - each.x.shape[2] for each in self.inputs]
        before = [F.pad(each.x.squeeze(1), (0, 0, n, 0)) for each, n in zip(self.inputs, missing, strict=True)]
        for each, x_BnC in zip(self.inputs, qkv, strict=True):
            each.add(x_BnC.unsqueeze(2))
        out_BnHv, self.state.x = self.run(self.state.x, before, qkv, *gates)
        return texts.join(out_BnHv, decay.shape[1])

    def add_prompts(self, qkv: Sequence[Tensor], decay: Tensor, beta_1TH: Tensor | None) -> Tensor:
        """Add new prompts to the cache, one by one because their lengths differ; return the mixer's output.

        Args:
            qkv: for queries, keys and values, the inputs of the convolution (1, T, C), one prompt after another as
                `texts.spans` says.
            decay: logarithms of the factors by which the state decays at each token, (1, T, ...).
            beta_1TH: how strongly each token is written to the state; None if the mixer has none.

        Returns:
            The output (1, T, H, v), 0 after the last prompt's end.
        """
        texts, heads = self.texts, self.mixer.heads
        for each, x_1TC in zip(self.inputs, qkv, strict=True):
            each.add_prompts(x_1TC.unsqueeze(2))
        before = [x.new_zeros(1, heads.conv_width - 1, x.shape[-1]) for x in qkv]
        out_1THv = torch.zeros_like(qkv[2]).unflatten(2, (-1, heads.value_dim))
        state_PHkv = decay.new_zeros(len(texts.spans), out_1THv.shape[2], heads.key_dim, heads.value_dim)
        for number, (first, end) in enumerate(texts.spans):
            prompt, gates = ([None if x is None else x[:, first:end] for x in xs] for xs in (qkv, (decay, beta_1TH)))
            state_1Hkv = state_PHkv[number : number + 1]
            out_1THv[:, first:end], state_1Hkv[:] = self.run(state_1Hkv, before, prompt, *gates)
        self.state.add_prompts(state_PHkv)
        return out_1THv

    def run(
        self,
        state_BHkv: Tensor,
        before: Sequence[Tensor],
        qkv: Sequence[Tensor],
        decay: Tensor,
        beta_BnH: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the mixer's output (B, n, H, v) for new tokens, and the recurrent state (B, H, k, v) after them.

        Change neither the given state nor the cache.

        Args:
            state_BHkv: the state before the new tokens.
            before: for queries, keys and values, the w inputs of the convolution before the new tokens, (B, w, C) each.
            qkv: for queries, keys and values, the inputs of the convolution at the new tokens, (B, n, C) each.
            decay: logarithms of the state's decay at each new token: (B, n, H), for GLA also of each k.
            beta_BnH: how strongly each token is written to the state; None if the mixer has none.
        """
        q_BnKk, k_BnKk, v_BnHv = self.mixer.convolve(qkv, before, None)
        inputs = q_BnKk, k_BnKk, v_BnHv, decay, beta_BnH
        if decay.shape[1] > 1:
            return gated_delta_rule.make_segment(*inputs, kernels=self.mixer.kernels).forward(state_BHkv)
        out_BHv, state_BHkv = gated_delta_rule.step_token(state_BHkv, *(None if x is None else x[:, 0] for x in inputs))
        return out_BHv.unsqueeze(1), state_BHkv
