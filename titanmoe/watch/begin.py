"""`with watched(config, training):` around training watches the run's ranks.

torch and the rest are imported only when training begins, so that a refusal does not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanmoe.config.schema import Config
    from titanmoe.train.training import Training


@contextmanager
def watched(config: Config, training: Training) -> Iterator[None]:
    """All ranks enter it together. If one of them is late, the process ends here with a report."""
    if training.runtime.world == 1 or not config.training.watch:
        yield
        return
    from titanmoe.watch.watch import Watch

    with Watch(config.training, config.checkpoint, training):
        yield
