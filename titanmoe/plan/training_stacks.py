"""Training stacks whose steps can be priced: bytes, launches and messages of titanmoe's code and of others'.

`titanmoe plan --stack NAME` prices a mapping as that software would run it. A stack says what its code does, which is
counted or read from its sources; what is fitted to runs says so. Rates of devices and links are the same for all
(`titanmoe.plan.links.Factors`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from titanmoe.config import ConfigError

Bytes = tuple[float, float]
"""Bytes read and written forward and backward, per element in 16 bits."""


@dataclass(frozen=True)
class Stack:
    """Training software as a plan prices it: bytes of kernels, seconds of launches, messages it hides."""

    name: str
    norm: Bytes = (4, 8)
    rope: Bytes = (4, 4)
    swiglu: Bytes = (6, 15)
    permute: Bytes = (3, 7)
    residual: Bytes = (6, 4)
    regroup: Bytes = (4, 4)
    """Reordering of a routed token after an all-to-all, from the order of senders to that of experts."""
    expert_linear_bias: tuple[Bytes, Bytes] = ((0, 0), (0, 0))
    """Adding experts' biases, per hidden element and per output element, where no other kernel adds them."""
    memory: float = 1.0
    """Factor on all memory-bound work of a block."""
    router_in_parts: bool = True
    """Whether the router's float32 product is one of 16-bit parts."""
    selective: tuple[float, float] = (0.5, 0.0)
    """Fractions of forward's memory-bound work and of its products that recomputation of mode "selective" repeats."""
    head_products: int = 4
    """Products of the head in forward and backward together: 4 if backward computes the logits again."""
    joins_latent_heads: bool = False
    """Whether latent attention copies queries and keys to join their rotated and unrotated parts."""
    merges_ring: bool = True
    """Whether ring attention merges the outputs of shards by kernels of their own."""
    fsdp2: bool = True
    """Whether weights and gradients are copied as torch's FSDP2 copies them."""
    unshards_experts: bool = True
    """Whether experts that no data rank shares stay outside FSDP."""
    gathers_etp: bool = False
    """Whether the ranks of etp gather routed tokens after the all-to-all, instead of receiving a copy each."""
    hides_behind_shared: bool = True
    """Whether the shared expert is computed while routed tokens are in flight."""
    balances_stages: bool = True
    """Whether the stages with embedding and head get fewer layers."""
    host: float = 0.01
    """Seconds in which the host launches a block, forward and backward."""
    host_tp: float = 0.01
    """Seconds in which the host launches a block with tp > 1, forward and backward."""
    busiest: float = 1.0
    """Routed tokens of the busiest rank over the mean, under learned routing."""


TITANMOE = Stack("titanmoe")
"""Bytes agree with a rehearsal of whole layers (docs/benchmarks.md, "Outside"). host: Qwen3's layers with 512 tokens a
step on an H200 (docs/benchmarks.md, "On one GPU")."""
MEGATRON = Stack(
    "megatron",
    norm=(10, 20),
    swiglu=(6, 10),
    permute=(8, 8),
    regroup=(0, 0),
    expert_linear_bias=((16, 22), (28, 40)),
    router_in_parts=False,
    head_products=3,
    joins_latent_heads=True,
    merges_ring=False,
    fsdp2=False,
    unshards_experts=False,
    gathers_etp=True,
    hides_behind_shared=False,
    balances_stages=False,
    host=0.006,
    host_tp=0.006,
    busiest=1.04,
)
"""Kernels of TransformerEngine; gradients added to their sum by the products themselves. gpt-oss's experts clamp, join
and add biases by plain operations (its fused_bias_geglu.py and experts.py). TransformerEngine's ring works on two
shards at a time, so that merging is hidden (cp_stream in context_parallel.py). host: Qwen3-30B's blocks take 6.6 ms on
16 H100s (NVIDIA-NeMo/Megatron-Bridge, skills/nemo-mbridge-perf-expert-parallel-overlap)."""
AUTOMODEL = replace(MEGATRON, name="automodel", fsdp2=True)
"""TransformerEngine's kernels under FSDP2, as NeMo AutoModel has them."""
TORCHTITAN = Stack(
    "torchtitan",
    memory=3.5,
    router_in_parts=False,
    selective=(1.0, 0.5),
    head_products=3,
    unshards_experts=False,
    gathers_etp=True,
    hides_behind_shared=False,
    balances_stages=False,
    host=0.01,
    host_tp=0.03,
    busiest=1.3,
)
"""PyTorch's own operations under FSDP2 and DTensor: TorchTitan, prime-rl. memory: TorchTitan's layers move 3.8 times as
many bytes outside products and attention on Qwen3-30B-A3B, 2.9 on DeepSeek-V3 (scripts/bench/roofline.py). selective:
its per-operation policy saves every second product (torchtitan/distributed/activation_checkpoint.py). host_tp: fitted
to one run, of Qwen3-30B-A3B with tp 4 and 8,192 tokens a step. busiest: fitted to five, early in training."""
STACKS = {stack.name: stack for stack in (TITANMOE, MEGATRON, AUTOMODEL, TORCHTITAN)}


def stack_of(name: str) -> Stack:
    """Return the stack "titanmoe", "megatron", "automodel" or "torchtitan"; raise ConfigError for another name."""
    if name not in STACKS:
        raise ConfigError(f"--stack = {name} is not known: use {', '.join(STACKS)}")
    return STACKS[name]
