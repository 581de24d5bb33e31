"""Which blocks have experts."""

from dataclasses import replace
from itertools import product

from titanmoe.config.blocks import has_experts, moe_blocks, moe_layers
from titanmoe.config.schema import Model


def test_dense_blocks_lead_and_then_every_nth_has_experts():
    m = replace(Model(), num_layers=6, num_dense_layers=1, moe_every=2)
    assert [has_experts(m, layer) for layer in range(6)] == [False, False, True, False, True, False]
    assert all(has_experts(Model(), layer) for layer in range(4))
    # The block of multi-token prediction, after the last layer, is like it.
    assert not has_experts(m, 6) and has_experts(replace(m, num_layers=5), 5) and has_experts(Model(), 4)


def test_the_count_is_that_of_the_blocks():
    for layers, dense, every, mtp in product(range(1, 6), range(6), range(1, 7), (0, 1)):
        model = Model(num_layers=layers, num_dense_layers=dense, moe_every=every, mtp_depth=mtp)
        blocks = moe_blocks(model)
        assert moe_layers(model) == len([block for block in blocks if block < layers])
        assert (layers in blocks) == (mtp == 1 and has_experts(model, layers - 1))
