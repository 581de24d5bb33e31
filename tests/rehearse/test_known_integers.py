"""Integers tracked behind fake tensors, and the cache of shapes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.rehearse.small import comparable, config_of
from titanmoe.ops.kernels import installed
from titanmoe.rehearse import known_integers
from titanmoe.rehearse.fake_recorder import FakeRecorder
from titanmoe.rehearse.rehearsal import rehearse
from titanmoe.rehearse.shape_cache import Shapes


def recorder() -> tuple[FakeTensorMode, FakeRecorder]:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    return fake, FakeRecorder({}, 0, True, fake)


def test_integers_are_tracked() -> None:
    fake, noted = recorder()
    with fake, noted.recording():
        experts = torch.tensor([2, 0, 2, 1])
        count = experts.new_zeros(4).scatter_add_(0, experts, torch.ones_like(experts))
        view = count.view(2, 2)
        view[1] += 5
        sizes = count.cumsum(0)
    assert known_integers.known_list(count) == [1, 1, 7, 5]  # through its view
    assert known_integers.known_list(sizes) == [1, 2, 9, 14]


def test_values_computed_from_weights_are_unknown_and_so_is_what_they_are_written_to() -> None:
    fake, noted = recorder()
    with fake, noted.recording():
        scores = torch.zeros(4).softmax(0)
        place = torch.arange(4)
        best = scores.argmax()
        place[:2] = best
    assert known_integers.known_list(best) is None and known_integers.known_list(place) is None


def test_the_host_reads_known_values_and_every_read_is_one_wait() -> None:
    fake, noted = recorder()
    tolist = mock.patch.object(torch._subclasses.FakeTensor, "tolist", lambda x: noted.read_value(x))
    with fake, noted.recording(), tolist:
        assert torch.arange(3).add(1).tolist() == [1, 2, 3]
        assert int(torch.arange(4).sum()) == 6
        assert torch.ones(3).sum().item() == 0.0
        with pytest.raises(RuntimeError, match="unknown in a rehearsal"):
            torch.ones(3).argmax().item()
    assert len(noted.log.syncs) == 4


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_cached_shapes_are_those_that_torch_infers() -> None:
    changes = {
        "training.mixed_precision_param": "bfloat16",
        "moe.kernels": "auto",
        "activation_checkpoint.mode": "full",
    }
    config = config_of(changes | {"parallelism.tp": 2, "parallelism.experts.ep": 4}, 4, "h100")
    rehearsal = rehearse(config, 4, 1, "h100")
    with mock.patch.object(Shapes, "__call__", lambda self, func, args, kwargs: func(*args, **kwargs)):
        uncached = rehearse(config, 4, 1, "h100")
    assert comparable(rehearsal.log, rehearsal.groups) == comparable(uncached.log, uncached.groups)
    assert (rehearsal.log.syncs, rehearsal.operations) == (uncached.log.syncs, uncached.operations)
    assert rehearsal.memory == uncached.memory
