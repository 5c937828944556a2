#!/usr/bin/env bash
# The tests that need a Triton Inference Server, which scripts/install_triton.sh installs. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
test_environment

if ! bash scripts/install_triton.sh; then # its message says why
    echo "NOT TESTED: Triton" >&2
    exit 0
fi
pytest tests/serve/test_triton.py tests/serve/test_triton_stop.py "$@"
