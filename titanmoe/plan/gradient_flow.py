"""What backward asks gradients of in each block, and so what forward has to keep for it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from titanmoe.config.blocks import has_experts
from titanmoe.models import tensors
from titanmoe.models.tensors import Tuning
from titanmoe.plan.sizes import ModelKey


class Flow(NamedTuple):
    """Whether backward asks for gradients of parts of a block: of an input, if anything before it is trained."""

    into_attention: bool = True
    """Of what attention's norm gives."""
    attention_weights: bool = True
    """Of those that read it."""
    into_ffn: bool = True
    router_weights: bool = True
    ffn_weights: bool = True
    """Of those of the dense network or of experts that read its input."""
    shared_weights: bool = True
    out_of_ffn: bool = True
    attention_ranks: int = 0
    """Of all adapters together."""
    dense_ranks: int = 0
    """Those of the dense network or the shared expert."""
    expert_ranks: tuple[int, ...] = ()

    @property
    def attention(self) -> bool:
        return self.into_attention or self.attention_weights

    @property
    def ffn(self) -> bool:
        return self.into_ffn or self.router_weights or self.ffn_weights


@lru_cache(maxsize=1024)
def flow_of_blocks(key: ModelKey, tuning: Tuning) -> tuple[Flow, ...]:
    model, flows = key.model, []
    if tuning.trains_all:
        return (Flow(),) * len(key.mixers)
    reached = not tuning.freezes("embed.weight")
    for layer, mixer in enumerate(key.mixers):
        experts, block = has_experts(model, layer), tensors.block_name(model, layer)
        parts = tensors.of_block(model, mixer, experts)
        adapters = tuning.adapters(block, parts | (tensors.expert_splits(model) if experts else {}))
        more = tensors.of_router(model) | tensors.of_experts(model) if experts else {}
        trained = [part for part in (*parts, *more, *adapters) if not tuning.freezes(f"{block}.{part}")]
        after_scores = tuple(f"attention.{part.removesuffix('.weight')}" for part in mixer.after_scores)
        network = "moe.experts." if experts else "ffn."

        def any_of(prefix: str, but: str | tuple[str, ...] = (), trained: list[str] = trained) -> bool:
            return any(part.startswith(prefix) and not part.startswith(but) for part in trained)

        downs = [(part, shape[-2]) for part, (shape, _) in adapters.items() if part.endswith("A")]
        attention, routed = "attention.", "moe.experts."
        into_attention = reached or any_of("attention_norm")
        into_ffn = into_attention or any_of(attention) or any_of("ffn_norm")
        reached = into_ffn or any_of("moe.") or any_of("ffn.")
        flows.append(
            Flow(
                into_attention,
                any_of(attention, after_scores),
                into_ffn,
                any_of("moe.router."),
                any_of(network, f"{network}w2"),
                any_of("moe.shared.", "moe.shared.w2"),
                reached,
                sum(rank for part, rank in downs if part.startswith(attention)),
                sum(rank for part, rank in downs if not part.startswith((attention, routed))),
                tuple(rank for part, rank in downs if part.startswith(routed)),
            )
        )
    return tuple(flows)
