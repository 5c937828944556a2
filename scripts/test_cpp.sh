#!/usr/bin/env bash
# The C++ runtime: its build and its own tests, then against the Python runtime (tests/cpp); with --sanitizers its own
# tests again under AddressSanitizer and UBSan, and under ThreadSanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
test_environment

status=0
bash scripts/build_cpp.sh || status=$?
if [ "$status" = 2 ]; then # it said what is missing on this machine
    echo "NOT TESTED: the C++ runtime" >&2
    exit 0
fi
[ "$status" = 0 ]
if clang-format --version 2>/dev/null | grep -q "version 14\."; then bash scripts/check_cpp.sh format; fi # others have other taste
pytest -n "${PYTEST_WORKERS:-2}" --dist loadfile tests/cpp
if [ "${1:-}" = --sanitizers ]; then
    for kinds in address,undefined thread; do
        bash scripts/build_cpp.sh --sanitize "$kinds" --target pass-tests --no-tests
        timeout 300 "build/cpp/${kinds/,/-}/pass-tests"
    done
    bash scripts/build_cpp.sh --sanitize address,undefined --target fake_gpu --no-tests
    PASS_CPP_BUILD=build/cpp/address-undefined pytest -n 0 tests/cpp/test_cpp_trt.py
fi
