#!/usr/bin/env bash
# The first hour on a GPU, in three calls, each safe to stop. The archive of a stage holds what was found until then.
#
#     scripts/bench/h200.sh 1 [OUT]    3 minutes: each kernel and each GPU test once, compiled experts without a row
#     scripts/bench/h200.sh 2 [OUT]    6 minutes: steps and parts of Mixtral's and Qwen3's layers, plain and compiled, and
#                                      where the time of a step of Qwen3 goes
#     scripts/bench/h200.sh 3 [OUT]    9 minutes: the same layers beside TorchTitan, in 8 bits, and DeepSeek-V3's
#
# Run 1 and 2 first, fix what they show, and run them again. All GPU tests with all their cases: pytest -m gpu.
# OUT: a folder for logs, figures and stage-N.tar.gz, runs/h200 by default. The exit status of stage 1 is that of its tests,
# of the others that of their last benchmark.
#
# Where packages are missing and nothing can be fetched, carry the wheels that scripts/bench/wheels.sh collects: they are
# taken from the folder wheels/.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
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

case $stage in
1)  # Side by side, so that none waits for another's compiler.
    kernels=tests/ops/test_kernels.py pids=()
    run() { timeout 170 "$python" -m pytest -m gpu --one-of-each -q -p no:cacheprovider "${@:2}" > "$out/$1.log" 2>&1; }
    run rows $kernels -k 'tokens_to_rows or wider or regrouped or place or rows_by or rows_put or 8_bits' & pids+=($!)
    run swiglu $kernels -k 'activation or ties or numbers or loss or rotation or watched or spread' & pids+=($!)
    run routing $kernels -k 'test_routing' & pids+=($!)
    run compiled $kernels -k 'compiled' & pids+=($!)
    run products tests/test_gpu.py -k 'product or experts' & pids+=($!)
    run attention tests/test_gpu.py -k 'attention or windows or block' & pids+=($!)
    run run tests/test_gpu.py -k 'learns or traced or graph' & pids+=($!)
    run symmetric tests/moe/test_symmetric_gpu.py & pids+=($!)
    status=0
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
    for log in "$out"/*.log; do
        echo "$(basename "$log" .log): $(tail -n 1 "$log")"
        grep -E '^(FAILED|ERROR)' "$log"
    done
    exit $status
    ;;
2)
    layers 270 layers --shapes mixtral qwen3 --sides titanmoe compiled
    timeout 80 "$python" scripts/bench/trace_step.py qwen3 --keep "$out/qwen3.json.gz" 2> "$out/trace.err" | tee "$out/trace.txt"
    exit "${PIPESTATUS[0]}"
    ;;
3)
    layers 330 torchtitan --shapes mixtral qwen3 --sides titanmoe torchtitan fp8
    layers 180 deepseek --shapes deepseek --sides titanmoe compiled fp8
    ;;
esac
