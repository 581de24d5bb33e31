"""Entry point of one rank: `python -m titanmoe.rank --config RECIPE.toml`.

`titanmoe train` starts it and train.py calls it. It passes the tools that watch a run to `titanmoe.train.launch`.
"""

import gc
import sys

gc.disable()  # imports leave hardly any garbage, and collecting it takes a fifth of their time

from titanmoe.components import COMPONENTS  # noqa: E402
from titanmoe.config.schema import Config  # noqa: E402
from titanmoe.train.launch import main  # noqa: E402
from titanmoe.train.runtime import Runtime, exit_now  # noqa: E402
from titanmoe.watch.number_checks import checks, watched  # noqa: E402

gc.enable()


def plan_overlap(config: Config, runtime: Runtime) -> tuple[Config, str]:
    """Replace moe.overlap = "auto" by the planner's choice; return the config and the reason, "" if nothing changed.

    Collective over the world: all ranks plan for rank 0's device, so that all make the same choice.
    """
    if config.moe.overlap != "auto":
        return config, ""
    import torch
    import torch.distributed as dist

    from titanmoe.plan import devices
    from titanmoe.plan.planned_overlap import planned_overlap

    if runtime.device.type != "cuda":
        return planned_overlap(config, runtime.world, devices.read_device("cpu"))
    gpu = [torch.cuda.get_device_name(runtime.device)]
    dist.broadcast_object_list(gpu)
    return planned_overlap(config, runtime.world, devices.device_like(gpu[0]))


def run() -> None:
    """Run this rank from the command line to the end, and exit the process with its exit code."""
    try:
        code = main(sys.argv[1:], COMPONENTS, watch=watched, overlap=plan_overlap, checks=checks)
    except SystemExit as end:
        code = end.code
    exit_now(code)


if __name__ == "__main__":
    run()
