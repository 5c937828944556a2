#!/usr/bin/env bash
# The tests that need a Triton Inference Server, with one that scripts/install_triton.sh gets. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
test_environment

if ! bash scripts/install_triton.sh; then # it said why
    echo "NOT TESTED: Triton" >&2
    exit 0
fi
pytest tests/serve/test_triton.py tests/serve/test_triton_stop.py "$@"
