"""The transformer: embedding, blocks, head. A pipeline stage is a transformer with some of them missing.

Shapes: B samples, S positions of the attention slice, s owned positions (S over tp), D model.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from titanmoe.config.schema import Config
from titanmoe.models.attention import Attention
from titanmoe.models.count import has_experts
from titanmoe.models.latent_attention import LatentAttention
from titanmoe.models.layers import FeedForward, RMSNorm, SharedExpert, rope_angles
from titanmoe.models.vocabulary import Embedding, Head
from titanmoe.moe.layer import MoE
from titanmoe.tokens import Tokens


class Block(nn.Module):
    def __init__(self, config: Config, layer: int, microbatches: int, dtype: torch.dtype):
        super().__init__()
        model = config.model
        self.attention_norm = RMSNorm(model.dim, model.norm_eps, dtype)
        self.attention = LatentAttention(model, dtype) if model.kv_lora_rank else Attention(model, dtype)
        self.ffn_norm = RMSNorm(model.dim, model.norm_eps, dtype)
        self.moe = self.ffn = None
        if has_experts(model, layer):
            shared = (
                SharedExpert(model.dim, model.shared_hidden, model.shared_gate, dtype) if model.shared_hidden else None
            )
            self.moe = MoE(model, config.moe, shared, config.training.seed, layer, microbatches, dtype)
        else:
            self.ffn = FeedForward(model.dim, model.dense_hidden, dtype)

    def forward(self, x_BsD: Tensor, rope: tuple[Tensor, Tensor], tokens: Tokens) -> Tensor:
        return self.feed(self.attend(x_BsD, rope, tokens.document_BL), tokens)

    # The two halves are methods so that recomputation can wrap either of them.
    def attend(self, x_BsD: Tensor, rope: tuple[Tensor, Tensor], document_BL: Tensor | None) -> Tensor:
        return x_BsD + self.attention(self.attention_norm(x_BsD), rope, document_BL)

    def feed(self, x_BsD: Tensor, tokens: Tokens) -> Tensor:
        y_BsD = self.ffn_norm(x_BsD)
        return x_BsD + (self.ffn(y_BsD) if self.moe is None else self.moe(y_BsD, tokens))


class Transformer(nn.Module):
    def __init__(
        self,
        config: Config,
        microbatches: int,
        dtype: torch.dtype,
        layers: Iterable[int] | None = None,
        first: bool = True,
        last: bool = True,
    ):
        super().__init__()
        self.shape = model = config.model
        self.embed = Embedding(model.vocab_size, model.dim, dtype) if first else None
        # Keyed by the layer's global number, so that names do not depend on the stage.
        self.layers = nn.ModuleDict(
            {
                str(i): Block(config, i, microbatches, dtype)
                for i in (range(model.num_layers) if layers is None else layers)
            }
        )
        self.head = Head(model.vocab_size, model.dim, model.norm_eps, dtype) if last else None
        if model.tie_embeddings and first and last:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, tokens: Tokens, labels_BS: Tensor | None = None) -> Tensor:
        """x: ids (B, S) on the first stage, else the previous stage's (B, s, D). Returns (B, s, D), loss or logits."""
        if self.embed is not None:
            x = self.embed(x)
        turned = self.shape.qk_rope_head_dim or self.shape.head_dim
        rope = rope_angles(tokens.position_BS, self.shape, turned, x.dtype)
        for block in self.layers.values():
            x = block(x, rope, tokens)
        return x if self.head is None else self.head(x, labels_BS)

    def moe_layers(self) -> dict[int, MoE]:
        return {int(i): block.moe for i, block in self.layers.items() if block.moe is not None}
