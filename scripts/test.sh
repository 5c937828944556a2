#!/usr/bin/env bash
# Runs a suite of tests. A suite installs what it needs and says so; a second call installs nothing.
#
#     scripts/test.sh [OPTION...]         # lint, types, and every test whose requirements are there;
#                                         # OPTIONs are pytest's (-m "not slow", tests/docs); --all
#                                         # adds the tests that are marked `seldom`
#     scripts/test.sh cpp [--sanitizers]  # the C++ runtime: build, tests, clang-format, clang-tidy;
#                                         # its own tests again with ASan and UBSan, and with TSan
#     scripts/test.sh triton [OPTION...]  # the tests that need a Triton server (install_triton.sh)
#     scripts/test.sh ranges              # the runtime with its oldest dependencies, without torch
#     scripts/test.sh ray [OPTION...]     # replicas on Ray, in .venv-ray
#     scripts/test.sh page [OPTION...]    # the server's page in headless Chromium
#     scripts/test.sh cpus [OPTION...]    # tiny bundles on CPUs that qemu-user emulates
#     scripts/test.sh docs                # makes the pages (docs.sh); a dead link is an error
#     scripts/test.sh all                 # what CI runs: all but Ray, with sanitizers
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
workers=${PYTEST_WORKERS:-2}

not_tested() { echo "NOT TESTED: $*" >&2; }

usual() {
    test_environment
    [ "$kernels" = 0 ] || not_tested "the CPU kernels, which need a C++ compiler"
    ruff check .
    ruff format --check .
    mypy
    # in the order of tests/conftest.py: xdist would begin with the files that have the most tests
    pytest -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
}

cpp() {
    test_environment
    local status=0 tool
    bash scripts/build_cpp.sh || status=$?
    [ "$status" != 2 ] || { not_tested "the C++ runtime"; return 0; } # the script has said what is missing
    [ "$status" = 0 ]
    for tool in clang-format clang-tidy; do # version 14 only: others format differently
        if bash scripts/check_cpp.sh get $tool && [[ $($tool --version) == *"version 14."* ]]; then
            bash scripts/check_cpp.sh "${tool#clang-}"
        else
            echo "NOT CHECKED: the C++ runtime by $tool 14" >&2
        fi
    done
    export PASS_TEST_BUNDLE=${PASS_TEST_BUNDLE:-$PWD/build/cpp/bundles} # exports are kept for later runs
    pytest -n "$workers" --dist loadfile tests/cpp
    [ "${1:-}" = --sanitizers ] || return 0
    bash scripts/build_cpp.sh --sanitize address,undefined --target "pass-tests fake_gpu fake_ort replay" --no-tests
    timeout 300 build/cpp/address-undefined/pass-tests
    PASS_CPP_BUILD=build/cpp/address-undefined pytest -n "$workers" --dist loadfile \
        tests/cpp/test_cpp_trt.py tests/cpp/test_cpp_captures.py tests/cpp/test_cpp_replay.py \
        -k "writes or fails or counts or int4"
    bash scripts/build_cpp.sh --sanitize thread --target pass-tests --no-tests
    timeout 300 build/cpp/thread/pass-tests
}

triton() {
    test_environment
    bash scripts/install_triton.sh || { not_tested Triton; return 0; }
    pytest tests/serve/test_triton.py "$@"
}

ray() {
    VENV=.venv-ray environment cpu train serve ray dev
    pytest tests/serve/test_ray.py "$@"
}

# installed COMMAND PACKAGE: installs Debian's package if the command is missing; fails if it cannot.
installed() {
    command -v "$1" >/dev/null && return
    echo "installing Debian's $2" >&2
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends "$2"; } >/dev/null
}

page() {
    test_environment
    installed chromium chromium || { not_tested "the page, which needs chromium"; return 0; }
    pytest -n 0 tests/page/in_browser.py "$@"
}

cpus() {
    test_environment
    if [ "$(uname -m)" != x86_64 ] || ! installed qemu-x86_64 qemu-user; then
        not_tested "other CPUs, which need an x86-64 machine and qemu-user"
        return
    fi
    pytest -n 0 tests/cpus/on_cpus.py "$@"
}

docs() { bash scripts/docs.sh --strict; }

# With the oldest dependencies of the runtime, bundles of .venv must decode to the same tokens, and its
# tests must pass. Numpy 1.26 was built for Python 3.11 and 3.12: OLDEST_PYTHON names one.
ranges() {
    test_environment
    local candidate python='' stamp
    for candidate in ${OLDEST_PYTHON:-python3.11 python3.12}; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null || continue
        python=$candidate
        break
    done
    if [ -z "$python" ]; then
        not_tested "the oldest versions, which need Python 3.11 or 3.12; OLDEST_PYTHON=... names one"
        [ -z "${CI:-}" ] && return || exit 2
    fi
    mkdir -p build/ranges
    python - >build/ranges/oldest.txt <<'E2'
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for requirement in project["dependencies"] + project["optional-dependencies"]["cpu"]:
    name, bound = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,.*)?", requirement).groups()
    print(f"{name}=={bound}")
E2
    grep -E '^(hypothesis|jsonschema|psutil|pytest|pytest-timeout|pytest-xdist)==' constraints.txt >build/ranges/tools.txt
    echo "scipy==1.16.3" >>build/ranges/tools.txt # the last one for the oldest numpy
    stamp="$("$python" -c 'import sys; print(sys.version)') $(cat pyproject.toml build/ranges/*.txt | cksum)"
    if [ "$(cat .venv-oldest/pass-stamp 2>/dev/null)" != "$stamp" ]; then
        echo "installing into .venv-oldest: $(paste -sd' ' build/ranges/oldest.txt)" >&2
        "$python" -m venv --clear .venv-oldest
        .venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
            --constraint build/ranges/oldest.txt --requirement build/ranges/tools.txt --editable '.[cpu]'
        echo "$stamp" >.venv-oldest/pass-stamp
    fi
    echo "exporting and decoding with the newest versions" >&2
    export PASS_RANGES=$PWD/build/ranges
    pytest -q tests/ranges/record.py
    echo "the same, and the tests of the runtime, with $(paste -sd' ' build/ranges/oldest.txt)" >&2
    cd tests # where pytest finds the plugin without_exporter
    # test_manifest_schema.py compares a file with what the newest pydantic writes.
    PYTHONPATH=$PWD:$PWD/ranges ../.venv-oldest/bin/python -m pytest -q -n "$workers" --dist loadfile --noconftest \
        -p without_exporter ranges/compare.py runtime cli --ignore runtime/test_manifest_schema.py
}

case ${1:-} in
cpp | triton | ray | page | cpus | docs | ranges) "$@" ;;
all)
    for suite in usual page docs triton "cpp --sanitizers" cpus ranges; do
        echo "== scripts/test.sh $suite" >&2
        bash scripts/test.sh $suite
    done ;;
usual) shift; usual "$@" ;;
-h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" ;;
-* | tests/* | '') usual "$@" ;;
*) echo "error: no suite is called $1; see scripts/test.sh --help" >&2; exit 2 ;;
esac
