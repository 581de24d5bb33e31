"""Measure what autograd saves and what that costs in time: experts, latent attention, and a large vocabulary's loss.

    python scripts/bench/memory.py [--rounds 9] [--json FILE]

Saved bytes are those of the storages allocated in a forward pass that outlive it, of experts also their input; the peak
is that of a forward and a backward pass on top of the operands, including the head's gradient (128 MiB). Both are
counted tensor by tensor (tests/support/live_bytes.py), without parameters. Times are CPU seconds of forward and
backward on one thread over those of the first variant, the median over the rounds. All in float32. B samples, S
positions, T tokens, R routed tokens, e experts, D model, F hidden width, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.live_bytes import LiveBytes
from titanmoe.comm.collectives import NO_GROUP
from titanmoe.config.schema import ActivationCheckpoint, Config, Model, MoE
from titanmoe.mask import CAUSAL
from titanmoe.models.latent_attention import LatentAttention
from titanmoe.models.layers import rope_angles
from titanmoe.models.transformer import Transformer
from titanmoe.models.vocabulary import chunk_count, chunked_cross_entropy, cross_entropy
from titanmoe.moe.expert_products import plain_swiglu
from titanmoe.moe.experts import Experts
from titanmoe.moe.grouped_mm import Groups, grouped_product
from titanmoe.parallel.recompute import apply_recomputation

Variant = Callable[[], Tensor]
Row = dict[str, float | str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each variant")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes: checks that it runs, measures nothing")
    args = parser.parse_args()
    if args.tiny:
        args.rounds = 1
    scale = 8 if args.tiny else 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tables = {}
    for name, unit, make in (
        (f"experts: 64, top 8, model {768 // scale}, hidden 256", "saved, bytes per token", experts),
        ("latent attention: DeepSeek-V3, 16 heads", "saved, bytes per token", latent_attention),
        (f"loss: {1024 // scale} tokens, vocabulary {131072 // scale}, model 256", "peak, MiB", loss),
    ):
        tables[name] = rows = list(make(args.rounds, scale))
        print(f"\n{name}\n{'':<44}{unit:>22}{'of the first':>14}{'time':>8}")
        for row in rows:
            ratio = row["bytes"] / rows[0]["bytes"]
            print(f"{row['variant']:<44}{row['bytes']:22,.0f}{ratio:14.2f}{row['time']:8.2f}")
    print(f"\ntorch {torch.__version__}, {platform.machine()}, one thread, {args.rounds} rounds")
    if args.json:
        args.json.write_text(json.dumps(tables | {"torch": torch.__version__, "command": " ".join(sys.argv)}, indent=1))


def experts(rounds: int, scale: int) -> Iterator[Row]:
    """Yield a row for each implementation of experts: bytes per token that it saves, input included; relative time.

    `scale` divides the numbers of tokens and channels; 1 for the sizes to measure.
    """
    tokens, top_k, dim = 512 // scale, 8, 768 // scale
    made = init(Experts(Model(num_experts=64, dim=dim, expert_hidden=256), MoE(), torch.float32))
    count_e = torch.full((64,), tokens * top_k // 64)
    groups = Groups(count_e)
    x_RD = torch.randn(tokens * top_k, dim, requires_grad=True)
    weight_R1 = torch.rand(tokens * top_k, 1, requires_grad=True)

    def gate_and_up() -> tuple[Tensor, Tensor]:
        return grouped_product(x_RD, made.w1, groups), grouped_product(x_RD, made.w3, groups)

    def after() -> Tensor:
        gate_RF, up_RF = gate_and_up()
        return grouped_product(F.silu(gate_RF) * up_RF, made.w2, groups) * weight_R1

    def before() -> Tensor:
        return grouped_product(plain_swiglu(*gate_and_up(), weight_R1, False), made.w2, groups)

    variants = {
        "plain, weighted after the down projection": after,
        "plain, weighted before it": before,
        "titanmoe": lambda: made.products(x_RD, weight_R1, count_e),
    }
    # Every variant also saves its input, which dispatch does not.
    yield from compare(
        variants,
        rounds,
        lambda variant: (bytes_after_forward(variant, [x_RD, weight_R1, *made.parameters()]) + x_RD.nbytes) / tokens,
    )


def latent_attention(rounds: int, scale: int) -> Iterator[Row]:
    """Yield a row for latent attention without and with selective recomputation: saved bytes per token, relative time.

    The bytes are without the input. `scale` divides the length and the model's width; 1 for the sizes to measure.
    """
    samples, length = 1, 512 // scale
    model = Model(
        dim=2048 // scale, num_layers=1, num_heads=16, num_kv_heads=16, kv_lora_rank=512, q_lora_rank=1536,
        head_dim=192, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_experts=1, top_k=1,
        expert_hidden=8,
    )  # fmt: skip
    x_BSD = torch.randn(samples, length, model.dim, requires_grad=True)
    rope = rope_angles(torch.arange(length).expand(samples, length), model, model.qk_rope_head_dim, torch.float32)

    def attention(mode: str) -> LatentAttention:
        transformer = init(Transformer(Config(model=model), 1, torch.float32))
        apply_recomputation(transformer, ActivationCheckpoint(mode=mode))
        return transformer.layers["0"].attention

    modes = {mode: attention(mode) for mode in ("none", "selective")}
    known = [x_BSD, *rope, *(p for made in modes.values() for p in made.parameters())]
    variants = {
        f"activation_checkpoint.mode = {mode}": lambda made=made: made(x_BSD, rope, CAUSAL)
        for mode, made in modes.items()
    }
    yield from compare(variants, rounds, lambda variant: bytes_after_forward(variant, known) / (samples * length))


def loss(rounds: int, scale: int) -> Iterator[Row]:
    """Yield a row for each number of chunks in which the loss is computed: peak of memory in MiB, and relative time.

    `scale` divides the number of tokens and the vocabulary; 1 for the sizes to measure. At most 3 rounds are run.
    """
    tokens, dim, vocabulary = 1024 // scale, 256, 131072 // scale
    x_TD = torch.randn(tokens, dim, requires_grad=True)
    weight_VD = (0.02 * torch.randn(vocabulary, dim)).requires_grad_()
    label_T = torch.randint(vocabulary, (tokens,))
    variants = {"loss_chunks = 0": lambda: cross_entropy(F.linear(x_TD, weight_VD), label_T, NO_GROUP)[0]}
    for requested in (4, -1, 16, 64):
        n = chunk_count(tokens, vocabulary, 4, requested)
        variants[f"loss_chunks = {requested}" + f" ({n})" * (requested == -1)] = lambda n=n: chunked_cross_entropy(
            x_TD, weight_VD, label_T, NO_GROUP, n
        )[0]

    def peak(variant: Variant) -> float:
        x_TD.grad = weight_VD.grad = None
        with LiveBytes([x_TD, weight_VD]) as live:
            run(variant)
        return live.peak / 2**20

    yield from compare(variants, min(rounds, 3), peak)


def init(module: nn.Module) -> nn.Module:
    """Draw a module's weights from a normal distribution of std 0.02, in place, and return the module."""
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.02)
    return module


def bytes_after_forward(variant: Variant, but: Iterable[Tensor]) -> int:
    """Return the bytes that a forward pass leaves in use, without its output and the known tensors `but`."""
    with LiveBytes(but) as live:
        out = variant()
        return live.now - out.nbytes


def run(variant: Variant) -> None:
    """Run a variant's forward and backward."""
    out = variant()
    out.backward(torch.ones_like(out))


def compare(variants: dict[str, Variant], rounds: int, measure: Callable[[Variant], float]) -> Iterator[Row]:
    """Yield a row for each variant: its name, what `measure` returns as "bytes", and "time" over the first variant's.

    The time is the median ratio over the rounds, after an untimed one; `measure` is called once, after all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(rounds + 1):
        for name, variant in variants.items():
            began = time.process_time()
            run(variant)
            if round_number:  # the first warms up
                times[name].append(time.process_time() - began)
    first = next(iter(times.values()))
    for name, variant in variants.items():
        ratios = [a / b for a, b in zip(times[name], first, strict=True)]
        yield {"variant": name, "bytes": measure(variant), "time": statistics.median(ratios)}


if __name__ == "__main__":
    main()
