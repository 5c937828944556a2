#!/usr/bin/env bash
# The tests that need Ray, in .venv-ray, because no other test needs its 38 packages.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
VENV=.venv-ray environment train serve ray dev
pytest tests/serve/test_ray.py "$@"
