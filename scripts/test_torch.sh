#!/usr/bin/env bash
# Runs the tests on CPUs with another version of torch, in an environment of its own that is made once and kept.
#
#   scripts/test_torch.sh 2.11                        the newest 2.11
#   scripts/test_torch.sh 2.11 tests/moe -k symm      these tests in place of all
#   PYTHON=python3.12 PIP_ARGS="..." scripts/...      the Python of a new environment, options of pip
#
# PyPI's torch for Linux is built with CUDA and cannot be imported without CUDA's libraries, even where there is no GPU: a
# new environment downloads 3 GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ "${1:-}" =~ ^[0-9]+\.[0-9]+$ ]] || { echo "usage: scripts/test_torch.sh 2.11 [options of pytest]" >&2; exit 2; }
version=$1
shift
venv=.venv-torch-$version
if [[ ! -e $venv/ready ]]; then
    "${PYTHON:-python3}" -m venv "$venv"
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install ${PIP_ARGS:-} "torch==$version.*" -e '.[dev]'
    # The interpreter of Triton 3.6, which comes with torch 2.11, takes no numpy after 2.3: its tests get an older one.
    # shellcheck disable=SC2086
    [[ $version != 2.11 ]] || "$venv/bin/python" -m pip install ${PIP_ARGS:-} --target "$venv/older-numpy" 'numpy<2.4'
    touch "$venv/ready"
fi

"$venv/bin/python" -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__)'
export OMP_NUM_THREADS=1
pytest=("$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder)
[[ $# -eq 0 && -e $venv/older-numpy ]] || exec "${pytest[@]}" "$@"
interpreted=tests/ops/test_interpreter.py status=0
"${pytest[@]}" --ignore "$interpreted" || status=$?
PYTHONPATH=$venv/older-numpy "${pytest[@]}" "$interpreted" || status=$?
exit "$status"
