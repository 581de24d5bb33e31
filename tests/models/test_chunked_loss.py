"""The loss over slices of the vocabulary against the loss over whole logits, and the bytes it saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from tests import world
from tests.support import tolerances
from tests.support.live_bytes import LiveBytes
from titanmoe.comm.collectives import NO_GROUP, Group
from titanmoe.config.schema import Model
from titanmoe.models import vocabulary as vocabulary_room
from titanmoe.models.logit_slices import slices
from titanmoe.models.vocabulary import CHUNK_BYTES, Head, chunk_count, chunked_cross_entropy, cross_entropy
from titanmoe.tokens import IGNORE

T, D, V = 20, 6, 33


def operands(dtype: torch.dtype, ignored: slice = slice(None, None, 3), scale: float = 1.0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    x_TD, weight_VD = (scale * torch.randn(n, D, generator=draw).to(dtype) for n in (T, V))
    label_T = torch.randint(V, (T,), generator=draw)
    label_T[ignored] = IGNORE
    return [x_TD.requires_grad_(), weight_VD.requires_grad_(), label_T]


def results(scores: tuple[Tensor, Tensor | None], *leaves: Tensor) -> list[Tensor]:
    """With another weight for each token, and again another for its entropy."""
    scores_NT = torch.stack([score_T for score_T in scores if score_T is not None])
    weight_NT = torch.linspace(1, 5, scores_NT.numel(), dtype=scores_NT.dtype).view_as(scores_NT)
    return [scores_NT.detach(), *torch.autograd.grad(scores_NT, leaves, weight_NT)]


@pytest.mark.parametrize("chunks", [2, 5, V])
@pytest.mark.parametrize("ignored", [slice(0), slice(None, None, 3), slice(None)], ids=["none", "some", "all"])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_slices_give_the_loss_and_gradients_of_the_whole(
    dtype: torch.dtype, with_entropy: bool, ignored: slice, chunks: int
) -> None:
    x_TD, weight_VD, label_T = operands(dtype, ignored)
    options = {"with_entropy": with_entropy, "temperature": 1.0 if chunks < V else 1.5}
    want = results(cross_entropy(x_TD @ weight_VD.t(), label_T, NO_GROUP, **options), x_TD, weight_VD)
    sliced = chunked_cross_entropy(x_TD, weight_VD, label_T, NO_GROUP, chunks, **options)
    got = results(sliced, x_TD, weight_VD)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        tolerances.assert_close(
            a, b, terms=D + V + T, roundings=4 * 8, dtype=dtype
        )  # logits of up to 8 shift an exponent


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunks", [1, 4])
def test_entropy_and_temperature_are_those_of_their_formulas(chunks: int, temperature: float) -> None:
    x_TD, weight_VD, label_T = operands(torch.float64)
    log_p_TV = (x_TD @ weight_VD.t() / temperature).log_softmax(1)
    has_label_T = label_T != IGNORE
    want = (-log_p_TV.gather(1, label_T.clamp(min=0)[:, None])[:, 0] * has_label_T,
            -(log_p_TV.exp() * log_p_TV).sum(1) * has_label_T)  # fmt: skip
    if chunks > 1:
        got = chunked_cross_entropy(
            x_TD, weight_VD, label_T, NO_GROUP, chunks, with_entropy=True, temperature=temperature
        )
    else:
        got = cross_entropy(x_TD @ weight_VD.t(), label_T, NO_GROUP, True, temperature)
    for a, b in zip(results(got, x_TD, weight_VD), results(want, x_TD, weight_VD), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_huge_logits_in_a_late_slice_are_finite() -> None:
    x_TD, weight_VD, label_T = operands(torch.float32, scale=100.0)
    want = results(cross_entropy(x_TD @ weight_VD.t(), label_T, NO_GROUP), x_TD, weight_VD)
    for a, b in zip(
        results(chunked_cross_entropy(x_TD, weight_VD, label_T, NO_GROUP, 4), x_TD, weight_VD), want, strict=True
    ):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-2)


def on_a_rank() -> list[Tensor]:
    import torch.distributed as dist

    tp = Group(dist.group.WORLD.group_name, dist.get_world_size(), dist.get_rank())
    x_TD, weight_VD, label_T = operands(torch.float64)
    mine_vD = weight_VD.detach().chunk(tp.size)[tp.rank].clone().requires_grad_()
    return results(chunked_cross_entropy(x_TD, mine_vD, label_T, tp, 4, with_entropy=True), x_TD, mine_vD)


def test_a_vocabulary_shared_out_over_ranks_and_sliced_there() -> None:
    x_TD, weight_VD, label_T = operands(torch.float64)
    whole = cross_entropy(x_TD @ weight_VD.t(), label_T, NO_GROUP, with_entropy=True)
    loss, grad_x, grad_w = results(whole, x_TD, weight_VD)
    ranks = world.run(3, on_a_rank)
    for got, *_ in ranks:
        torch.testing.assert_close(got, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(rank[1] for rank in ranks), grad_x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([rank[2] for rank in ranks]), grad_w, rtol=1e-12, atol=1e-12)


def test_a_backward_pass_split_in_two_gives_each_half_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x_TD, weight_VD, label_T = operands(torch.float64)
    hidden_TD = x_TD * 1
    loss, _ = chunked_cross_entropy(hidden_TD, weight_VD, label_T, NO_GROUP, 4)
    ones = torch.ones_like(loss)
    want = torch.autograd.grad(loss, (x_TD, weight_VD), ones, retain_graph=True)
    products = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *x, **out: products.append("weight") or mm(*x, **out))
    (got_x,) = torch.autograd.grad(loss, (x_TD,), ones, retain_graph=True)
    assert not products
    edge = weight_VD.view_as(weight_VD).grad_fn.next_functions[0][0]
    start = (GradientEdge(loss.grad_fn, 0),)
    (got_w,) = torch.autograd.grad(start, (GradientEdge(edge, 0),), (ones,))
    assert len(products) == 4
    assert torch.equal(got_x, want[0]) and torch.equal(got_w, want[1])


@pytest.mark.parametrize("chunks", [4, 16])
def test_the_peak_falls_by_the_number_of_slices(chunks: int) -> None:
    """On top of what every variant needs: the gradients of hidden states and weight, and a few numbers per token."""
    tokens, dim, vocabulary = 256, 8, 8192
    x_TD, weight_VD = torch.randn(tokens, dim), torch.randn(vocabulary, dim)
    label_T = torch.randint(vocabulary, (tokens,))
    peaks = {}
    for n in (1, chunks):
        leaves = [x.clone().requires_grad_() for x in (x_TD, weight_VD)]
        with LiveBytes() as live:
            if n == 1:
                cross_entropy(leaves[0] @ leaves[1].t(), label_T, NO_GROUP)[0].sum().backward()
            else:
                chunked_cross_entropy(*leaves, label_T, NO_GROUP, n)[0].sum().backward()
        peaks[n] = live.peak - 2 * sum(x.nbytes for x in leaves)
    assert peaks[chunks] <= peaks[1] / chunks * 1.1, peaks


def test_wide_slices_are_whole_units() -> None:
    for vocabulary, chunks, widths in ((151936, 19, [8064] * 18 + [6784]), (33, 4, [9, 9, 9, 6]), (33, 33, [1] * 33)):
        weight_VD = torch.empty(vocabulary, 1, device="meta")
        assert [len(weight_vD) for _, weight_vD in slices(weight_VD, chunks)] == widths


def test_slices_on_gpus_are_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(vocabulary_room, "chunked_cross_entropy", lambda *a, **options: given.append(a[4]) or [a[2]])
    for device in ("cpu", "meta"):  # anything but the CPU
        head = Head(Model(vocab_size=131072, dim=2), chunks=-1, dtype=torch.bfloat16).to(device)
        x_BSD = torch.empty(1, 4096, 2, dtype=torch.bfloat16, device=device)
        head.loss_and_entropy(x_BSD, torch.empty(1, 4096, device=device), False)
    assert given == [64, 2]


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "asked_for", "want"),
    [
        (4096, 131072, -1, 64),
        (4096, 131072, 0, 1),
        (4096, 131072, 8, 8),
        (16, 48, -1, 1),
        (16, 48, 100, 48),
        (2**22, 64, -1, 32),
    ],
)
def test_the_number_of_slices(tokens: int, vocabulary: int, asked_for: int, want: int) -> None:
    assert chunk_count(tokens, vocabulary, 4, asked_for) == want
    if asked_for == -1:
        assert -(-vocabulary // want) * tokens * 4 <= CHUNK_BYTES


def gathers_of_the_head(chunks: int) -> int:
    """Of its weight, from all data ranks, in one microbatch."""
    from tests import parity
    from titanmoe.ops.cpu.fsdp import DirectAllGather
    from titanmoe.parallel.batch_slice import take_slice

    changes = {"training.loss_chunks": chunks, "parallelism.reshard_after_forward": "always"}
    gather, sizes = DirectAllGather.__call__, []

    def counting(self: DirectAllGather, output_tensor: Tensor, *given: Any, **named: Any) -> Any:
        sizes.append(output_tensor.numel())
        return gather(self, output_tensor, *given, **named)

    DirectAllGather.__call__ = counting
    try:
        trainer = parity.make_trainer(changes, loader=parity.samples())
        batches = trainer.training.loader.next_step()
        totals = trainer.training.slicer.count(batches)
        for moe in trainer.training.moe_layers.values():
            moe.begin_step(1, totals.tokens, 1)
        batch_slice = take_slice(
            batches[0], 0, trainer.training.meshes, trainer.training.slicer.placement, trainer.training.device
        )
        gradients = trainer.training.gradients
        gradients.engine.run([batch_slice], gradients.objective)
    finally:
        DirectAllGather.__call__ = gather
    model = parity.read(changes, trainer.training.runtime.world).model
    head = model.dim * (model.vocab_size + 1)  # the weight and the final norm's
    return sizes.count(head)


@pytest.mark.parametrize("chunks", [0, 5])
def test_sharded_data_gathers_the_head_once(chunks: int) -> None:
    """Backward begins where forward ended, so it stays gathered between them."""
    assert world.run(2, gathers_of_the_head, chunks) == [1, 1]


@pytest.mark.parametrize("changes", [{}, {"training.loss_chunks": 3}], ids=["-1", "3"])
def test_a_recipe_reaches_the_head(changes: dict[str, Any]) -> None:
    from tests import parity
    from titanmoe.models.transformer import Transformer

    config = parity.read(changes, 1)
    with torch.device("meta"):
        head = Transformer(config, 1, torch.float32).head
    assert isinstance(head, Head) and head.chunks == changes.get("training.loss_chunks", -1)
