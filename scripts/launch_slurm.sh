#!/usr/bin/env bash
# Starts a recipe on the nodes of a Slurm job. docs/multi_node.md explains it.
#
#     sbatch -N 16 scripts/launch_slurm.sh train_configs/mixtral_8x22b.toml [--table.field value ...]
#
# Run it in titanmoe's folder. scripts/launch_slurm.sh --dry-run RECIPE.toml prints what a job would run; it
# reads the SLURM_ variables that are set, and assumes one node, this machine, for those that are not.
#
# In the environment, with their defaults: GPUS=8 ranks per node, VENV=.venv, PORT from the job's number, LOGS=
# runs/launch/RECIPE-JOB for one log per node, SCONTROL=scontrol, SRUN=srun. OMP_NUM_THREADS is 1 unless set.
#
# Two minutes before the job's time is up, Slurm sends SIGUSR1: the run saves and ends, and the job is requeued.
#SBATCH --job-name=titanmoe
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -u -o pipefail

fail() {
    echo "launch_slurm.sh: $*" >&2
    exit 2
}

dry_run=''
[[ ${1:-} == --dry-run ]] && dry_run=yes && shift
[[ $# -gt 0 && $1 != -* ]] || fail "the recipe comes first, such as train_configs/mixtral_8x22b.toml, then overrides"
recipe=$1 && shift
# sbatch runs a copy of this script, which does not know the folder.
dir=${SLURM_SUBMIT_DIR:-$PWD}
[[ -f $dir/train.py ]] || fail "$dir has no train.py: submit from the folder of titanmoe"
cd "$dir" || exit 1
[[ -f $recipe ]] || fail "there is no recipe $recipe (looked in $dir)"
[[ -n $dry_run || -n ${SLURM_JOB_ID:-} ]] || fail "no Slurm job: start with sbatch -N NODES, or look with --dry-run"

job=${SLURM_JOB_ID:-0}
nodes=${SLURM_JOB_NUM_NODES:-1}
if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
    names=$(${SCONTROL:-scontrol} show hostnames "$SLURM_JOB_NODELIST") || fail "scontrol cannot list the job's nodes"
    master=${names%%$'\n'*}
else
    master=$(hostname)
fi
venv=${VENV:-.venv}
[[ $venv == /* ]] || venv=$dir/$venv
[[ -n $dry_run || -x $venv/bin/python ]] || fail "there is no $venv/bin/python: run make setup, or set VENV"
port=${PORT:-$((20000 + job % 10000))} # so that two jobs on one node use different ports
logs=${LOGS:-runs/launch/$(basename "$recipe" .toml)-$job}${SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}
# The store: each attempt of torchrun's --max-restarts gets its own; torchrun itself reads the variable.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# One torchrun per node; each task knows its own number. --kill-on-bad-exit ends all nodes with the first that fails;
# --cpu-bind=none leaves a node's cores to all of its ranks.
launch=("${SRUN:-srun}" "--nodes=$nodes" "--ntasks=$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none
    "--output=$logs/node%n.log" bash -c 'exec "$0" -m torch.distributed.run --node-rank "$SLURM_NODEID" "$@"'
    "$venv/bin/python" --nnodes "$nodes" --nproc-per-node "${GPUS:-8}" --master-addr "$master" --master-port "$port"
    train.py --config "$recipe" "$@")
if [[ -n $dry_run ]]; then
    set_for_all="OMP_NUM_THREADS=$OMP_NUM_THREADS PYTHONUNBUFFERED=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    echo "cd $(printf %q "$dir") && $set_for_all $(printf '%q ' "${launch[@]}")"
    exit 0
fi

mkdir -p "$logs" || fail "cannot write to $logs"
echo "job $job: $nodes nodes of ${GPUS:-8} ranks, meeting at $master:$port: $recipe; logs in $logs"
out_of_time=''
# srun passes SIGTERM to every torchrun, and those pass it to their ranks.
trap 'out_of_time=yes; kill -TERM "${!:-}" 2>/dev/null' USR1
trap 'kill -TERM "${!:-}" 2>/dev/null' INT TERM
"${launch[@]}" &
while kill -0 $! 2>/dev/null; do wait $!; done # a signal ends the wait early
wait $!
code=$?
if ((code != 0)) && [[ -n $out_of_time ]]; then
    # A run that does not save would start from scratch each time, forever.
    if ! grep -q '^saved ' "$logs/node0.log"; then
        echo "launch_slurm.sh: the job's time is up, and the run did not save: not requeued. [checkpoint] enable =" \
            "true saves; $logs/node0.log says more" >&2
        exit "$code"
    fi
    echo "job $job: its time is up and the run has saved: requeued, to resume from there"
    "${SCONTROL:-scontrol}" requeue "$job" && exit 0
    echo "launch_slurm.sh: scontrol requeue $job failed: start the job again by the same sbatch" >&2
    exit 1
fi
if ((code != 0)); then
    echo "launch_slurm.sh: a node failed (exit code $code) and the others were stopped; srun's lines above name it," \
        "the logs are $logs/node*.log" >&2
fi
exit "$code"
