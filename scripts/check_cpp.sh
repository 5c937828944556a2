#!/usr/bin/env bash
# What is not compiling and testing: form, habits, and bytes that are no manifest. See build_cpp.sh for the rest.
#
#     scripts/check_cpp.sh format           # clang-format; --fix writes
#     scripts/check_cpp.sh tidy [FILE...]   # clang-tidy, on what build_cpp.sh built; default: all sources, minutes
#     scripts/check_cpp.sh fuzz [SECONDS]   # 60 s of damaged manifests; MANIFEST: one to begin with (pass_config.json)
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "check_cpp: $*" >&2; exit 2; }
need() { command -v "$1" >/dev/null || die "$1 is missing; run: apt-get install $1"; }

what=${1:-}; shift || true
case $what in
format)
    need clang-format
    mode=(--dry-run -Werror); [ "${1:-}" = --fix ] && mode=(-i)
    git ls-files -co --exclude-standard 'runtime/cpp/*.cpp' 'runtime/cpp/*.c' 'runtime/cpp/*.h' 'runtime/cpp/*.hpp' |
        xargs clang-format --style=file "${mode[@]}" ;;
tidy)
    need clang-tidy
    [ -e build/cpp/release/compile_commands.json ] || die "nothing is built yet; run: scripts/build_cpp.sh"
    [ $# -gt 0 ] || set -- runtime/cpp/src/*.cpp runtime/cpp/cli/*.cpp
    printf '%s\0' "$@" | xargs -0 -n 1 -P "${CPP_JOBS:-2}" clang-tidy --quiet -p build/cpp/release ;;
fuzz)
    # Without clang: the target's own mutations under the sanitizers of the compiler there is.
    fuzzer=build/cpp/fuzz
    if command -v clang++ >/dev/null; then export CC=clang CXX=clang++; fi # which it keeps once it was configured
    scripts/build_cpp.sh --no-tests --into "$fuzzer" --sanitize address,undefined --target manifest_fuzz -- \
        -DPASS_FUZZ=ON -DPASS_TESTS=OFF
    mkdir -p "$fuzzer/corpus"
    [ -z "${MANIFEST:-}" ] || cp "$MANIFEST" "$fuzzer/corpus/given.json"
    [ -n "$(ls "$fuzzer/corpus")" ] || echo '{"format": "pass-bundle", "version": 3}' >"$fuzzer/corpus/small.json"
    if grep -q '^CMAKE_CXX_COMPILER:.*clang' "$fuzzer/CMakeCache.txt"; then
        "$fuzzer/manifest_fuzz" -max_total_time="${1:-60}" -max_len=40000 -verbosity=0 -print_funcs=0 -print_final_stats=1 \
            -artifact_prefix="$fuzzer/" "$fuzzer/corpus"
    else
        "$fuzzer/manifest_fuzz" "${1:-60}" "$fuzzer"/corpus/*
    fi ;;
*) sed -n '2,6s/^# \{0,1\}//p' "$0"; [ "$what" = --help ] || exit 2 ;;
esac
