#!/usr/bin/env bash
# Runs the tests of parity, dispatch, pipelines, checkpoints, compilation, training, rehearsal and the watch on CPUs with
# another version of torch, in an environment of its own that is made once and kept.
#
#   scripts/test_torch.sh 2.11                        the newest 2.11
#   scripts/test_torch.sh 2.11 tests/moe -k symm      these tests in place of those
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
    # The interpreter of Triton 3.6, which comes with torch 2.11, takes no numpy after 2.3.
    [[ $version != 2.11 ]] || PIP_ARGS+=" numpy<2.4"
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install ${PIP_ARGS:-} "torch==$version.*" -e '.[dev]'
    touch "$venv/ready"
fi

"$venv/bin/python" -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__)'
[[ $# -gt 0 ]] || set -- tests/test_parity.py tests/moe tests/parallel tests/checkpoint tests/ops tests/comm tests/models \
    tests/train tests/test_gradient_table.py tests/rehearse tests/watch tests/launcher
OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
