#!/usr/bin/env bash
# The C++ runtime: its build and its own tests, tests/cpp against the Python runtime, clang-format and clang-tidy; with
# --sanitizers its own tests again under AddressSanitizer and UBSan, and under ThreadSanitizer. (check_cpp.sh fuzz takes
# minutes, and is run by hand.)
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
test_environment

status=0
bash scripts/build_cpp.sh || status=$?
if [ "$status" = 2 ]; then # its message names what this machine lacks
    echo "NOT TESTED: the C++ runtime" >&2
    exit 0
fi
[ "$status" = 0 ]
for tool in clang-format clang-tidy; do
    if bash scripts/check_cpp.sh get $tool && [[ $($tool --version) == *"version 14."* ]]; then # other versions format differently
        bash scripts/check_cpp.sh "${tool#clang-}"
    else
        echo "NOT CHECKED: the C++ runtime by $tool 14" >&2
    fi
done
export PASS_TEST_BUNDLE=${PASS_TEST_BUNDLE:-$PWD/build/cpp/bundles} # keeps exports of the default model
pytest -n "${PYTEST_WORKERS:-2}" --dist loadfile tests/cpp
if [ "${1:-}" = --sanitizers ]; then
    for kinds in address,undefined thread; do
        bash scripts/build_cpp.sh --sanitize "$kinds" --target pass-tests --no-tests
        timeout 300 "build/cpp/${kinds/,/-}/pass-tests"
    done
    for program in fake_gpu fake_ort; do
        bash scripts/build_cpp.sh --sanitize address,undefined --target $program --no-tests
    done
    PASS_CPP_BUILD=build/cpp/address-undefined pytest -n 0 tests/cpp/test_cpp_trt.py tests/cpp/test_cpp_captures.py \
        -k "writes or fails or counts"
fi
