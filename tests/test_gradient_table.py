"""Who sums which gradient: the page says what steps of small models show."""

from __future__ import annotations

import re

from tests.support import gradient_table


def test_the_table_is_that_of_the_code() -> None:
    page = gradient_table.PAGE.read_text(encoding="utf-8")
    assert gradient_table.renew(page) == page, "write it again: python -m tests.support.gradient_table"


def test_the_table_has_every_axis_and_no_hole() -> None:
    page = gradient_table.PAGE.read_text(encoding="utf-8")
    table = page.partition(gradient_table.BEGIN)[2].partition(gradient_table.END)[0]
    for view, axes in gradient_table.AXES.items():
        assert f"| {view} | {' | '.join(axes)} |" in table
    assert not re.search(r"\| *(\?)? *\|", table)
