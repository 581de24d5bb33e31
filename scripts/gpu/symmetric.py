"""Test the dispatcher over symmetric memory on one GPU: one rank, two ranks on the same GPU, and speed.

    python scripts/gpu/symmetric.py [--device cuda|cpu] [--json FILE] [--seconds S]

Each check runs in processes of its own with a time limit, because a rendezvous that one rank does not reach waits
forever. It raises Unsupported, with torch's reason, if the machine refuses to share memory; then the checks of one rank
run with `plain_memory`: the same kernels on memory of the device that is not shared.

T tokens, D model, K top-k, e experts of this rank, R routed tokens received, S slots of the send buffer.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from ranks import SPARE, OverHost, Rank, Unsupported, first_line, run  # noqa: E402
from rows import Rows, elapsed, median_seconds  # noqa: E402

from titanmoe.comm import collectives  # noqa: E402
from titanmoe.config.schema import Config  # noqa: E402
from titanmoe.moe.dispatchers.alltoall import AllToAll  # noqa: E402
from titanmoe.moe.dispatchers.dispatcher import Dispatcher, ExpertRanks  # noqa: E402
from titanmoe.moe.dispatchers.symm_mem import Symmetric  # noqa: E402
from titanmoe.moe.dispatchers.symmetric_buffers import SymmetricBuffers, allocate_shared  # noqa: E402
from titanmoe.moe.experts import Experts  # noqa: E402
from titanmoe.train.runtime import describe_segments, use_expandable_segments  # noqa: E402


class PlainHandle:
    """Replacement for the handle that torch's rendezvous returns, for one rank on memory that is not shared."""

    def __init__(self, buffer: Tensor, group: str):
        self.buffer = buffer

    def get_remote_tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.buffer.view(shape)

    def barrier(self) -> None:
        """Return at once, because there is no other rank."""


def prepare(here: Rank, plain: bool) -> None:
    """Share some symmetric memory as a test; with `plain` first replace it by plain memory, for the whole process.

    Raises Unsupported if the machine refuses to share memory.
    """
    if plain:
        symm_mem.empty, symm_mem.rendezvous = torch.empty, PlainHandle
    share_memory(here)


def share_memory(here: Rank, numbers: int = 2**20) -> tuple[Tensor, Any]:
    """Allocate float32 numbers of symmetric memory; return the tensor and torch's handle. Collective over the ranks.

    Raises Unsupported if the machine refuses to share memory.
    """
    try:
        here.reached("rendezvous")
        buffer, handle = allocate_shared((numbers,), torch.float32, here.device, here.group.process_group)
    except RuntimeError as error:
        raise Unsupported(first_line(error)) from error
    if handle is None:
        raise Unsupported("rendezvous returns None")
    return buffer, handle


def memory(here: Rank, plain_memory: bool) -> dict[str, Any]:
    """Check allocation, rendezvous, writing and reading through the handle, and barriers.

    Returns "ms to share" and "us a barrier"; on a GPU also a "note" on the allocator's segments. Raises AssertionError
    if what was written is not read.
    """
    seconds = elapsed(lambda: prepare(here, plain_memory))
    buffer, handle = share_memory(here)
    here.reached("write and read")
    want, kind = torch.arange(len(buffer), device=here.device, dtype=buffer.dtype), here.device.type
    handle.barrier()
    handle.get_remote_tensor(here.group.rank, buffer.shape, buffer.dtype).copy_(want)
    handle.barrier()
    assert torch.equal(buffer, want), "what was written through the handle is not there"
    if kind == "cuda" and not plain_memory:
        assert torch.equal(handle.get_buffer(here.group.rank, buffer.shape, buffer.dtype), want), (
            "get_buffer shows another"
        )
    here.reached("barrier")
    figures = {"ms to share": seconds * 1e3, "us a barrier": median_seconds(handle.barrier, kind) * 1e6}
    return figures | ({"note": describe_segments()} if kind == "cuda" else {})


def make_config(dim: int, experts: int, top_k: int, factor: float) -> Config:
    """Return a config with the symmetric-memory dispatcher and these sizes; all else is as by default.

    Args:
        dim: width of the model and of each expert.
        experts: number of experts, over all ranks.
        top_k: experts of a token.
        factor: moe.symm_mem_factor.
    """
    config = Config()
    config.moe.dispatcher, config.moe.symm_mem_factor = "symm_mem", factor
    config.model.dim, config.model.expert_hidden = dim, dim
    config.model.num_experts, config.model.top_k = experts, top_k
    return config


def make_dispatchers(here: Rank, config: Config, tokens: int, ep: int = 1, etp: int = 1) -> tuple[Symmetric, AllToAll]:
    """Return a dispatcher over symmetric memory with its buffers, and an all-to-all one to compare with. Collective.

    Args:
        here: this rank.
        config: has the sizes of the model.
        tokens: number of tokens of each rank.
        ep: number of ranks that the experts are divided among.
        etp: number of ranks that each expert is sharded over.
    """
    here.reached("reserve")
    ranks, experts = ExpertRanks(here.group, ep, etp), config.model.num_experts
    symmetric, plain = Symmetric(experts), AllToAll(experts)
    symmetric.place(ranks)
    if here.group.size > 1:
        plain.place(ranks)
    symmetric.memory = SymmetricBuffers(config.model, config.moe, ranks, tokens, torch.bfloat16, here.device)
    assert len(symmetric.memory.handles) == 2, "no symmetric memory was allocated"
    return symmetric, plain


def batch(here: Rank, config: Config, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random inputs of a MoE layer: tokens, routing weights, chosen experts, and the gradient of the output.

    Shapes are (T, D), (T, K), (T, K) and (T, D). Every fifth token has one choice fewer, given as expert num_experts.
    Tokens and gradient are small integers in bfloat16, so that the sums of toy experts do not depend on their order;
    weights are float32, from 0 to 1. The rank's number in its group is the seed.
    """
    model, generator = config.model, torch.Generator().manual_seed(here.group.rank)
    x_TD, grad_TD = (torch.randint(-2, 3, (tokens, model.dim), generator=generator).bfloat16() for _ in range(2))
    weights_TK = torch.rand(tokens, model.top_k, generator=generator)
    chosen_TK = torch.rand(tokens, model.num_experts, generator=generator).topk(model.top_k, 1).indices
    chosen_TK[::5, 0] = model.num_experts
    return tuple(x.to(here.device) for x in (x_TD, weights_TK, chosen_TK, grad_TD))


def toy_experts(dispatcher: Dispatcher) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return f(x_RD, weights_R1, count_e) in place of experts.

    Expert e, a global number, multiplies by the weight and by (e + 1) / num_experts / etp.
    """
    group, etp, local = dispatcher.group, dispatcher.etp, dispatcher.local_experts
    first = group.rank // etp * local

    def experts(x_RD: Tensor, weights_R1: Tensor, count_e: Tensor) -> Tensor:
        row = torch.arange(len(x_RD), device=x_RD.device)
        expert_R = torch.searchsorted(count_e.cumsum(0), row, right=True).clamp(max=local - 1) + first
        factor_R1 = ((expert_R + 1) / dispatcher.num_experts / etp).unsqueeze(1)
        return (x_RD * weights_R1 * factor_R1).to(x_RD.dtype)

    return experts


def dispatch_and_combine(dispatcher: Dispatcher, experts: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return f(x_TD, weights_TK, chosen_TK), which dispatches tokens, calls experts and combines to (T, D).

    `experts` is called with (x_RD, weights_R1, count_e) and returns (R, D).
    """

    def round_trip_of_tokens(x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        exchange = dispatcher.dispatch(x_TD, weights_TK, chosen_TK, 0)
        return exchange.combine(experts(*exchange.receive_routed()))

    return round_trip_of_tokens


def as_graph(dispatcher: Dispatcher, experts: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the function of `dispatch_and_combine`, compiled as one graph."""
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"
    return torch.compile(dispatch_and_combine(dispatcher, experts), backend=backend, fullgraph=True, dynamic=False)


def forward_backward(forward: Callable[..., Tensor], inputs: tuple[Tensor, ...], *weights: Tensor) -> list[Tensor]:
    """Run a function forward and backward; return its output, and gradients of tokens, routing weights and `weights`.

    Args:
        forward: from `dispatch_and_combine` or `as_graph`.
        inputs: from `batch`; the last is the gradient of the output.
        weights: the experts' weights.
    """
    x_TD, weights_TK, chosen_TK, grad_TD = inputs
    leaves = [x_TD.detach().requires_grad_(), weights_TK.detach().requires_grad_()]
    y_TD = forward(*leaves, chosen_TK)
    return [y_TD.detach(), *torch.autograd.grad(y_TD, [*leaves, *weights], grad_TD)]


def compare(got: list[Tensor], want: list[Tensor]) -> dict[str, Any]:
    """Return "differ by", the largest relative difference, and "equal", how many tensors are bitwise equal: "3 of 3".

    Differences are relative to the largest number of each tensor in `want`. Raises AssertionError if one reaches 1e-2,
    or if a wanted tensor is zero or not finite.
    """
    assert all(bool(x.isfinite().all()) and float(x.abs().max()) > 0 for x in want), "the comparison shows nothing"
    worst = max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip(got, want, strict=True)
    )
    assert worst < 1e-2, f"outputs or gradients differ by {worst:.2g} of the largest"
    return {"differ by": worst, "equal": f"{sum(map(torch.equal, got, want))} of {len(got)}"}


def one_rank(here: Rank, plain_memory: bool) -> dict[str, Any]:
    """Compare the symmetric-memory dispatcher on one rank with all-to-all, both passes; return the differences.

    Through toy experts all tensors must be equal bit by bit. Through real experts the host must not wait for the GPU,
    eager and compiled (`as_graph`). Raises AssertionError if the dispatchers differ.
    """
    prepare(here, plain_memory)
    config = make_config(512, 32, 4, 2.0) if here.device.type == "cuda" else make_config(64, 8, 2, 2.0)
    tokens = 1024 if here.device.type == "cuda" else 32
    symmetric, plain = make_dispatchers(here, config, tokens)
    inputs = batch(here, config, tokens)
    here.reached("toy experts")
    moved = compare(
        *(forward_backward(dispatch_and_combine(one, toy_experts(one)), inputs) for one in (symmetric, plain))
    )
    assert moved["equal"] == "3 of 3", f"tokens or gradients differ: {moved}"
    torch.manual_seed(0)
    with here.device:
        experts = Experts(config.model, config.moe, torch.bfloat16)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    here.reached("experts")
    weights = list(experts.parameters())
    want, figures = forward_backward(dispatch_and_combine(plain, experts), inputs, *weights), {}
    for name, wrap in (("eager", dispatch_and_combine), ("graph", as_graph)):
        forward = wrap(symmetric, experts)
        here.reached(f"experts, {name}")
        forward_backward(forward, inputs, *weights)  # kernels compile at their first launch
        here.reached(f"experts without a wait of the host, {name}")
        with here.forbidding_host_syncs():
            got = forward_backward(forward, inputs, *weights)
        assert not bool(symmetric.memory.needs_repeat), "the buffers were too small"
        figures |= {f"{name} {word}": value for word, value in compare(got, want).items()}
    return figures


def two_ranks(here: Rank, plain_memory: bool) -> dict[str, Any]:
    """Compare the symmetric-memory dispatcher on two ranks with all-to-all over gloo; return the differences.

    Forward and backward through toy experts, eager and compiled, with each expert on one rank, then sharded over both.
    `plain_memory` is False, because ranks cannot share it. Collective over both ranks. Raises AssertionError if the
    dispatchers differ.
    """
    prepare(here, plain_memory)
    collectives._ops = OverHost(here.device)
    config, tokens = make_config(256, 16, 4, 2.0), 512 if here.device.type == "cuda" else 32
    inputs, figures = batch(here, config, tokens), {}
    for ep, etp in ((2, 1), (1, 2)):
        symmetric, plain = make_dispatchers(here, config, tokens, ep, etp)
        here.reached(f"alltoall over gloo, ep {ep} etp {etp}")
        want = forward_backward(dispatch_and_combine(plain, toy_experts(plain)), inputs)
        for name, wrap in (("eager", dispatch_and_combine), ("graph", as_graph)):
            here.reached(f"symmetric memory, ep {ep} etp {etp}, {name}")
            got = forward_backward(wrap(symmetric, toy_experts(symmetric)), inputs)
            here.reached(f"comparison, ep {ep} etp {etp}, {name}")
            assert not bool(symmetric.memory.needs_repeat), "the buffers were too small"
            figures |= {f"ep {ep} etp {etp} {name} {word}": value for word, value in compare(got, want).items()}
    return figures


def speed(here: Rank, plain_memory: bool) -> dict[str, Any]:
    """Time a dispatch of Qwen3's size, a copy of as many bytes, and both dispatchers without experts, forward only.

    Returns the "MiB" of the dispatched tokens, and "GB/s" and "ms" of each operation by name.
    """
    prepare(here, plain_memory)
    cuda = here.device.type == "cuda"
    config, tokens = (make_config(2048, 128, 8, 1.0), 16384) if cuda else (make_config(64, 16, 4, 1.0), 64)
    symmetric, plain = make_dispatchers(here, config, tokens)
    x_TD, weights_TK, chosen_TK, _ = batch(here, config, tokens)
    here.reached("times")
    buffers, kind = symmetric.memory, here.device.type

    def round_trip_of_tokens(dispatcher: Dispatcher) -> Tensor:
        exchange = dispatcher.dispatch(x_TD, weights_TK, chosen_TK, 0)
        return exchange.combine(exchange.receive_routed()[0])

    with torch.no_grad():
        exchange = symmetric.dispatch(x_TD, weights_TK, chosen_TK, 0)
        x_SD = torch.randn(len(exchange.to_S), config.model.dim, device=here.device).bfloat16()
        target, places = torch.empty_like(x_SD), (exchange.to_S, exchange.from_R)
        rows = (buffers.rows,)
        seconds = {
            "copy": median_seconds(lambda: target.copy_(x_SD), kind),
            "put": median_seconds(lambda: buffers.put([x_SD], rows, exchange.to_S), kind),
            "take": median_seconds(lambda: buffers.take(rows, exchange.from_R), kind),
            "exchange": median_seconds(lambda: buffers.exchange([x_SD], *places), kind),
            "symm_mem both ways": median_seconds(lambda: round_trip_of_tokens(symmetric), kind, 10),
            "alltoall both ways": median_seconds(lambda: round_trip_of_tokens(plain), kind, 10),
        }
    moved = {"copy": 2, "put": 2, "take": 2, "exchange": 4}  # each row is read and written
    rates = {f"{name} GB/s": moved[name] * x_SD.nbytes / seconds[name] / 1e9 for name in moved}
    return {"MiB": x_SD.nbytes / 2**20} | rates | {f"{name} ms": took * 1e3 for name, took in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, help="time limit of all checks")
    args = parser.parse_args()
    use_expandable_segments()  # as in a training run
    rows, end = Rows(args.json), time.monotonic() + args.seconds

    def check(
        name: str, of: Callable[..., dict], limit: float, ranks: int = 1, plain: bool = False, **ask: str
    ) -> bool:
        """Run one check in processes of its own, record its row, and return whether it passed.

        An unsupported check has not passed, nor has one for which less than SPARE seconds are left, which does not run.

        Args:
            name: name of the row.
            of: the check, called with the rank and `plain_memory`.
            limit: time limit in seconds.
            ranks: number of ranks.
            plain: the check's `plain_memory`.
            ask: more environment variables.
        """
        begin, result = time.monotonic(), {"error": "left out: no time was left"}
        if (left := min(limit, end - begin)) > SPARE:
            try:
                result = run(partial(of, plain_memory=plain), args.device, ranks, left, ask)
            except Exception as error:
                traceback.print_exc()
                result = {"error": repr(error)[:300]}
        note = (
            result.get("figures", {}).pop("note", "")
            or result.get("error")
            or ("unsupported: " + result["unsupported"] if "unsupported" in result else "")
        )
        rows.record(name, "figures" in result, time.monotonic() - begin, result.get("figures", {}), note)
        return "figures" in result

    works = check("memory of one rank", memory, 20)
    single = {}
    if not works:  # titanmoe has no use for the driver's multicast objects, which may be what fails
        single = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        works = check("memory of one rank, no multicast", memory, 15, **single)
    words = "" if works else ", plain memory"
    check(f"one rank against alltoall{words}", one_rank, 60, plain=not works, **single)
    overlap = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}  # torch then sets up no multicast either
    check("two ranks on one device against alltoall", two_ranks, 70, ranks=2, **overlap)
    check(f"speed of one rank{words}", speed, 25, plain=not works, **single)
    return rows.status()


if __name__ == "__main__":
    sys.exit(main())
