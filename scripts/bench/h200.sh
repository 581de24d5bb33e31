#!/usr/bin/env bash
# Everything that one H200 can show, in one call of under nine minutes:
#
#     scripts/bench/h200.sh [OUT]        OUT: a folder for logs and figures, runs/h200 by default
#
#   1. the kernels and whatever else differs on a GPU, against their references   (pytest -m gpu)
#   2. MFU of whole steps of real layer shapes, forced-balanced and learned routing, and the parts of a layer against
#      their floors   (scripts/bench/layers.py; goals: 55 % on Mixtral-8x7B's layers, 40 % on Qwen3-30B-A3B's), and 1.2
#      times TorchTitan's steps if it imports and has such layers; otherwise one line says why not
#
# If packages are missing and there is no network, bring the wheels that scripts/bench/wheels.sh collects: they are
# installed from the folder wheels/. The exit status is that of the tests, or else of the benchmark.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
out=${1:-runs/h200}
mkdir -p "$out"
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

if compgen -G 'wheels/*.whl' > /dev/null; then
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" wheels/*.whl || exit 1
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "h200.sh: torch finds no CUDA device")' || exit 2
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv | tee "$out/gpu.csv"

# Many shapes are compiled, each on its own: eight processes on as many cores do not wait for each other's compiler.
kernels=tests/ops/test_kernels.py
run() { timeout 170 "$python" -m pytest -m gpu -q -p no:cacheprovider "${@:2}" > "$out/tests-$1.log" 2>&1; }
pids=()
run gpu tests/test_gpu.py -k 'not flex' & pids+=($!)
run flex tests/test_gpu.py -k flex & pids+=($!)
run symmetric tests/moe/test_symmetric_gpu.py & pids+=($!)
run rows "$kernels" -k 'tokens_to_rows or wider or regrouped' & pids+=($!)
run swiglu "$kernels" -k 'activation or compiled or ties or numbers or loss' & pids+=($!)
run softmax "$kernels" -k 'test_routing and softmax and not softmax_after_topk' & pids+=($!)
run sigmoid "$kernels" -k 'test_routing and sigmoid' & pids+=($!)
run after "$kernels" -k 'test_routing and softmax_after_topk' & pids+=($!)
tests=0
for pid in "${pids[@]}"; do wait "$pid" || tests=1; done
for log in "$out"/tests-*.log; do
    echo "$(basename "$log" .log): $(tail -n 1 "$log")"
    grep -E '^(FAILED|ERROR)' "$log"
done

left=$((525 - SECONDS))
timeout "$left" "$python" scripts/bench/layers.py --sides titanmoe torchtitan plain fp8 compiled --seconds $((left - 110)) \
    --json "$out/layers.json" 2> "$out/layers.err" | tee "$out/layers.txt"
bench=$?
[ "$bench" = 0 ] || tail -n 30 "$out/layers.err"
echo "took $SECONDS s; logs and figures are in $out"
[ "$tests" = 0 ] && exit "$bench" || exit 1
