#!/usr/bin/env bash
# Runs the tests as other processors would, and again with a busy loop on every core. Prints a table for
# docs/benchmarks.md and every test whose result differed between runs; exit status 1 if there is one, or a failure.
#
#   scripts/test_cpus.sh                        all kinds below, one after the other
#   scripts/test_cpus.sh -k "moe and not gpu"   options of pytest
#   KINDS="own own" scripts/test_cpus.sh        some of: avx2 avx512 avx512_bf16 own busy; twice for two runs in a row
#   LOGS=DIR                                    a log and a junit.xml per run; runs/test_cpus if not given
#   PYTEST="python3 -m pytest"                  the command; that of make test if not given
#
# avx2, avx512 and avx512_bf16 limit oneDNN (ONEDNN_MAX_CPU_ISA) and torch's own kernels (ATEN_CPU_CAPABILITY); own
# limits nothing. Each kind has its own cache of compiled code: torch does not tell code for AVX-512 from code for AVX2,
# and the wrong one ends in a segmentation fault.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

read -ra kinds <<<"${KINDS:-avx2 avx512 avx512_bf16 own busy}"
read -ra pytest <<<"${PYTEST:-.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder}"
mkdir -p "${LOGS:-runs/test_cpus}"
logs=$(cd "${LOGS:-runs/test_cpus}" && pwd)
cpuinfo=${CPUINFO:-/proc/cpuinfo}

loops=()
stop_loops() {
    [[ ${#loops[@]} -eq 0 ]] || { kill "${loops[@]}" && wait "${loops[@]}"; } 2>/dev/null || true
    loops=()
}
trap stop_loops EXIT

has() {  # flags that the processor must have: torch trusts ATEN_CPU_CAPABILITY and crashes without them
    for flag in "$@"; do grep -qw -m1 "$flag" "$cpuinfo" || return 1; done
}

: > "$logs/runs.tsv"
for number in "${!kinds[@]}"; do
    kind=${kinds[number]} limits=() code=own
    case $kind in
        avx2) limits=(ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2) needs=(avx2 fma) ;;
        avx512) limits=(ONEDNN_MAX_CPU_ISA=AVX512_CORE ATEN_CPU_CAPABILITY=avx512) needs=(avx512f avx512bw avx512vl avx512dq) ;;
        avx512_bf16) limits=(ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 ATEN_CPU_CAPABILITY=avx512) needs=(avx512_bf16) ;;
        own | busy) needs=() ;;
        *) echo "KINDS holds '$kind'; it may hold avx2 avx512 avx512_bf16 own busy" >&2; exit 2 ;;
    esac
    if ! has "${needs[@]}"; then
        echo "$kind: not run, this processor lacks one of ${needs[*]}"
        continue
    fi
    [[ ${#limits[@]} -eq 0 ]] || code=$kind
    run=$logs/$number-$kind
    rm -f "$run.xml"
    if [[ $kind == busy ]]; then
        for _ in $(seq "$(env -u OMP_NUM_THREADS nproc)"); do
            while :; do :; done &
            loops+=($!)
        done
    fi
    echo "$kind: $run.log"
    began=$SECONDS status=0
    env -u ONEDNN_MAX_CPU_ISA -u ATEN_CPU_CAPABILITY "${limits[@]}" OMP_NUM_THREADS=1 \
        TORCHINDUCTOR_CACHE_DIR="$logs/code-$code/inductor" TRITON_CACHE_DIR="$logs/code-$code/triton" \
        "${pytest[@]}" --junitxml="$run.xml" "$@" > "$run.log" 2>&1 || status=$?
    stop_loops
    printf '%s\t%s\t%s\t%s\n' "$kind" "$status" "$((SECONDS - began))" "$run.xml" >> "$logs/runs.tsv"
done

python3 - "$logs/runs.tsv" <<'PYTHON'
import pathlib, sys
import xml.etree.ElementTree as xml

def results(file):
    """How each test ended: passed, failed, or left out (skipped)."""
    ends = {}
    for case in xml.parse(file).iter("testcase") if file.exists() else ():
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = {child.tag for child in case} & {"failure", "error"}
        ends[name] = "failed" if bad or ends.get(name) == "failed" else "skipped" if case.find("skipped") is not None else "passed"
    return ends

runs = [line.split("\t") for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
ends = [results(pathlib.Path(file)) for *_, file in runs]
print("\n| as | passed | failed | minutes |\n|---|---|---|---|")
bad = not runs
for (kind, status, seconds, _), ended in zip(runs, ends):
    counts = [list(ended.values()).count(end) for end in ("passed", "failed")]
    odd = "" if status in "01" and ended else f" (pytest ended with {status})"
    bad |= status != "0"
    print(f"| {kind} | {counts[0]} | {counts[1]}{odd} | {int(seconds) / 60:.1f} |")
whole = [(run[0], ended) for run, ended in zip(runs, ends) if ended]  # what crashed has no junit.xml
differ = [name for name in sorted(set().union(*ends)) if len({ended.get(name) for _, ended in whole}) > 1]
print("\nThe runs passed the same tests." if not differ else f"\n{len(differ)} tests did not end alike:")
for name in differ:
    print(f"  {name}: " + ", ".join(f"{kind} {ended.get(name, 'not run')}" for kind, ended in whole))
sys.exit(bool(bad or differ))
PYTHON
