"""moe.dispatcher = "auto": symmetric memory on all ranks or alltoall on all, wherever and on whichever rank it fails.

CPUs stand for GPUs: they share memory, and only the question whether there are GPUs is answered otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import parity, world
from titanmoe.config import ConfigError
from titanmoe.config.schema import Config
from titanmoe.fold.degrees import derive
from titanmoe.moe.dispatchers import symmetric_buffers
from titanmoe.moe.dispatchers.alltoall import AllToAll
from titanmoe.moe.dispatchers.dispatcher_spec import why_not_symm_mem, with_planned_dispatcher
from titanmoe.moe.dispatchers.symm_mem import Symmetric
from titanmoe.moe.dispatchers.symmetric_buffers import SymmetricBuffers
from titanmoe.ops.cpu import shared_memory

EP = {"parallelism.experts.ep": 2, "moe.symm_mem_factor": 2.0, "parallelism.node": 4}
AUTO = EP | {"moe.dispatcher": "auto"}


def after(function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """The function, and then the error."""

    def failing(*args: Any) -> Any:
        function(*args)
        raise error

    return failing


def no_rendezvous(*_: Any) -> None:
    raise AssertionError("ranks would wait for one that cannot come")


def obstacle(where: str) -> AbstractContextManager[Any]:
    """On one rank: what keeps it from sharing memory."""
    if where == "mapping it":
        return mock.patch.object(shared_memory.os, "posix_fallocate", side_effect=OSError(28, "No space left"))
    if where == "after all have mapped it":
        failing = after(
            symmetric_buffers.allocate_shared, RuntimeError("CUDA driver error: operation not permitted\nmore")
        )
        return mock.patch.object(symmetric_buffers, "allocate_shared", failing)
    if where == "the check":
        exchange = SymmetricBuffers.exchange

        def swapped(self: SymmetricBuffers, *args: Any) -> tuple[Tensor, ...]:
            """Two rows arrive in each other's place, there and back."""
            (rows,) = exchange(self, *args)
            used = rows[:, 0].nonzero().flatten()[:2]
            rows[used] = rows[used].flip(0)
            return (rows,)

        return mock.patch.object(SymmetricBuffers, "exchange", swapped)
    if where == "PyTorch":
        return mock.patch.object(Symmetric, "missing", return_value="this PyTorch has none")
    return nullcontext()


def gpus_allocate(shape: Any, dtype: torch.dtype, device: Any, group: Any) -> Any:
    """As on GPUs, where a rank that has no memory to share would leave the others waiting in torch's rendezvous."""
    error = {"side_effect": RuntimeError("no such driver")} if dist.get_rank() == 1 else {}
    torchs = {"empty": mock.Mock(**error), "rendezvous": no_rendezvous, "set_backend": mock.Mock()}
    with mock.patch.multiple(symmetric_buffers.symm_mem, **torchs):
        return symmetric_buffers._allocate_on_gpus(shape, dtype, device, group)


def trained(changes: dict[str, Any], where: str = "", gpus: bool = True) -> tuple[Any, Any]:
    """parity.measure, where rank 1 alone meets an obstacle; and the header's row and the dispatchers in use."""
    seen = []

    def look(trainer: Any) -> None:
        training = trainer.training
        kinds = {type(moe.dispatcher) for moe in training.moe_layers.values()}
        shared = training.gradients.first_pass is not None
        unused = {moe.experts.has_unused_slots for moe in training.moe_layers.values()}
        seen.append((training.setup_rows.get("dispatcher", ""), kinds, shared, unused))

    with ExitStack() as stack:
        if gpus:
            stack.enter_context(mock.patch("titanmoe.parallel.expert.kind", return_value="cuda"))
        if where == "allocating":
            stack.enter_context(mock.patch.object(symmetric_buffers, "allocate_shared", gpus_allocate))
        elif dist.get_rank() == 1:
            stack.enter_context(obstacle(where))
        outcome = parity.measure(changes, prepare=look)
    return outcome, seen[0]


def agree(got: Any, want: Any) -> None:
    for name in ("loss", "norm"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-12)
    assert parity.worst_error(got.grads, want.grads)[0] < 1e-12


PLAIN = ({AllToAll}, False, {False})
SHARED = ({Symmetric}, True, {True})


def test_it_is_symmetric_memory_where_that_works() -> None:
    results = world.run(2, trained, AUTO)
    texts, *used = zip(*(seen for _, seen in results), strict=True)
    assert [*zip(*used, strict=True)] == [SHARED] * 2
    text = 'symm_mem, because moe.dispatcher = "auto" and the ranks share memory: '
    assert texts[0] == texts[1] and texts[0].startswith(text) and texts[0].endswith("B of buffers each")
    named = world.run(2, trained, EP | {"moe.dispatcher": "symm_mem"})
    assert [seen for _, seen in named] == [("", *SHARED)] * 2
    assert results[0][0].loss == named[0][0].loss and results[0][0].norm == named[0][0].norm


OBSTACLES = {
    "mapping it": "cannot share memory between these ranks: /dev/shm: No space left",
    "allocating": "cannot share memory between these ranks: no such driver",
    "after all have mapped it": "cannot share memory between these ranks: CUDA driver error: operation not permitted",
    "the check": "rows of a first exchange came out wrong on 2 of",
    "PyTorch": "this PyTorch has none",
}


@pytest.mark.parametrize("where", OBSTACLES)
def test_one_rank_that_cannot_makes_all_use_alltoall(where: str) -> None:
    """With 4 ranks in 2 groups: those of the other group, which could, do so too."""
    changes = AUTO | {"training.global_batch_size": 4}
    results = world.run(4, trained, changes, where)
    texts, *used = zip(*(seen for _, seen in results), strict=True)
    assert [*zip(*used, strict=True)] == [PLAIN] * 4
    assert len(set(texts)) == 1 and texts[0].startswith('alltoall, because moe.dispatcher = "auto" and ')
    assert OBSTACLES[where] in texts[0] and "\n" not in texts[0]
    agree(results[0][0], world.run(4, trained, changes | {"moe.dispatcher": "alltoall"})[0][0])


def refused(where: str) -> list[str]:
    try:
        trained(EP | {"moe.dispatcher": "symm_mem"}, where)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("where", [where for where in OBSTACLES if where != "PyTorch"])
def test_a_recipe_that_names_it_is_refused_by_all(where: str) -> None:
    """In torch's words."""
    (one,), (other,) = world.run(2, refused, where)
    assert one == other and one.startswith('moe.dispatcher = "symm_mem": ') and OBSTACLES[where] in one
    assert one.endswith('; use dispatcher = "alltoall"')


def test_on_cpus_it_is_alltoall() -> None:
    results = world.run(2, trained, AUTO, "", False)
    why = 'alltoall, because moe.dispatcher = "auto" and symm_mem is slower on CPUs'
    assert [seen for _, seen in results] == [(why, *PLAIN)] * 2


REASONS = {
    "one rank": ({"parallelism.experts.ep": 1}, 8, "with ep * etp = 1 no routed token leaves its rank"),
    "a node": ({"parallelism.experts.etp": 2}, 2, "ep * etp = 2 * 2 ranks are on nodes of 2"),
    "a rank a node": ({}, 1, "ep * etp = 2 * 1 ranks are on nodes of 1"),
    "halves": (
        {"moe.overlap": "halves", "training.local_batch_size": 2, "training.global_batch_size": 16},
        8,
        'moe.overlap = "halves" computes between sending tokens and waiting for them, and moe.dispatcher = '
        '"symm_mem" leaves its counts on the device',
    ),
    "pairs": (
        {"moe.overlap": "pairs", "parallelism.pp": 2, "pipeline.schedule": "DualPipeV", "model.num_layers": 4}
        | {"training.global_batch_size": 16},
        8,
        'moe.overlap = "pairs" computes where the host would wait for routed tokens, and moe.dispatcher = "symm_mem" '
        "has no such place",
    ),
    "bins": (
        {"moe.pad_to_capacity": True, "moe.capacity_factor": 1.0},
        8,
        'moe.pad_to_capacity = true makes every size static, so that moe.dispatcher = "symm_mem" saves the host '
        "nothing",
    ),
    "": ({}, 8, ""),
}


def read(changes: dict[str, Any]) -> Config:
    return parity.read(AUTO | {"training.global_batch_size": 8} | changes, 8)


@pytest.mark.parametrize("name", REASONS)
def test_a_recipe_may_leave_no_choice(name: str) -> None:
    """Such a recipe is legal, which with symm_mem it is not."""
    changes, node, why = REASONS[name]
    config = read(changes)
    fold = derive(8, config.parallelism)
    assert why_not_symm_mem(config, fold, node, gpus=True) == why
    assert with_planned_dispatcher(config, fold, node, gpus=True).moe.dispatcher == ("alltoall" if why else "symm_mem")
    if name in ("halves", "pairs", "bins"):
        with pytest.raises(ConfigError, match=r'moe\.dispatcher = "symm_mem"'):
            read(changes | {"moe.dispatcher": "symm_mem"})
