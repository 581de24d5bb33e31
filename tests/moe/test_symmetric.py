"""The dispatcher over symmetric memory, with ranks that write to memory they share: rows never written are NaN, the
host does not read sizes, and a step in which a receive buffer is too small runs again.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests import parity, reference, world
from tests.moe.test_compile import QUICKLY
from tests.moe.test_dispatch import CASES, LAYOUTS, RANKS, D, E, K, T, arriving, inputs, plain, whole_world
from tests.support import unwritten_rows
from tests.support.case_features import MODELS
from tests.support.dispatched import dispatched
from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.moe.dispatchers.alltoall import AllToAll
from titanmoe.moe.dispatchers.dispatcher import Dispatcher, ExpertRanks
from titanmoe.moe.dispatchers.dispatcher_spec import ALIGN
from titanmoe.moe.dispatchers.symm_mem import Symmetric
from titanmoe.moe.dispatchers.symmetric_buffers import plain_put
from titanmoe.train.launch import read_config

HERE = {"moe.dispatcher": "symm_mem", "model.dim": D, "model.top_k": K, "training.seq_len": T}


def make(group: Group, ep: int, etp: int, factor: float = 8.0) -> Symmetric:
    mapping = {"parallelism.experts.ep": ep, "parallelism.experts.etp": etp, "moe.symm_mem_factor": factor}
    config = parity.read(HERE | mapping, group.size)
    return lent(config, group)


def lent(config: Config, group: Group) -> Symmetric:
    """A dispatcher with memory, as in a step."""
    fold = derive(group.size, config.parallelism)
    dispatcher = Symmetric(config.model.num_experts, kernels=config.moe.kernels)
    ranks = ExpertRanks(group, fold.ep, fold.etp)
    dispatcher.place(ranks)
    tokens, dtype = config.training.local_batch_size * config.training.seq_len, torch.float64
    dispatcher.memory = Symmetric.reserve(config.model, config.moe, ranks, tokens, dtype, torch.device("cpu"))
    return dispatcher


def toy_experts(rows: Tensor, weights: Tensor, count_e: Tensor, first: int, share: float) -> Tensor:
    """Expert number e multiplies by (e + 1), its weight and its share; unused rows become NaN."""
    expert_R = (torch.arange(len(count_e)) + first).repeat_interleave(count_e)
    y = rows[: len(expert_R)] * weights[: len(expert_R)] * (expert_R + 1).unsqueeze(1) * share
    return torch.cat((y, rows[len(expert_R) :] * float("nan")))


def round_trip(dispatcher: Dispatcher, case: str) -> tuple[Tensor, Tensor, Tensor]:
    """y and both gradients."""
    group, etp = dispatcher.group, dispatcher.etp
    share = (group.rank % etp + 1) / (etp * (etp + 1) / 2)
    x_TD, weights_TK, chosen_TK = inputs(case, group.rank)
    x_TD.requires_grad_()
    weights_TK.requires_grad_()
    rows, weights, count_e, send_back = dispatched(dispatcher, x_TD, weights_TK, chosen_TK)
    first = group.rank // etp * dispatcher.local_experts
    y_TD = send_back(toy_experts(rows, weights, count_e, first, share))
    cotangent = torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(group.rank + 10))
    return y_TD, *torch.autograd.grad(y_TD, (x_TD, weights_TK), cotangent)


def test_rows_are_copied_as_moe_kernels_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("titanmoe.moe.permute.fused", lambda kernels, *_: asked.append(kernels))
    config = parity.read(HERE | {"moe.kernels": "torch"}, 1)
    round_trip(lent(config, NO_GROUP), next(iter(CASES)))
    assert asked and set(asked) == {"torch"}


def check_round_trip(dispatcher: Dispatcher, case: str) -> None:
    x_TD, weights_TK, chosen_TK = inputs(case, dispatcher.group.rank)
    x_TD.requires_grad_()
    weights_TK.requires_grad_()
    want_TD = plain(x_TD, weights_TK, chosen_TK)
    generator = torch.Generator().manual_seed(dispatcher.group.rank + 10)
    cotangent = torch.randn(T, D, dtype=torch.float64, generator=generator)
    want_grads = torch.autograd.grad(want_TD, (x_TD, weights_TK), cotangent)
    for got, wanted in zip(round_trip(dispatcher, case), (want_TD, *want_grads), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)


def check_case(dispatcher: Symmetric, case: str) -> None:
    group, local = dispatcher.group, dispatcher.local_experts
    expert_rank = group.rank // dispatcher.etp
    x_TD, weights_TK, chosen_TK = inputs(case, group.rank)
    rows, weights, count_e, _ = dispatched(dispatcher, x_TD, weights_TK, chosen_TK)
    want, counts = arriving(case, group.size, range(expert_rank * local, (expert_rank + 1) * local))
    if group != NO_GROUP:
        assert count_e.tolist() == [max(1, -(-n // ALIGN)) * ALIGN for n in counts]
        bins = count_e.tolist()
        mask = torch.arange(len(rows)) < 0
        for end, slots_per_expert, n in zip(torch.tensor(bins).cumsum(0).tolist(), bins, counts, strict=True):
            mask[end - slots_per_expert : end - slots_per_expert + n] = True
        assert rows[~mask].eq(0).all() and weights[~mask].eq(0).all()
        rows, weights = rows[mask], weights[mask]
    else:
        assert count_e.tolist() == counts and rows[sum(counts) :].eq(0).all()
        rows, weights = rows[: sum(counts)], weights[: sum(counts)]
    assert list(zip(rows[:, 0].tolist(), weights[:, 0].tolist(), strict=True)) == want
    check_round_trip(dispatcher, case)
    assert not dispatcher.memory.needs_repeat


def cases_on_ranks(ep: int, etp: int) -> None:
    dispatcher = make(whole_world(), ep, etp)
    before = len(unwritten_rows.exchanges)
    for case in CASES:
        check_case(dispatcher, case)
    # twice there with rows and weights and back, and the gradients of both the other way
    assert len(unwritten_rows.exchanges) - before == (1 + 4) * len(CASES)


@pytest.mark.parametrize("ep, etp", LAYOUTS)
def test_rows_arrive_in_aligned_bins_and_come_back(ep: int, etp: int) -> None:
    world.run(RANKS, cases_on_ranks, ep, etp)


def cases_in_own_buffer() -> None:
    dispatcher = make(Group(dist.group.WORLD.group_name, 1, 0), 1, 1)
    before = len(unwritten_rows.exchanges)
    for case in CASES:
        check_case(dispatcher, case)
    assert len(unwritten_rows.exchanges) - before == (1 + 4) * len(CASES)  # as in cases_on_ranks


def test_a_world_of_one_sends_through_its_own_buffer() -> None:
    """What is tested on a single GPU is the path of several."""
    world.run(1, cases_in_own_buffer)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_alone_sends_nothing(case: str) -> None:
    before, alone = len(unwritten_rows.exchanges), make(NO_GROUP, 1, 1)
    check_case(alone, case)
    assert alone.memory.size == 0
    assert len(unwritten_rows.exchanges) == before


@torch._inductor.config.patch(QUICKLY)
def through_graphs(backend: str) -> list[tuple[int, int]]:
    """Compare a graph of a dispatch and three equal combines, of which one is not used, with the plain calls; return
    how often each puts rows into the buffers of all ranks, forward and backward."""
    dispatcher, counts = make(whole_world(), 2, 1), []
    memory = dispatcher.memory
    own = [buffer.data_ptr() for kind in (memory.rows, memory.weights) for buffer in kind.of_ranks]
    put_to: list[int] = []

    def noted(x_ND: Tensor, to_N: Tensor, buffers: list[Tensor]) -> None:
        put_to.extend(buffer.data_ptr() for buffer in buffers)
        plain_put(x_ND, to_N, buffers)

    def layer(x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        exchange = dispatcher.dispatch(x_TD, weights_TK, chosen_TK, 0)
        x_RD, weights_R1, _ = exchange.receive_routed()
        y_RD = torch.tanh(x_RD * weights_R1)
        exchange.combine(y_RD)
        return exchange.combine(y_RD) + exchange.combine(y_RD)

    torch._dynamo.reset()
    graph = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
    for case in CASES:
        results = []
        for run in (layer, graph):
            x_TD, weights_TK, chosen_TK = inputs(case, dist.get_rank())
            leaves = [x_TD.requires_grad_(), weights_TK.requires_grad_()]
            with mock.patch("titanmoe.moe.dispatchers.symmetric_buffers.plain_put", noted):
                put_to.clear()
                y_TD = run(*leaves, chosen_TK)
                forward = len(put_to) // 2
                results.append([y_TD, *torch.autograd.grad(y_TD.square().sum(), leaves)])
            counts.append((forward, len(put_to) // 2 - forward))
            assert set(put_to) == set(own), "rows were put into a copy of a buffer"
        torch.testing.assert_close(*results, rtol=1e-13, atol=1e-13)
    torch._dynamo.reset()
    return counts


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_graph_exchanges_as_often_and_in_the_same_buffers(backend: str) -> None:
    """Forward rows, weights and three times outputs; backward gradients of two of these, of rows and of weights."""
    assert world.run(2, through_graphs, backend) == [[(5, 4)] * 2 * len(CASES)] * 2


class HostMustNotWait(TorchFunctionMode):
    """Raises if a tensor's value is read into Python."""

    ASKS = ("tolist", "item", "__bool__", "__int__", "__index__", "__float__", "nonzero", "cpu")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self.ASKS:
            raise AssertionError(f"the host waits in {function.__name__}")
        return function(*args, **(kwargs or {}))


def waits(kind: str) -> bool:
    dispatcher = make(whole_world(), RANKS, 1) if kind == "symm_mem" else AllToAll(E)
    dispatcher.place(ExpertRanks(whole_world(), RANKS, 1))
    x_TD, weights_TK, chosen_TK = inputs("some_dropped", dist.get_rank())
    x_TD.requires_grad_()
    try:
        with HostMustNotWait():
            rows, weights, _, send_back = dispatched(dispatcher, x_TD, weights_TK, chosen_TK)
            send_back(rows * weights).sum().backward()
    except AssertionError as error:
        assert "the host waits" in str(error)
        return True
    return False


def test_the_host_waits_for_no_size() -> None:
    assert world.run(RANKS, waits, "alltoall") == [True] * RANKS
    assert world.run(RANKS, waits, "symm_mem") == [False] * RANKS


def crowded(case: str) -> tuple[bool, list[bool]]:
    """One round trip with buffers for even routing: whether this rank would overflow, and whether all is finite."""
    dispatcher = make(whole_world(), RANKS, 1, 1.0)
    memory = dispatcher.memory
    memory.receive_slots = 4 * ALIGN  # less than one expert's rows of all ranks need
    x_TD, weights_TK, chosen_TK = inputs(case, dist.get_rank())
    if case == "one_expert":  # 3 of a token's rows to rank 2, which has experts 4 and 5, in bins of 24 and 48
        chosen_TK[:, 0], chosen_TK[:, 2] = 4, 5
    rows, weights, count_e, send_back = dispatched(dispatcher, x_TD, weights_TK, chosen_TK)
    y_TD = send_back(toy_experts(rows, weights, count_e, 0, 1.0))
    return bool(memory.needs_repeat), [bool(y_TD.eq(0).all()), count_e.tolist() == [ALIGN] * 2]


def test_nothing_is_sent_where_one_rank_has_no_room() -> None:
    """A row past the end of the buffer would be written to another rank's, or to none."""
    results = world.run(RANKS, crowded, "one_expert")
    assert [flag for flag, _ in results] == [False, False, True, False]
    assert all(all(empty) for _, empty in results)


def overflowing(changes: dict[str, Any], layer: int, bias: list[float]) -> Any:
    """parity.measure, with one layer's choice forced in the first step; also the flags by step and how many operations
    ran.
    """
    flags, before = [], len(unwritten_rows.exchanges)

    def forced(trainer: Any) -> dict[str, float]:
        layers = trainer.training.moe_layers
        if layer in layers:
            layers[layer].router.expert_bias.copy_(torch.tensor(bias if trainer.step == 0 else [0.0] * len(bias)))
        report = trainer.train_step()
        flags.append(bool(trainer.training.gradients.first_pass.needs_repeat))
        assert all(moe.dispatcher.memory is None for moe in layers.values()), "not exact outside of a step"
        return report

    return parity.measure(changes, train_step=forced), flags, len(unwritten_rows.exchanges) - before


FORCED = [1e6, 1e6] + [0.0] * 6


V = {"pipeline.schedule": "ZBVZeroBubble", "model.num_layers": 4, "activation_checkpoint.mode": "full"}
OVERFLOWS = {  # the last layer's experts 0 and 1 get all rows; the mapping, and the rank of the world that has them
    "second stage": ({"parallelism.pp": 2, "parallelism.experts.ep": 2}, 2),
    "end of a V": ({"parallelism.pp": 2, "parallelism.experts.ep": 2} | V, 0),
    "ep across tp and cp": (
        {
            "parallelism.tp": 2,
            "parallelism.cp": 2,
            "parallelism.experts.ep": 4,
            "activation_checkpoint.mode": "moe",
            "training.seq_len": 128,
        },
        0,
    ),
}


@pytest.mark.parametrize(
    "case", ["second stage", *(pytest.param(case, marks=pytest.mark.slow) for case in list(OVERFLOWS)[1:])]
)
def test_a_step_that_overflows_on_one_rank_is_made_again(case: str) -> None:
    """Every number of both steps equals the plain model's, including counters and balance; the second step fits."""
    mapping, full = OVERFLOWS[case]
    changes = {
        "moe.dispatcher": "symm_mem",
        "moe.symm_mem_factor": 1.6,
        "moe.aux_loss_global": 0.02,
        "moe.aux_loss_sequence": 0.01,
        "moe.jitter": 0.1,
        "training.seq_len": 64,
    }
    changes |= mapping
    config = parity.read(changes, 4)
    last = config.model.num_layers - 1
    results = world.run(4, overflowing, changes, last, FORCED)
    got = results[0][0]
    assert [flags for _, flags, _ in results] == [[rank == full, False] for rank in range(4)]
    assert all(calls for _, _, calls in results)
    assert [report["overflow_reruns"] for report in got.reports] == [1, 1]

    weights = reference.initial_weights(config.model, config.training.seed, torch.float64)
    none = reference.initial_bias(config.model)
    given = {name: torch.tensor(FORCED) if f".{last}." in name else zero for name, zero in none.items()}
    batches = parity.grouped(config, derive(4, config.parallelism).dp, 0)
    want = reference.step(config, weights, batches, 1, given)
    assert parity.worst_error(got.grads, want.grads)[0] < 1e-10
    assert got.loss[0] == pytest.approx(want.loss, rel=1e-10)
    assert got.norm[0] == pytest.approx(want.grad_norm, rel=1e-10)
    for name in ("aux_loss_sequence", "aux_loss_global"):
        wanted = getattr(config.moe, name) * want.aux[name]
        assert got.reports[0][name] == pytest.approx(wanted, rel=1e-10)
    assert got.reports[0][f"layers.{last}.tokens_max"] == torch.as_tensor(want.counts[last]).max()

    exact = world.run(4, overflowing, changes | {"moe.symm_mem_factor": 4.0}, last, FORCED)[0][0]
    assert [report["overflow_reruns"] for report in exact.reports] == [0, 0]
    for a, b in zip(got.reports, exact.reports, strict=True):
        for name in a.keys() - {"overflow_reruns"}:
            assert a[name] == pytest.approx(b[name], rel=1e-10), name
    assert parity.worst_error(got.weights, exact.weights)[0] < 1e-10


class _Garbage(torch.autograd.Function):
    """Puts NaN in the rows from `end` on, forward or backward."""

    @staticmethod
    def forward(ctx, x, end, backward):
        ctx.end, ctx.backward = end, backward
        return x.view_as(x) if backward else torch.cat((x[:end], torch.full_like(x[end:], torch.nan)))

    @staticmethod
    def backward(ctx, grad):
        if ctx.backward:
            grad = torch.cat((grad[: ctx.end], torch.full_like(grad[ctx.end :], torch.nan)))
        return grad, None, None


def with_garbage(changes: dict[str, Any]) -> Any:
    """parity.measure; here torch's grouped product leaves NaN in rows of no expert, forward and
    backward, which it may.
    """
    real: Callable[..., Tensor] = torch._grouped_mm
    rows = []

    def poisoned(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        if b.dim() == 2:  # the weights' gradient: sums over rows
            return real(a, b, offs=offs)
        end = int(offs[-1])
        rows.append(a.shape[0] - end)
        return _Garbage.apply(real(_Garbage.apply(a, end, True), b, offs=offs), end, False)

    torch._grouped_mm = poisoned
    try:
        return parity.measure(changes, steps=1), max(rows)
    finally:
        torch._grouped_mm = real


@pytest.mark.parametrize(
    "model",
    [
        {},
        # a clamp would replace NaN, and so hide it from the gradients
        MODELS["gpt_oss"] | {"model.expert_activation": "swiglu"},
    ],
    ids=["plain", "biases"],
)
def test_unused_rows_touch_no_number(model: dict[str, Any]) -> None:
    single = {f"training.{key}": "float32" for key in ("dtype", "mixed_precision_param", "mixed_precision_reduce")}
    changes = model | single | {"moe.dispatcher": "symm_mem", "parallelism.experts.ep": 2}
    changes |= {"parallelism.cp": 2, "parallelism.experts.etp": 2, "training.global_batch_size": 4}
    results = world.run(4, with_garbage, changes)
    assert all(unused > 0 for _, unused in results)
    got, want = results[0][0], parity.expected(changes, 4, steps=1)
    errors = parity.compare(got, want, parity.read(changes, 4))
    assert max(errors[name] for name in ("loss", "grads", "norm")) < 1e-4


def test_a_machine_that_cannot_run_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one sends nothing, so it needs nothing."""
    monkeypatch.setattr("titanmoe.ops.cpu.shared_memory.sys", SimpleNamespace(platform="darwin"))
    ask = ["--config", "debug", "--parallelism.tp", "1", "--training.device", "cpu", "--moe.dispatcher", "symm_mem"]
    assert read_config([*ask, "--parallelism.experts.ep", "1"], 2, COMPONENTS).moe.dispatcher == "symm_mem"
    with pytest.raises(ConfigError) as refused:
        read_config([*ask, "--parallelism.experts.ep", "2"], 2, COMPONENTS)
    assert (
        'moe.dispatcher = "symm_mem" cannot run here: ranks on CPUs share memory in /dev/shm, which only Linux has; '
        'use dispatcher = "alltoall"'
    ) in refused.value.problems


@pytest.mark.parametrize("experts", [8, 128, 256])
def test_any_number_of_experts_within_a_node(experts: int) -> None:
    ask = {"moe.dispatcher": "symm_mem", "model.num_experts": experts, "parallelism.experts.ep": 8}
    ask |= {"training.global_batch_size": 16}
    parity.read(ask | {"parallelism.node": 8}, 8)
    message = r"needs its group within a node, and ep \* etp = 8 \* 2 ranks are on nodes of 8: use another ep"
    with pytest.raises(ConfigError, match=message):
        parity.read(ask | {"parallelism.node": 8, "parallelism.experts.etp": 2}, 16)


def full_memory() -> str:
    with mock.patch(
        "titanmoe.moe.dispatchers.symmetric_buffers.allocate_shared", side_effect=RuntimeError("CUDA: out of memory")
    ):
        try:
            make(Group(dist.group.WORLD.group_name, 1, 0), 1, 1)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_gpu_whose_memory_is_full_is_no_reason_for_another_dispatcher() -> None:
    """The run ends as it does wherever memory is too small. What else keeps ranks from sharing is in test_auto.py."""
    assert world.run(1, full_memory) == ["CUDA: out of memory"]
