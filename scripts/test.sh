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
pytest -n "${PYTEST_WORKERS:-2}" --dist loadfile "$@"
