#!/usr/bin/env bash
# The first hour on a GPU, in three calls, each safe to stop. The archive of a stage holds what was found until then.
#
#     scripts/bench/h200.sh 1 [OUT]    5 minutes: a plain run, then each GPU test once, a deterministic run, one in 8 bits
#     scripts/bench/h200.sh 2 [OUT]    6 minutes: where the time of a step of Qwen3 goes and which kernel its attention
#                                      ran in; steps and parts of Mixtral's and Qwen3's layers, plain and compiled
#     scripts/bench/h200.sh 3 [OUT]    9 minutes: the same layers beside TorchTitan, in 8 bits, and DeepSeek-V3's
#
# Run 1 and 2 first, fix what they show, and run them again. All GPU tests with all their cases: pytest -m gpu.
# OUT: a folder for logs, figures and stage-N.tar.gz, runs/h200 by default. The exit status is 0 if all of stage 1 or 2
# went well; of stage 3 it is that of the last benchmark. Stage 1 ends where the plain run fails.
#
# Where packages are missing and nothing can be fetched, carry the wheels that scripts/bench/wheels.sh collects: they are
# taken from the folder wheels/.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
stage=${1:-}
[[ $stage =~ ^[123]$ ]] || { echo "usage: scripts/bench/h200.sh 1|2|3 [OUT]" >&2; exit 2; }
python=${PYTHON:-python3}
out=${2:-runs/h200}/stage-$stage
mkdir -p "$out"
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
trap 'tar -C "$out/.." -czf "$out.tar.gz" "stage-$stage"; echo "took $SECONDS s; all of it is in $out.tar.gz"' EXIT
trap 'kill $(jobs -p) 2> /dev/null; exit 143' INT TERM

if compgen -G 'wheels/*.whl' > /dev/null; then
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" wheels/*.whl || exit 1
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "h200.sh: torch finds no CUDA device")' || exit 2
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv | tee "$out/gpu.csv"

layers() {  # SECONDS NAME options of layers.py
    timeout "$1" "$python" scripts/bench/layers.py --seconds "$(($1 - 30))" --json "$out/$2.json" "${@:3}" \
        2> "$out/$2.err" | tee "$out/$2.txt"
    local status=${PIPESTATUS[0]}
    [ "$status" = 0 ] || tail -n 30 "$out/$2.err"
    return "$status"
}

train() {  # NAME further options: the debug recipe on this GPU, 20 steps
    timeout 120 "$python" train.py --config train_configs/debug.toml --job.dump_folder "$out/runs" --job.name "$1" \
        --training.device cuda --training.steps 20 --parallelism.tp 1 --parallelism.experts.ep 1 \
        --training.mixed_precision_param bfloat16 "${@:2}" > "$out/$1.log" 2>&1
    local status=$?
    echo "$1: exit status $status"
    [ $status = 0 ] || tail -n 30 "$out/$1.log"
    return $status
}

case $stage in
1)  # Nothing that watches ranks or asks NCCL about itself runs before a plain run has passed.
    train plain --training.watch false --training.stragglers false || exit 1
    sed '/^step 1\//q' "$out/plain.log"
    # Every GPU test, by its mark. Side by side, so that none waits for another's compiler.
    mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
    mapfile -t names < <("$python" -m pytest -m gpu --one-of-each --collect-only -q -p no:cacheprovider "${files[@]}" |
        tee "$out/tests.txt" | grep '^tests/.*::')
    pids=() status=0
    [ ${#names[@]} -gt 0 ] || { cat "$out/tests.txt"; status=1; }
    for part in 0 1 2 3 4 5 6 7; do
        mine=()
        for ((i = part; i < ${#names[@]}; i += 8)); do mine+=("${names[i]}"); done
        [ ${#mine[@]} -gt 0 ] || continue
        timeout 170 "$python" -m pytest -m gpu -q -p no:cacheprovider "${mine[@]}" > "$out/part-$part.log" 2>&1 & pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
    for log in "$out"/part-*.log; do
        echo "$(basename "$log" .log): $(tail -n 1 "$log")"
        grep -E '^(FAILED|ERROR)' "$log"
    done
    train deterministic --training.deterministic true || status=1
    train fp8 --moe.expert_dtype fp8 || status=1  # learned routing: an expert's rows are seldom a multiple of 16
    exit $status
    ;;
2)
    timeout 80 "$python" scripts/bench/trace_step.py qwen3 --keep "$out/qwen3.json.gz" 2> "$out/trace.err" | tee "$out/trace.txt"
    traced=${PIPESTATUS[0]}
    [ "$traced" = 0 ] || tail -n 30 "$out/trace.err"
    layers 270 layers --shapes mixtral qwen3 --sides titanmoe compiled || exit
    exit "$traced"
    ;;
3)
    layers 330 torchtitan --shapes mixtral qwen3 --sides titanmoe torchtitan fp8
    layers 180 deepseek --shapes deepseek --sides titanmoe compiled fp8
    ;;
esac
