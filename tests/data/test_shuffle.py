import numpy as np
import pytest

from titanmoe.data.shuffle import permute
from titanmoe.ops.counter_rng import key


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_every_number_once(size):
    assert sorted(permute(key("a", size), np.arange(size), size).tolist()) == list(range(size))


def test_a_number_has_the_same_place_whatever_else_is_asked():
    whole = permute(7, np.arange(1000), 1000)
    some = np.array([999, 3, 3, 500])
    assert permute(7, some, 1000).tolist() == whole[some].tolist()


def test_other_keys_have_other_orders_and_neighbours_part():
    a, b = (permute(key("order", n), np.arange(10_000), 10_000) for n in (0, 1))
    assert (a == b).mean() < 0.001
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05 and abs(np.corrcoef(a, np.arange(10_000))[0, 1]) < 0.05
    steps = np.abs(np.diff(a))
    assert steps.mean() == pytest.approx(10_000 / 3, rel=0.05)  # two uniform places


def test_sizes_beyond_any_memory():
    size = 10**12
    out = permute(5, np.arange(2000), size)
    assert len(set(out.tolist())) == 2000 and out.min() >= 0 and out.max() < size
    assert out.mean() == pytest.approx(size / 2, rel=0.05)
