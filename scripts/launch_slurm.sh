#!/usr/bin/env bash
# Starts a recipe on the nodes of a Slurm job. docs/multi_node.md explains it.
#
#     sbatch -N 16 scripts/launch_slurm.sh train_configs/mixtral_8x22b.toml [--table.field value ...]
#
# To be given from the folder of titanmoe. scripts/launch_slurm.sh --dry-run RECIPE.toml prints what a job would run; it
# reads the SLURM_ variables that are set, and takes one node, this machine, for those that are not.
#
# In the environment, with their defaults: GPUS=8 ranks per node, VENV=.venv, PORT from the job's number, LOGS=
# runs/launch/RECIPE-JOB for one log per node, SCONTROL=scontrol, SRUN=srun. OMP_NUM_THREADS is 1 unless set.
#SBATCH --job-name=titanmoe
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=slurm-%j.log
set -u -o pipefail

fail() {
    echo "launch_slurm.sh: $*" >&2
    exit 2
}

dry_run=''
[[ ${1:-} == --dry-run ]] && dry_run=yes && shift
[[ $# -gt 0 && $1 != -* ]] || fail "the recipe comes first, such as train_configs/mixtral_8x22b.toml, then overrides"
recipe=$1 && shift
# sbatch runs a copy of this script, from which the folder cannot be told.
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
port=${PORT:-$((20000 + job % 10000))} # two jobs on one node meet at different ports
logs=${LOGS:-runs/launch/$(basename "$recipe" .toml)-$job}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1

# One torchrun per node; each task knows its own number. --kill-on-bad-exit ends all nodes with the first that fails;
# --cpu-bind=none leaves a node's cores to all of its ranks.
launch=("${SRUN:-srun}" "--nodes=$nodes" "--ntasks=$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none
    "--output=$logs/node%n.log" bash -c 'exec "$0" -m torch.distributed.run --node-rank "$SLURM_NODEID" "$@"'
    "$venv/bin/python" --nnodes "$nodes" --nproc-per-node "${GPUS:-8}" --master-addr "$master" --master-port "$port"
    train.py --config "$recipe" "$@")
if [[ -n $dry_run ]]; then
    echo "cd $(printf %q "$dir") && OMP_NUM_THREADS=$OMP_NUM_THREADS PYTHONUNBUFFERED=1 $(printf '%q ' "${launch[@]}")"
    exit 0
fi

mkdir -p "$logs" || fail "cannot write to $logs"
echo "job $job: $nodes nodes of ${GPUS:-8} ranks, meeting at $master:$port: $recipe; logs in $logs"
"${launch[@]}"
code=$?
if ((code != 0)); then
    echo "launch_slurm.sh: a node failed (exit code $code) and the others were ended; srun's lines above name it," \
        "the logs are $logs/node*.log" >&2
fi
exit "$code"
