"""Two sides that take turns: who runs when, where each yields, and what happens to an error."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.fake_gpu import FakeGPU
from titanmoe.comm import interleave
from titanmoe.comm.interleave import InterleavedPair
from titanmoe.parallel.pairs import Pairs


def script(name: str, segments: int, log: list[str], lands: int = 1) -> Callable[[], None]:
    """A number of segments with something sent after each but the last, which is then received in `lands` pieces."""

    def run() -> None:
        for i in range(segments):
            if i:
                for _ in range(lands):
                    interleave.yield_if_sent()
            log.append(f"{name}{i}")
            if i < segments - 1:
                interleave.mark_sent()

    return run


def alternation(a: int, b: int) -> list[str]:
    both = [[f"a{i}" for i in range(a)], [f"b{i}" for i in range(b)]]
    out = []
    while any(both):
        for side in both:
            out += side[:1]
            del side[:1]
    return out


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 3))
def test_sides_alternate_until_one_is_done_and_the_other_runs_on(a: int, b: int, lands: int) -> None:
    log: list[str] = []
    both = InterleavedPair()
    for _ in range(2):  # a pair leaves nothing behind for the next
        log.clear()
        both.run(script("a", a, log, lands), script("b", b, log, lands))
        assert log == alternation(a, b)


def test_nobody_hands_over_what_is_not_under_way() -> None:
    log = []

    def first() -> None:
        interleave.yield_if_sent()
        log.append("a0")
        interleave.mark_sent()
        interleave.mark_sent()
        interleave.yield_if_sent()
        interleave.yield_if_sent()  # the second of the two that were sent: it was in flight all along
        log.append("a1")

    def second() -> None:
        interleave.yield_if_sent()
        log.append("b0")
        interleave.yield_if_sent()
        log.append("b1")

    InterleavedPair().run(first, second)
    assert log == ["a0", "b0", "b1", "a1"]


def test_a_turn_is_given_up_with_nothing_sent_but_not_before_both_have_begun() -> None:
    log = []

    def side(name: str) -> Callable[[], None]:
        def run() -> None:
            for i in range(3):
                log.append(f"{name}{i}")
                interleave.yield_to_other()

        return run

    InterleavedPair().run(side("a"), side("b"))
    assert log == ["a0", "a1", "a2", "b0", "b1", "b2"]  # nobody sent anything in the only turn of a

    log.clear()
    InterleavedPair().run(script("a", 4, log), side("b"))
    assert log == ["a0", "b0", "a1", "b1", "a2", "b2", "a3"]


def test_backward_gives_a_turn_up_after_the_operation_that_is_named() -> None:
    log = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    interleave.yield_in_backward(y)
    interleave.yield_in_backward(torch.ones(2))  # has no backward
    x.register_hook(lambda grad: log.append(f"gradient {grad[0]:g}"))

    def backward() -> None:
        y.sum().backward()
        log.append("over")

    InterleavedPair().run(script("a", 3, log), backward)
    assert log == ["a0", "a1", "gradient 2", "over", "a2"]


def uncovered(layers: int, also_in_backward: bool) -> list[str]:
    """Messages of a pair that travel while neither half computes anything; each half has as many MoE layers."""
    computed: list[str] = []
    sent_at: dict[str, int] = {}
    bare: list[str] = []

    def send(name: str) -> None:
        sent_at[name] = len(computed)
        interleave.mark_sent()

    def land(name: str) -> None:
        interleave.yield_if_sent()
        if len(computed) == sent_at[name]:
            bare.append(name)

    def forward() -> None:
        for i in range(layers):
            computed.append("attention")
            interleave.yield_to_other()  # the host waits for counts
            send(f"rows {i}")
            land(f"rows {i}")
            computed.append("experts")
            send(f"rows back {i}")
            land(f"rows back {i}")

    def backward() -> None:
        for i in range(layers):
            computed.append("combine")
            send(f"gradients {i}")
            land(f"gradients {i}")
            computed.append("experts")
            send(f"gradients back {i}")
            land(f"gradients back {i}")
            if also_in_backward:
                interleave.yield_to_other()
            computed.append("attention")

    InterleavedPair().run(forward, backward)
    return bare


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_what_each_half_sends_travels_while_the_other_computes(layers: int) -> None:
    """All but the last of backward, after which forward is over. As many turns on both sides keep them in step."""
    assert uncovered(layers, True) == [f"gradients back {layers - 1}"]
    if layers > 2:
        assert len(uncovered(layers, False)) > 1


def test_without_a_pair_nothing_happens() -> None:
    interleave.yield_to_other()
    interleave.mark_sent()
    interleave.yield_if_sent()
    InterleavedPair().run(lambda: None, lambda: None)
    interleave.mark_sent()
    interleave.yield_if_sent()


class _Fly(torch.autograd.Function):
    """What a layer does with its rows, forward and backward."""

    streams: set[Any] = set()

    @staticmethod
    def forward(ctx, x, name, log):
        ctx.name, ctx.log = name, log
        ctx.save_for_backward(x)
        return _Fly.fly(x, name, log)

    @staticmethod
    def backward(ctx, grad):
        assert ctx.saved_tensors
        return _Fly.fly(grad, f"d{ctx.name}", ctx.log), None, None

    @staticmethod
    def fly(x: torch.Tensor, name: str, log: list[str]) -> torch.Tensor:
        if x.is_cuda:
            _Fly.streams.add(torch.cuda.current_stream())
        log.append(f"{name} sends")
        interleave.mark_sent()
        interleave.yield_if_sent()
        log.append(f"{name} lands")
        return x * 2


@pytest.mark.parametrize("device", ["cpu", "fake GPU", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_backward_and_what_it_computes_again_hand_over_like_forward(device: str) -> None:
    """On a GPU backward runs in a third thread, autograd's own; and all three on one stream, here not the default."""
    if device == "fake GPU":
        with FakeGPU() as gpu, torch.cuda.stream(torch.cuda.Stream()):
            log = both_ways("cuda", gpu.asking)
    else:
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
            log = both_ways(device)
    assert log == [
        *("f0 sends", "b sends", "f0 lands", "f1 sends", "b lands"),
        *("db sends", "f1 lands", "f2 sends", "db lands", "f2 lands"),
    ]


def both_ways(device: str, in_thread: Callable[..., Any] = lambda work: work) -> list[str]:
    log: list[str] = []
    x, y = (torch.ones(2, requires_grad=True, device=device) for _ in range(2))
    made = checkpoint(_Fly.apply, y, "b", log, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
    log.clear()
    streams = _Fly.streams = set()

    def first() -> None:
        z = x
        for i in range(3):
            z = _Fly.apply(z, f"f{i}", log)
        assert torch.is_grad_enabled() and z.requires_grad

    pairs = Pairs(torch.device(device))
    pairs.turns.run(first, pairs._for_other_thread(in_thread(made.sum().backward)))
    assert torch.equal(y.grad.cpu(), torch.full((2,), 2.0))
    assert streams == ({torch.cuda.current_stream()} if device == "cuda" else set())
    return log


def test_a_mode_sees_the_operations_of_both_sides() -> None:
    seen = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((op, threading.current_thread().name.partition("_")[0]))
            return op(*args, **kwargs or {})

    x, pairs = torch.ones(2), Pairs(torch.device("cpu"))
    with Sees():
        pairs.turns.run(x.neg, pairs._for_other_thread(x.abs))
    assert seen == [(torch.ops.aten.neg.default, "MainThread"), (torch.ops.aten.abs.default, "interleave")]
    pairs.turns.run(x.neg, pairs._for_other_thread(x.abs))  # and in the thread it ends with its pair
    assert len(seen) == 2


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_error_ends_both_and_is_raised_once(side: int, at: int) -> None:
    log: list[str] = []

    def breaks() -> None:
        script("x", at + 1, log)()
        raise Broken("as it was")

    works: list[Any] = [script("a", 4, log), script("a", 4, log)]
    works[side] = breaks
    both = InterleavedPair()
    with pytest.raises(Broken, match="as it was") as caught:
        both.run(*works)
    assert "breaks" in [entry.name for entry in caught.traceback]
    # The other had as many turns as the failed one, or one fewer, and none after it.
    assert sum(entry.startswith("a") for entry in log) == at + side
    log.clear()
    both.run(script("a", 2, log), script("b", 2, log))
    assert log == ["a0", "b0", "a1", "b1"]


def test_the_side_that_is_left_unwinds_where_it_waits() -> None:
    cleaned = []

    def waits() -> None:
        try:
            interleave.mark_sent()
            interleave.yield_if_sent()
        except Exception as error:
            cleaned.append(type(error))
            raise RuntimeError("torch wraps what a stage raises") from error

    def breaks() -> None:
        raise Broken

    with pytest.raises(Broken):
        InterleavedPair().run(waits, breaks)
    assert cleaned == [interleave.OtherSideFailed]


def test_an_interrupt_of_the_one_that_waits_ends_the_other_at_its_next_turn() -> None:
    """Ctrl-C only reaches the main thread, wherever it is."""
    both, log = InterleavedPair(), []
    switch = both._switch

    def interrupted(me: int) -> None:
        switch(me)
        if me == 0 and not both.over[me]:
            begun.wait(60)
            raise KeyboardInterrupt

    def second() -> None:
        begun.set()
        script("b", 5, log)()

    begun = threading.Event()
    both._switch = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        both.run(script("a", 3, log), second)
    assert log == ["a0", "b0"]


def test_the_second_side_sees_what_the_caller_set() -> None:
    """torch keeps options that a program sets (torch._dynamo.config and others) in context variables."""
    option = contextvars.ContextVar("option", default="unset")
    option.set("set")
    seen = []
    InterleavedPair().run(lambda: None, lambda: seen.append((option.get(), torch.is_grad_enabled())))
    assert seen == [("set", True)]


def test_one_thread_serves_every_pair_and_ends_with_its_turns() -> None:
    both, seen = InterleavedPair(), set()
    for _ in range(3):
        both.run(lambda: None, lambda: seen.add(threading.current_thread()))
    (thread,) = seen
    assert thread is not threading.current_thread() and thread.is_alive()
    del both
    thread.join(60)
    assert not thread.is_alive(), "it did not end within 60 s of its turns"
