"""`titanmoe slurm`: write a job script for sbatch, which starts `titanmoe train` once on every node.

Called by titanmoe.cli. Before the job's time is up it signals the ranks, which save and end, and requeues itself.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys

from titanmoe.components import COMPONENTS
from titanmoe.config import ConfigError, load
from titanmoe.config.schema import Config
from titanmoe.config.world_size import add_ranks, world_of
from titanmoe.fold.legality import violations

START_SCRIPT = r"""
set -u -o pipefail
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1
logs={logs}-$SLURM_JOB_ID${SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}
mkdir -p "$logs" || exit 1
# The port differs between jobs, which may share a node.
export LOGS=$logs MASTER=${names%%$'\n'*} PORT=$((20000 + SLURM_JOB_ID % 10000)) PYTHONUNBUFFERED=1

# One task per node, which starts the node's ranks. --kill-on-bad-exit ends all nodes with the first that fails;
# --cpu-bind=none leaves a node's cores to all of its ranks.
on_each_node() { # LOG COMMAND
    exec srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none \
        --output="$logs/$1%n.log" {wrapped}bash -c "$2"
}
"""
CHECK_SCRIPT = r"""
(on_each_node check {check}) || {
    echo "this cluster is not fit to train on, or could not be checked: see $logs/check0.log" >&2
    exit 1
}
"""
TRAIN_SCRIPT = r"""
echo "job $SLURM_JOB_ID: nodes: {nodes}, ranks on each: {each}, meeting at $MASTER:$PORT; logs in $logs"
out_of_time=''
# srun passes SIGTERM to the tasks, and those pass it to their ranks, which save and end.
trap 'out_of_time=yes; kill -TERM "${!:-}" 2>/dev/null' USR1
trap 'kill -TERM "${!:-}" 2>/dev/null' INT TERM
on_each_node node {train} &
while kill -0 $! 2>/dev/null; do wait $!; done # a signal ends the wait early
wait $!
code=$?
if ((code != 0)) && [[ -n $out_of_time ]]; then
    # A run that does not save would start from scratch each time, forever.
    if ! grep -q '^saved ' "$logs/node0.log"; then
        echo "the job's time is up, and the run did not save: not requeued. [checkpoint] enable = true saves;" \
            "$logs/node0.log says more" >&2
        exit "$code"
    fi
    echo "job $SLURM_JOB_ID: its time is up and the run has saved: requeued, to resume from there"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "scontrol requeue $SLURM_JOB_ID failed: submit the same script again" >&2
    exit 1
fi
if ((code != 0)); then
    echo "a node failed (exit code $code) and the others were stopped: the end of its log says why, $logs/node*.log" >&2
fi
exit "$code"
"""


def add_slurm(commands: argparse._SubParsersAction) -> None:
    slurm = commands.add_parser(
        "slurm",
        help="a job script for Slurm that trains a recipe",
        description="Prints a script for sbatch: titanmoe slurm RECIPE > job.sh && sbatch job.sh. It runs in the "
        "folder from which it is submitted. docs/launch.md says more.",
    )
    add_ranks(slurm)
    slurm.set_defaults(run=run_slurm)
    slurm.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="ranks of a node (default 8, or all if there are fewer)"
    )
    for name in ("account", "partition", "time"):
        slurm.add_argument(f"--{name}", metavar=name.upper(), help=f"the job's {name}, as for sbatch")
    slurm.add_argument(
        "--sbatch", metavar="OPTION", action="append", default=[], help="another option, as in --sbatch=--qos=high"
    )
    slurm.add_argument(
        "--container-image", metavar="IMAGE", help="run in it: by Apptainer if it ends in .sif, else by Pyxis"
    )
    slurm.add_argument(
        "--container-mounts", metavar="FROM:TO,...", help="folders in the container besides the submitting one"
    )
    slurm.add_argument("--python", help="the nodes' Python with titanmoe (default: this one; in a container, python)")
    slurm.add_argument(
        "--check", action="store_true", help="first compare every parallelism on these nodes with one rank"
    )


def run_slurm(args: argparse.Namespace) -> int:
    try:
        print(job_script(args), end="")
        return 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def job_script(args: argparse.Namespace) -> str:
    """Return the text of a job script for sbatch. With --print-config, prints the config and exits.

    `args` has the options that `add_slurm` defines, and `overrides`, the words of the recipe and its overrides. With
    --check the job compares the cluster with one rank before it trains.

    Raises:
        ConfigError: the ranks do not fill nodes, options lack another one, or the recipe or its mapping cannot run.
    """
    from titanmoe.train.launch import with_ranks_per_node

    world = world_of(args.ranks, args.overrides, COMPONENTS)
    ranks_per_node = min(8, world) if args.gpus_per_node is None else args.gpus_per_node
    problems = []
    if ranks_per_node < 1:
        problems.append(f"--gpus-per-node = {ranks_per_node} is not a number of ranks: use 1 or more")
    elif world % ranks_per_node:
        fits = max(n for n in range(1, ranks_per_node + 1) if world % n == 0)
        problems.append(
            f"{world} ranks do not fill nodes of {ranks_per_node}: give --gpus-per-node {fits}, or other --ranks"
        )
    if args.container_mounts and not args.container_image:
        problems.append("--container-mounts is about a container: give --container-image too")
    if problems:
        raise ConfigError(problems)
    config = load(
        args.overrides, COMPONENTS, lambda config: violations(with_ranks_per_node(config, ranks_per_node), world)
    )
    nodes = world // ranks_per_node
    python = shlex.quote(args.python or ("python" if args.container_image else sys.executable))
    meet = f'--nnodes {nodes} --node-rank "$SLURM_NODEID" --master-addr "$MASTER" --master-port "$PORT"'
    words = f'{shlex.join(args.overrides)} --ranks {world} {meet} --logs "$LOGS/node$SLURM_NODEID"'
    torchrun = f"{python} -m torch.distributed.run {meet} --nproc-per-node {ranks_per_node}"
    check = f"exec {torchrun} -m titanmoe.launcher.check_cluster"
    values = {
        "nodes": str(nodes),
        "each": str(ranks_per_node),
        "logs": shlex.quote(f"{config.job.dump_folder}/launch/{config.job.name}"),
        "wrapped": _container_prefix(args.container_image, args.container_mounts),
        "check": shlex.quote(f"{check} --device {config.training.device}"),
        "train": shlex.quote(f"exec {python} -m titanmoe train {words}"),
    }
    body = START_SCRIPT + CHECK_SCRIPT * args.check + TRAIN_SCRIPT
    return _head(args, config, nodes, ranks_per_node) + re.sub(r"\{([a-z]+)\}", lambda match: values[match[1]], body)


def _head(args: argparse.Namespace, config: Config, nodes: int, ranks_per_node: int) -> str:
    gpus = [f"--gpus-per-node={ranks_per_node}"] if config.training.device != "cpu" else []
    job_options = [f"--{name}={value}" for name in ("account", "partition", "time") if (value := getattr(args, name))]
    name = re.sub(r"[^\w.-]+", "_", config.job.name)
    options = [f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1", *gpus, "--exclusive"]
    # Two minutes before the job's time is up Slurm sends SIGUSR1: the run saves and ends, and the job is requeued.
    options += ["--output=slurm-%j.log", "--open-mode=append", "--requeue", "--signal=B:USR1@120"]
    return "#!/usr/bin/env bash\n" + "".join(f"#SBATCH {option}\n" for option in [*options, *job_options, *args.sbatch])


def _container_prefix(image: str | None, mounts: str | None) -> str:
    """Return the words between srun and its command that run it in a container; "" without an image.

    An image is a name or the path of a .sif file. Mounted are the folder from which the job is submitted and those of
    `mounts`, FROM:TO separated by commas.
    """
    if not image:
        return ""
    more = shlex.quote(f",{mounts}") if mounts else ""
    if image.endswith(".sif"):
        return f'apptainer exec --nv --bind "$PWD:$PWD"{more} --pwd "$PWD" {shlex.quote(image)} '
    return f'--container-image={shlex.quote(image)} --container-mounts="$PWD:$PWD"{more} --container-workdir="$PWD" '
