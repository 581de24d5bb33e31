"""One rank of a run: python -m titanmoe.rank --config RECIPE.toml. `titanmoe train` starts it; train.py calls it."""

import gc
import sys

gc.disable()  # imports make much that stays and hardly any garbage: collecting takes a fifth of their time

from titanmoe.config.schema import Config, MoE  # noqa: E402
from titanmoe.parts import PARTS  # noqa: E402
from titanmoe.train.launch import main  # noqa: E402
from titanmoe.train.runtime import leave  # noqa: E402
from titanmoe.watch.begin import watched  # noqa: E402
from titanmoe.watch.numbers import checks  # noqa: E402

gc.enable()


def planned_rows(config: Config, world: int) -> MoE:
    from titanmoe.plan import planned_rows as planner  # only here, because few runs need it and it takes a while

    return planner.planned_rows(config, world)


def run() -> None:
    try:
        code = main(sys.argv[1:], PARTS, watch=watched, rows=planned_rows, checks=checks)
    except SystemExit as end:
        code = end.code
    leave(code)


if __name__ == "__main__":
    run()
