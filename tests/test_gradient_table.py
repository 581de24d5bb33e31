"""Who sums which gradient: the page says what steps of small models show."""

from __future__ import annotations

import pytest
import torch

from tests.support import gradient_table


@pytest.mark.slow
def test_the_table_is_that_of_the_code() -> None:
    page = gradient_table.PAGE.read_text(encoding="utf-8")
    assert gradient_table.replace_table(page) == page, "write it again: python -m tests.support.gradient_table"


def test_gradients_are_replaced_only_inside_the_context() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    with gradient_table.replace_gradients([], [weight], 8.0):
        weight.sum().backward()
    assert weight.grad.tolist() == [8.0] * 3
    weight.sum().backward()
    assert weight.grad.tolist() == [9.0] * 3
