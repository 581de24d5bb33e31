"""A file by which `titanmoe train` passes the config that it has read and checked to its ranks.

Ranks then neither read the recipe nor apply the laws again. Under torchrun each of them does.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from titanmoe.config.fields import build, flat
from titanmoe.config.parts import Parts
from titanmoe.config.schema import Config

FILE = "TITANMOE_CONFIG"
"""The environment variable with the file's name."""


class Checked(NamedTuple):
    config: Config
    """As the recipe and the command line say, with nothing derived: a restart may have other ranks."""
    ranks: int
    """The number of ranks that it was checked for."""
    source: str
    """Where it comes from, for a message."""
    scores: str = ""
    """What the ranks count (titanmoe.train.scoring) in place of training: of "labels", or of the "likeliest" ids."""


@contextmanager
def handed_on(checked: Checked) -> Iterator[Path]:
    """The file, for as long as ranks may be started."""
    with tempfile.NamedTemporaryFile("w", prefix="titanmoe-", suffix=".json", encoding="utf-8") as file:
        json.dump(checked._replace(config=flat(checked.config))._asdict(), file)
        file.flush()
        yield Path(file.name)


def received(parts: Parts) -> Checked | None:
    """None where no launcher has handed anything on."""
    if not (file := os.environ.get(FILE)):
        return None
    values = json.loads(Path(file).read_text(encoding="utf-8"))
    return Checked(build(values["config"], parts), values["ranks"], values["source"], values["scores"])
