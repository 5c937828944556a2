#!/usr/bin/env bash
# Lint, types, and the whole test suite. Arguments go to pytest: scripts/test.sh -m "not slow" -k plan
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
environment train tensorrt-rtx dev

ruff check .
ruff format --check .
mypy
pytest -n "${PYTEST_WORKERS:-2}" --dist loadfile "$@"
