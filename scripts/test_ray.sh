#!/usr/bin/env bash
# The tests that need Ray, in .venv-ray: ray and what it wants are 38 packages that no other test has to wait for.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
VENV=.venv-ray environment train serve ray dev
pytest tests/serve/test_ray.py "$@"
