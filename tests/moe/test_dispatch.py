"""Rows to their experts and back: what arrives, what returns, the gradients, and how many bytes travel.

Toy expert number e multiplies a row by (e + 1) and by its routing weight; each of its etp ranks returns a share of
that.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests import world
from tests.support.dispatched import dispatched
from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.comm.host_sync import CountExchange, HostCopy
from titanmoe.config.schema import Model, MoE
from titanmoe.moe.dispatchers import alltoall
from titanmoe.moe.dispatchers.allgather import AllGather
from titanmoe.moe.dispatchers.alltoall import AllToAll
from titanmoe.moe.dispatchers.dispatcher import ExpertRanks
from titanmoe.moe.dispatchers.hierarchical import Hierarchical
from titanmoe.moe.layer import MoE as MoELayer
from titanmoe.moe.permute import unpermute_tokens
from titanmoe.moe.send_slots import assign_slots, fill_slots, order_by_expert, sort_by_expert
from titanmoe.ops.device import Hardware, imitate
from titanmoe.tokens import Tokens

E, K, T, D = 8, 3, 6, 4
RANKS = 4
LAYOUTS = [(4, 1), (2, 2), (1, 4)]
CASES = ["random", "some_dropped", "idle_rank", "one_expert", "all_dropped"]


def inputs(case: str, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (the first column numbers all ranks' tokens from 1), weights and distinct choices of one rank."""
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(T, D, dtype=torch.float64, generator=generator)
    x_TD[:, 0] = torch.arange(T) + rank * T + 1
    weights_TK = torch.rand(T, K, dtype=torch.float64, generator=generator)
    chosen_TK = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    if case == "some_dropped":
        chosen_TK[torch.rand(T, K, generator=generator) < 0.5] = E
    if case == "all_dropped" or (case == "idle_rank" and rank == 1):
        chosen_TK[:] = E
    if case == "one_expert":
        chosen_TK[:] = E
        chosen_TK[:, 1] = 5
    return x_TD, weights_TK, chosen_TK


def arriving(case: str, ranks: int, experts: range) -> tuple[list[tuple[float, float]], list[int]]:
    """Number and weight of the tokens that these experts get: by expert, then by sender, then by token."""
    rows, counts = [], []
    senders = [inputs(case, rank) for rank in range(ranks)]
    for expert in experts:
        before = len(rows)
        for x_TD, weights_TK, chosen_TK in senders:
            rows += [
                (float(x_TD[t, 0]), float(weights_TK[t, k]))
                for t in range(T)
                for k in range(K)
                if chosen_TK[t, k] == expert
            ]
        counts.append(len(rows) - before)
    return rows, counts


def plain(x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
    factor_TK = (chosen_TK + 1) * (chosen_TK < E)
    return x_TD * (weights_TK * factor_TK).sum(1, keepdim=True)


def check_round_trip(kind: type, group: Group, ep: int, etp: int, case: str, padded: bool) -> None:
    dispatcher = kind(E)
    dispatcher.place(ExpertRanks(group, ep, etp))
    local, expert_rank, share = E // ep, group.rank // etp, (group.rank % etp + 1) / (etp * (etp + 1) / 2)
    experts = range(expert_rank * local, (expert_rank + 1) * local)
    x_TD, weights_TK, chosen_TK = inputs(case, group.rank)
    x_TD.requires_grad_()
    weights_TK.requires_grad_()
    slots_per_expert = T if padded else 0

    rows_RD, weight_R1, count_e, send_back = dispatched(dispatcher, x_TD, weights_TK, chosen_TK, slots_per_expert)
    want, counts = arriving(case, group.size, experts)
    got = list(zip(rows_RD[:, 0].tolist(), weight_R1[:, 0].tolist(), strict=True))
    assert len(got) == int(count_e.sum())
    if padded:
        assert count_e.tolist() == [slots_per_expert * group.size] * local
        ends = count_e.cumsum(0).tolist()
        pieces = [got[end - slots_per_expert * group.size : end] for end in ends]
        assert [sum(number > 0 for number, _ in piece) for piece in pieces] == counts
        assert all(pair == (0, 0) for pair in got if pair[0] == 0), "an empty row holds something"
        got = [pair for pair in got if pair[0] > 0]
    else:
        assert count_e.tolist() == counts
    assert got == want

    expert_R = torch.tensor(experts).repeat_interleave(count_e)
    y_RD = rows_RD * weight_R1 * (expert_R + 1).unsqueeze(1) * share
    y_TD = send_back(y_RD)
    want_TD = plain(x_TD, weights_TK, chosen_TK)
    torch.testing.assert_close(y_TD, want_TD, rtol=1e-13, atol=1e-13)
    cotangent = torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(group.rank + 10))
    grads = torch.autograd.grad(y_TD, (x_TD, weights_TK), cotangent)
    want_grads = torch.autograd.grad(want_TD, (x_TD, weights_TK), cotangent)
    for grad, wanted in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-13, atol=1e-13)

    # without weights, every kept choice returns once from each of the etp ranks
    rows_RD, _, _, send_back = dispatched(dispatcher, x_TD.detach(), weights_TK.detach(), chosen_TK, slots_per_expert)
    kept_T1 = (chosen_TK < E).sum(1, keepdim=True)
    copies_TD = send_back(rows_RD)
    torch.testing.assert_close(copies_TD, x_TD.detach() * kept_T1 * etp, rtol=1e-13, atol=1e-13)


def test_rows_are_copied_before_their_number_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a device has work while the host waits."""
    order = []
    copy, read = alltoall.fill_slots, HostCopy.read
    monkeypatch.setattr(alltoall, "fill_slots", lambda *given: order.append("copied") or copy(*given))
    monkeypatch.setattr(HostCopy, "read", lambda self: order.append("read") or read(self))
    x_TD, weights_TK, chosen_TK = inputs("some_dropped", 0)
    rows_RD, _, count_e, _ = dispatched(AllToAll(E), x_TD, weights_TK, chosen_TK)
    assert order == ["copied", "read"]
    assert len(rows_RD) == int(count_e.sum()) == int((chosen_TK < E).sum())


def whole_world() -> Group:
    return Group(dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank())


def round_trips(ep: int, etp: int) -> None:
    for kind in (AllToAll, AllGather):
        for case in CASES:
            for padded in (False, True):
                try:
                    check_round_trip(kind, whole_world(), ep, etp, case, padded)
                except AssertionError as error:
                    raise AssertionError(f"{kind.__name__}, {case}, padded {padded}: {error}") from error


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [AllToAll, AllGather])
@pytest.mark.parametrize("padded", [False, True])
def test_a_round_trip_on_one_rank(kind: type, case: str, padded: bool) -> None:
    check_round_trip(kind, NO_GROUP, 1, 1, case, padded)


@pytest.mark.parametrize("ep, etp", LAYOUTS)
def test_a_round_trip_on_four_ranks(ep: int, etp: int) -> None:
    """Both dispatchers agree with the plain formula, and so with each other, in values and in every gradient."""
    world.run(RANKS, round_trips, ep, etp)


class Recorder(TorchDispatchMode):
    """Bytes that leave this rank in every collective, in order, however it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op._overloadpacket.__name__
        if op.namespace == "_c10d_functional" and name != "wait_tensor":
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            self.sent.append((name, args[0].dtype, leaving(name, args, group) * args[0].element_size()))
        return op(*args, **(kwargs or {}))


def leaving(name: str, args: Any, group: dist.ProcessGroup) -> int:
    """Number of elements: one piece for each other rank, or what the splits give them."""
    x, others = args[0], group.size() - 1
    if name == "all_gather_into_tensor":
        return x.numel() * others
    if name == "reduce_scatter_tensor":
        return x.numel() // group.size() * others
    assert name == "all_to_all_single", f"{name} is no part of a dispatch"
    _, _, send, _ = args
    assert x.shape[0] == sum(send)
    return (sum(send) - send[group.rank()]) * x.shape[1:].numel()


def traffic(
    kind: type, ep: int, etp: int, case: str, slots_per_expert: int
) -> list[list[tuple[str, torch.dtype, int]]]:
    """What this rank sends in dispatch, in combine and in backward."""
    group = whole_world()
    dispatcher = kind(E)
    dispatcher.place(ExpertRanks(group, ep, etp))
    x_TD, weights_TK, chosen_TK = inputs(case, group.rank)
    x_TD, weights_TK = x_TD.float().requires_grad_(), weights_TK.requires_grad_()
    with Recorder() as dispatching:
        rows_RD, weight_R1, _, combine = dispatched(dispatcher, x_TD, weights_TK, chosen_TK, slots_per_expert)
    with Recorder() as combining:
        y_TD = combine(rows_RD * weight_R1.float())
    with Recorder() as backward:
        y_TD.sum().backward()
    return [dispatching.sent, combining.sent, backward.sent]


def added(sent: list[tuple[str, torch.dtype, int]]) -> dict[tuple[str, torch.dtype], int]:
    """Total bytes by kind of message; messages without bytes are left out."""
    out: dict[tuple[str, torch.dtype], int] = {}
    for name, dtype, count in sent:
        out[name, dtype] = out.get((name, dtype), 0) + count
    return {kind: count for kind, count in out.items() if count}


@pytest.mark.parametrize("ep, etp", LAYOUTS)
@pytest.mark.parametrize("case, slots_per_expert", [("some_dropped", 0), ("idle_rank", 0), ("random", T)])
def test_bytes_are_the_documented_ones(ep: int, etp: int, case: str, slots_per_expert: int) -> None:
    """Per rank and direction: the copies of its routed rows that leave it, D elements each; weights only
    travel there.
    """
    out = torch.zeros(RANKS, RANKS, dtype=torch.int64)  # rows from, to
    for rank in range(RANKS):
        experts = torch.arange(E).repeat(slots_per_expert) if slots_per_expert else inputs(case, rank)[2].flatten()
        for expert in experts[experts < E].tolist():
            for copy in range(etp):
                out[rank, expert // (E // ep) * etp + copy] += 1
    out.fill_diagonal_(0)
    results = world.run(RANKS, traffic, AllToAll, ep, etp, case, slots_per_expert)

    def kinds(**bytes: int) -> dict[tuple[str, torch.dtype], int]:
        return {("all_to_all_single", getattr(torch, name)): count for name, count in bytes.items() if count}

    for rank, (dispatching, combining, backward) in enumerate(results):
        there, back = int(out[rank].sum()), int(out[:, rank].sum())
        counts = 0 if slots_per_expert else (RANKS - 1) * (E // ep) * 8
        assert added(dispatching) == kinds(int64=counts, float32=there * D * 4, float64=there * 8)
        assert added(combining) == kinds(float32=back * D * 4)
        # backward: the outputs' gradients travel like the rows; the gradients of rows and weights return
        assert added(backward[:1]) == kinds(float32=there * D * 4)
        assert added(backward[1:]) == kinds(float32=back * D * 4, float64=back * 8)
        assert [len(sent) for sent in (dispatching, combining, backward)] == [2 + (not slots_per_expert), 1, 3]


@pytest.mark.parametrize("ep, etp", LAYOUTS)
def test_bytes_of_the_all_gather(ep: int, etp: int) -> None:
    """Per rank and direction T * (G - 1) rows whatever the routing; the choices are gathered once, the weights too."""
    rows, weights = (RANKS - 1) * T * D * 4, (RANKS - 1) * T * K * 8
    for dispatching, combining, backward in world.run(RANKS, traffic, AllGather, ep, etp, "random", 0):
        assert added(dispatching) == {
            ("all_gather_into_tensor", torch.float32): rows,
            ("all_gather_into_tensor", torch.float64): weights,
            ("all_gather_into_tensor", torch.int64): (RANKS - 1) * T * K * 8,
        }
        assert added(combining) == {("reduce_scatter_tensor", torch.float32): rows}
        assert added(backward) == {
            ("all_gather_into_tensor", torch.float32): rows,
            ("reduce_scatter_tensor", torch.float32): rows,
            ("reduce_scatter_tensor", torch.float64): weights,
        }


def visit(dispatcher: Any, ranks: ExpertRanks, case: str, padded: bool) -> None:
    """A round trip as in the layer, compared with the plain formula."""
    dispatcher.place(ranks)
    group, ep, etp = ranks.group, ranks.ep, ranks.etp
    local, expert_rank, share = E // ep, group.rank // etp, (group.rank % etp + 1) / (etp * (etp + 1) / 2)
    x_TD, weights_TK, chosen_TK = inputs(case, group.rank)
    x_TD.requires_grad_()
    weights_TK.requires_grad_()
    rows_RD, weight_R1, count_e, combine = dispatched(dispatcher, x_TD, weights_TK, chosen_TK, T if padded else 0)
    expert_R = (torch.arange(local) + expert_rank * local).repeat_interleave(count_e)
    y_TD = combine(rows_RD * weight_R1 * (expert_R + 1).unsqueeze(1) * share)
    want_TD = plain(x_TD, weights_TK, chosen_TK)
    torch.testing.assert_close(y_TD, want_TD, rtol=1e-13, atol=1e-13)
    cotangent = torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(group.rank + 10))
    for _ in range(2):  # a retained graph can be used again
        grads = torch.autograd.grad(y_TD, (x_TD, weights_TK), cotangent, retain_graph=True)
        want_grads = torch.autograd.grad(want_TD, (x_TD, weights_TK), cotangent, retain_graph=True)
        for grad, wanted in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-13, atol=1e-13)


@functools.cache
def nodes_of(node: int) -> tuple[Group, Group]:
    """`within` and `across` for 4 ranks on nodes of `node` ranks."""
    mesh = init_device_mesh("cpu", (RANKS // node, node), mesh_dim_names=("across", "within"))
    return Group.of(mesh["within"].get_group()), Group.of(mesh["across"].get_group())


NODES = [(4, 1, 2), (4, 1, 1), (2, 2, 2), (4, 1, 4)]  # ep, etp, ranks per node


def visits_on_nodes(ep: int, etp: int, node: int) -> None:
    for case in CASES:
        for padded in (False, True):
            visit(Hierarchical(E), ExpertRanks(whole_world(), ep, etp, *nodes_of(node)), case, padded)


@pytest.mark.parametrize("ep, etp, node", NODES)
def test_rows_come_back_across_nodes(ep: int, etp: int, node: int) -> None:
    world.run(RANKS, visits_on_nodes, ep, etp, node)


def crossings(ep: int, etp: int, node: int, case: str, flat: bool) -> list[int]:
    """Rows of D that leave this rank's node in dispatch, in combine and in backward."""

    class Crossing(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op._overloadpacket.__name__ == "all_to_all_single" and args[0].dtype == torch.float32:
                ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(args[3]))
                mine = dist.get_rank() // node
                self.rows += sum(n for rank, n in zip(ranks, args[2], strict=True) if rank // node != mine)
            return op(*args, **(kwargs or {}))

    dispatcher = AllToAll(E) if flat else Hierarchical(E)
    dispatcher.place(ExpertRanks(whole_world(), ep, etp, *nodes_of(node)))
    x_TD, weights_TK, chosen_TK = inputs(case, dist.get_rank())
    x_TD, weights_TK = x_TD.float().requires_grad_(), weights_TK.requires_grad_()
    with Crossing() as there:
        rows_RD, weight_R1, _, send_back = dispatched(dispatcher, x_TD, weights_TK, chosen_TK)
    with Crossing() as back:
        y_TD = send_back(rows_RD * weight_R1.float())
    with Crossing() as backward:
        y_TD.sum().backward()
    return [there.rows, back.rows, backward.rows]


@pytest.mark.parametrize("ep, etp, node", NODES)
@pytest.mark.parametrize("case", ["random", "some_dropped"])
def test_a_token_crosses_to_a_node_once(ep: int, etp: int, node: int, case: str) -> None:
    """One row there and back for each token and other node; the flat all-to-all has one per expert and etp rank."""
    nodes = RANKS // node
    once, often = torch.zeros(nodes, RANKS), torch.zeros(nodes, RANKS)  # rows to a node, from a rank
    for rank in range(RANKS):
        for experts in inputs(case, rank)[2].tolist():
            visited = [expert // (E // nodes) for expert in experts if expert < E]
            for visit in visited:
                often[visit, rank] += etp
            for visit in set(visited):
                once[visit, rank] += 1
    for rows in (once, often):
        for rank in range(RANKS):
            rows[rank // node, rank] = 0
    for want, flat in ((once, False), (often, True)):
        results = world.run(RANKS, crossings, ep, etp, node, case, flat)
        there, back, backward = (sum(column) for column in zip(*results, strict=True))
        assert there == back == int(want.sum())
        assert backward == there + back
        assert [result[0] for result in results] == want.sum(0).int().tolist()
    if nodes > 1 and (etp > 1 or node > 1):
        assert once.sum() < often.sum()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("padded", [False, True])
def test_by_node_on_one_rank(padded: bool, case: str) -> None:
    visit(Hierarchical(E), ExpertRanks(), case, padded)


@st.composite
def choices(draw: st.DrawFn, least: int = 0) -> tuple[Tensor, int, int, int, int]:
    """chosen_TK for at least `least` tokens, E, ep, etp, slots_per_expert."""
    ep, etp = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    experts = ep * draw(st.integers(1, 3))
    tokens, k = draw(st.integers(least, 6)), draw(st.integers(1, 3))
    flat = draw(st.lists(st.integers(0, experts), min_size=tokens * k, max_size=tokens * k))
    largest = max((flat.count(e) for e in range(experts)), default=0)
    slots_per_expert = draw(st.sampled_from([0, max(1, largest), largest + 2]))
    return torch.tensor(flat, dtype=torch.int64).view(tokens, k), experts, ep, etp, slots_per_expert


@given(choices())
def test_lay_out_places_every_copy_once_in_its_experts_block(drawn: tuple[Tensor, int, int, int, int]) -> None:
    chosen_TK, experts, ep, etp, slots_per_expert = drawn
    flat = chosen_TK.flatten().tolist()
    order, count_E = sort_by_expert(chosen_TK, experts)
    counts = [flat.count(e) for e in range(experts)]
    assert count_E.tolist() == counts
    rows = etp * (experts * slots_per_expert if slots_per_expert else sum(counts))
    choice_S, slot = assign_slots(
        chosen_TK, order, count_E, ep=ep, etp=etp, slots_per_expert=slots_per_expert, num_slots=rows
    )

    want, local = [], experts // ep
    for block in range(ep):
        for _copy in range(etp):
            for expert in range(block * local, (block + 1) * local):
                mine = [entry for entry, e in enumerate(flat) if e == expert]
                want += mine + [len(flat)] * (slots_per_expert - len(mine) if slots_per_expert else 0)
    assert choice_S.tolist() == want
    assert slot.shape == (len(flat), etp)
    for entry, expert in enumerate(flat):
        places = [row for row, e in enumerate(want) if e == entry]
        assert slot[entry].tolist() == (places if expert < experts else [rows] * etp)
        assert len(places) == (etp if expert < experts else 0)


@given(choices(least=1))
def test_assigned_rows_come_back_from_every_copy(drawn: tuple[Tensor, int, int, int, int]) -> None:
    chosen_TK, experts, ep, etp, slots_per_expert = drawn
    tokens, k = chosen_TK.shape
    x_TD = torch.arange(tokens * 2.0, dtype=torch.float64).view(tokens, 2)
    weights_TK = torch.arange(1.0, tokens * k + 1, dtype=torch.float64).view(tokens, k).requires_grad_()
    order, count_E = sort_by_expert(chosen_TK, experts)
    rows = etp * (experts * slots_per_expert if slots_per_expert else int(count_E.sum()))
    choice_S, slot = assign_slots(
        chosen_TK, order, count_E, ep=ep, etp=etp, slots_per_expert=slots_per_expert, num_slots=rows
    )
    rows_SD, weight_S1, route = fill_slots(x_TD, weights_TK, choice_S, slot)
    kept_TK = chosen_TK < experts
    back_TD = unpermute_tokens(rows_SD * weight_S1, route.source_S, route.slot_TJ)
    torch.testing.assert_close(back_TD, x_TD * (weights_TK * kept_TK).sum(1, keepdim=True) * etp)
    (grad_TK,) = torch.autograd.grad(weight_S1.sum(), weights_TK)
    assert torch.equal(grad_TK, kept_TK * float(etp))


@given(
    st.integers(1, 4).flatmap(
        lambda e: st.lists(st.lists(st.integers(0, 3), min_size=e, max_size=e), min_size=1, max_size=4)
    )
)
def test_by_expert_turns_senders_into_experts(counts: list[list[int]]) -> None:
    count_Ge = torch.tensor(counts)
    marks = [(g, e, i) for g, row in enumerate(counts) for e, n in enumerate(row) for i in range(n)]
    order, inverse = order_by_expert(count_Ge, len(marks))
    assert [marks[i] for i in order.tolist()] == sorted(marks, key=lambda mark: (mark[1], mark[0], mark[2]))
    assert torch.equal(order[inverse], torch.arange(len(marks)))


def test_no_tokens_at_all() -> None:
    none = torch.zeros(0, 3)
    rows, _, _, send_back = dispatched(AllToAll(8), torch.zeros(0, 4), none, none.long())
    assert rows.shape == (0, 4) and send_back(rows).shape == (0, 4)


@pytest.mark.parametrize("experts", [7, 2**15 - 1, 2**15, 40000])
def test_entries_are_sorted_by_expert_and_then_by_token(experts: int) -> None:
    """Keys are narrow if all expert numbers fit, including that of "no expert"."""
    chosen_TK = torch.randint(experts - 6, experts + 1, (30, 2), generator=torch.Generator().manual_seed(0))
    order, count = sort_by_expert(chosen_TK, experts)
    flat = chosen_TK.flatten().tolist()
    assert order.tolist() == sorted(range(60), key=lambda i: (flat[i], i))
    assert count.tolist()[-6:] == [flat.count(e) for e in range(experts - 6, experts)] and len(count) == experts


@pytest.mark.parametrize("biases", [False, True])
def test_a_rank_with_all_experts_computes_the_same_without_counts(biases: bool) -> None:
    """As on a GPU, where the host does not learn how many rows are used. Half of the tokens are padding."""
    model = Model(num_experts=4, top_k=2, dim=8, expert_hidden=16, expert_linear_bias=biases)
    layer = MoELayer(model, MoE(kernels="torch"), shared=None, seed=0, layer=0, microbatches=1, dtype=torch.float64)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    index = torch.arange(24)
    tokens = Tokens(index.view(2, 12) % 12, index, index // 12, index % 2 == 0, torch.tensor(0))
    layer.begin_step(1, torch.tensor(12.0), 2)
    x_BsD = torch.randn(2, 12, 8, dtype=torch.float64, requires_grad=True)

    def both() -> list[torch.Tensor]:
        y_BsD = layer(x_BsD, tokens)
        return [y_BsD, *torch.autograd.grad(y_BsD.square().sum(), (x_BsD, *layer.parameters()))]

    want = both()
    with (
        imitate(Hardware("cuda", (9, 0))),
        mock.patch.object(CountExchange, "read", None if not biases else CountExchange.read),
    ):
        got = both()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
