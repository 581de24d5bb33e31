"""The watch over a run: `with watched(trainer):` around its training.

Imports torch and the rest only once training begins: a refusal must not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanmoe.train.trainer import Trainer


@contextmanager
def watched(trainer: Trainer) -> Iterator[None]:
    """All ranks enter it together. When one of them is late, the process ends in here, with a report."""
    if trainer.runtime.world == 1 or not trainer.config.training.watch:
        yield
        return
    from titanmoe.watch.watch import Watch

    with Watch(trainer):
        yield
