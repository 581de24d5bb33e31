"""What `training.deterministic` refuses on GPUs: the table itself. `test_clean.py` has the steps of all recipes, and
`test_moe_options.py` all options of [moe]."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import titanmoe
from tests.support.nondeterministic import LISTED, cuda_refuses, names_in_docstring

aten = torch.ops.aten
WHOLE, PARTS = torch.arange(4), torch.arange(4) / 2


def test_the_table_has_all_that_torch_lists() -> None:
    assert len(names_in_docstring()) > 20 and names_in_docstring() <= LISTED.keys()


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "is_refused"),
    [
        (aten.cumsum.default, (PARTS, 0), {}, True),
        (aten.cumsum.default, (WHOLE, 0), {}, False),
        (aten.cumsum.default, (WHOLE, 0), {"dtype": torch.float64}, True),
        (aten.cumsum.default, (WHOLE, 0), {"dtype": torch.int32}, False),
        (aten.bincount.default, (WHOLE,), {}, False),
        (aten.bincount.default, (WHOLE, PARTS), {}, True),
        (aten.median.default, (PARTS,), {}, False),
        (aten.median.dim, (PARTS, 0), {}, True),
        (aten.scatter_reduce.two, (PARTS, 0, WHOLE, PARTS, "sum"), {}, False),
        (aten.scatter_reduce.two, (PARTS, 0, WHOLE, PARTS, "prod"), {}, True),
        (aten.put.default, (PARTS, WHOLE, PARTS), {}, True),
        (aten.index_put.default, (PARTS, [WHOLE], PARTS, True), {}, False),
    ],
)
def test_conditions(func: Any, args: tuple, kwargs: dict[str, Any], is_refused: bool) -> None:
    assert cuda_refuses(func, args, kwargs, func(*args, **kwargs)) == is_refused


def test_one_kernel_adds_by_atomics_and_what_it_adds_are_counts() -> None:
    """A rehearsal does not see inside a kernel; the table has this one, and refuses it for other counts than whole."""
    files = Path(titanmoe.__file__).parent.rglob("*.py")
    atomics = [(path.name, name) for path in files for name in re.findall(r"tl\.atomic_\w+", path.read_text())]
    assert atomics == [("route.py", "tl.atomic_add")]
