"""Who sums which gradient: the page says what steps of small models show."""

from __future__ import annotations

import re

from tests import gradients


def test_the_table_is_that_of_the_code() -> None:
    page = gradients.PAGE.read_text(encoding="utf-8")
    assert gradients.renew(page) == page, "write it again: python -m tests.gradients"


def test_the_table_has_every_axis_and_no_hole() -> None:
    table = gradients.PAGE.read_text(encoding="utf-8").partition(gradients.BEGIN)[2].partition(gradients.END)[0]
    for view, axes in gradients.AXES.items():
        assert f"| {view} | {' | '.join(axes)} |" in table
    assert not re.search(r"\| *(\?)? *\|", table)
