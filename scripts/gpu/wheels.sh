#!/usr/bin/env bash
# Collects wheels for a machine without a network, into the folder wheels/, which scripts/gpu/first_light.py installs:
#
#     scripts/gpu/wheels.sh [NAME[==VERSION] ...]       by default what an image with only torch usually lacks
#
# For CPython 3.12 on x86-64 Linux; PY=3.11 for another. Dependencies are not included: name all that are missing there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
[ $# -gt 0 ] || set -- torchdata tensorboard tensorboard-data-server werkzeug rich pygments \
    fla-core torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser  # to compare with: scripts/bench/torchtitan_side.py
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done
"$python" -m pip download --no-deps --only-binary=:all: --python-version "${PY:-3.12}" --implementation cp \
    "${platforms[@]}" --dest wheels "$@"
du -sh wheels
