#!/usr/bin/env bash
# Compiles every file with other versions of Python, and runs the tests that need no torch: the mapping and its laws, the
# recipe's fields, the schedules, counts of models, documents. Each version has a small environment, made once and kept.
#
#   scripts/test_python.sh 3.10 3.13
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ $# -gt 0 ]] || { echo "usage: scripts/test_python.sh 3.10 3.13" >&2; exit 2; }
for version; do
    venv=.venv-python-$version
    if [[ ! -e $venv/ready ]]; then
        "python$version" -m venv "$venv"
        "$venv/bin/python" -m pip install -q pytest pytest-xdist hypothesis rich numpy tomli
        touch "$venv/ready"
    fi
    "$venv/bin/python" -c 'import sys; print("Python", sys.version.split()[0])'
    PYTHONPYCACHEPREFIX=$venv/compiled "$venv/bin/python" -W error -m compileall -q -f titanmoe tests scripts train.py
    "$venv/bin/python" -m pytest -q -n 2 -p no:cacheprovider -k "not torch" tests/fold tests/config \
        --ignore tests/fold/test_meshes.py --ignore tests/config/test_fuzz.py tests/models/test_count.py \
        tests/models/test_families.py tests/train/test_learning_rate.py tests/train/test_spikes.py \
        tests/train/test_outlet.py tests/data/test_documents.py tests/data/test_balanced_work.py
done
