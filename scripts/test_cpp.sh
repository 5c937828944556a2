#!/usr/bin/env bash
# The C++ runtime: its build and its own tests, then against the Python runtime (tests/cpp); with --sanitizers its own
# tests again under AddressSanitizer and UBSan, and under ThreadSanitizer, and 60 s of damaged manifests.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
test_environment

bash scripts/build_cpp.sh
if command -v clang-format >/dev/null; then bash scripts/check_cpp.sh format; fi
pytest -n "${PYTEST_WORKERS:-2}" --dist loadfile tests/cpp
if [ "${1:-}" = --sanitizers ]; then
    bash scripts/build_cpp.sh --sanitize address,undefined
    bash scripts/build_cpp.sh --sanitize thread
    bash scripts/check_cpp.sh fuzz 60
fi
