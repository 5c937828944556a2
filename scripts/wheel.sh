#!/usr/bin/env bash
# Makes a wheel with the CPU kernels inside, in dist/. Its name says from which glibc on they load:
# that of the oldest system to run on should build it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" runtime/kernels/build.py
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
ls dist/*.whl
