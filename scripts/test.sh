#!/usr/bin/env bash
# Lint, types, and the whole test suite, with the newest versions of everything.
# Arguments go to pytest: scripts/test.sh -m "not slow" -k plan. --all also runs the tests marked `seldom`.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
test_environment

ruff check .
ruff format --check .
mypy
# Files go to workers in the order of tests/conftest.py; xdist's own is by how many tests they have, not how long they are.
pytest -n "${PYTEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
