#!/usr/bin/env bash
# Checks the C++ sources with clang-format, clang-tidy and fuzzing. (scripts/build_cpp.sh builds and
# tests them.)
#
#     scripts/check_cpp.sh format [--fix]   # clang-format; --fix also writes the files
#     scripts/check_cpp.sh tidy             # clang-tidy, after build_cpp.sh. A directory without
#                                           # findings is skipped until one of its inputs changes.
#     scripts/check_cpp.sh fuzz [SECONDS]   # reads damaged manifests, for 60 s by default; if the
#                                           # variable MANIFEST names one, also variants of it
#     scripts/check_cpp.sh get PACKAGE      # installs a tool from Debian, if it is missing
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "check_cpp: $*" >&2; exit 2; }
included() { # prints the project's own files that the source $1 includes, from ninja's dependencies
    awk -v object="/${1#"$PWD"/runtime/cpp/}.o:" '/^[^ ]/ { listed = index($1, object) } listed && /\/runtime\/cpp\// { print $1 }' \
        build/cpp/tidy/included
}
# Writes a source for each directory, which includes all of the directory's sources, because
# clang-tidy spends most of its time on headers. Prints the paths.
joined_sources() {
    python3 - <<'PY'
import json
from pathlib import Path

joined, seen = {}, set()
for entry in json.loads(Path("build/cpp/release/compile_commands.json").read_text("utf-8")):
    source = Path(entry["file"])
    command = entry["command"].partition(" -o ")[0]
    folder = source.parent.relative_to(Path("runtime/cpp").resolve())
    if folder.parts[0] in ("src", "cli") and source not in seen:  # test programs compile cli, too
        seen.add(source)
        joined.setdefault((folder, command), []).append(source)
entries = []
for number, ((folder, command), sources) in enumerate(joined.items()):
    path = Path("build/cpp/tidy", f"{number}-{'-'.join(folder.parts)}.cpp").resolve()
    path.write_text("".join(f'#include "{source}"\n' for source in sorted(sources)), "utf-8")
    entries.append({"directory": str(path.parent), "file": str(path), "command": f"{command} -c {path}"})
    print(path)
Path("build/cpp/tidy/compile_commands.json").write_text(json.dumps(entries), "utf-8")
PY
}
need() { # installs Debian's package $1 if there is no command of its name
    command -v "$1" >/dev/null && return
    local install="apt-get install -y --no-install-recommends $1"
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || die "$1 is missing; run: $install"
    echo "check_cpp: installing $1" >&2
    mkdir -p build/cpp
    { apt-get update && DEBIAN_FRONTEND=noninteractive $install; } >build/cpp/apt.log 2>&1 ||
        die "installing failed; see build/cpp/apt.log"
}

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
    mkdir -p build/cpp/tidy
    ninja -C build/cpp/release -t deps >build/cpp/tidy/included
    joined_sources | xargs -n 1 -P "${CPP_JOBS:-2}" bash scripts/check_cpp.sh tidy-one ;;
tidy-one) # checks a file of joined_sources; if it is clean, FILE.clean gets a hash of all inputs
    mapfile -t sources < <(sed -n 's/^#include "\(.*\)"$/\1/p' "$1")
    inputs=$({ clang-tidy --version; cat runtime/cpp/.clang-tidy "$1"
        for source in "${sources[@]}"; do cat "$source" $(included "$source"); done; } | sha256sum)
    [ "$(cat "$1.clean" 2>/dev/null)" != "$inputs" ] || exit 0
    report=$(clang-tidy --quiet -p build/cpp/tidy --config-file=runtime/cpp/.clang-tidy \
        --checks=-bugprone-suspicious-include --extra-arg=-Wno-shadow "$1" 2>&1) || { echo "$report"; exit 1; }
    echo "$inputs" >"$1.clean" ;;
fuzz)
    # clang has libFuzzer. Built by another compiler, the program makes its own mutations.
    fuzzer=build/cpp/fuzz
    if command -v clang++ >/dev/null; then export CC=clang CXX=clang++; fi
    scripts/build_cpp.sh --no-tests --into "$fuzzer" --sanitize address,undefined --target manifest_fuzz -- \
        -DPASS_FUZZ=ON -DPASS_TESTS=OFF
    mkdir -p "$fuzzer/corpus"
    [ -z "${MANIFEST:-}" ] || cp "$MANIFEST" "$fuzzer/corpus/given.json"
    [ -n "$(ls "$fuzzer/corpus")" ] || echo '{"format": "pass-bundle", "version": 4}' >"$fuzzer/corpus/small.json"
    # cmake keeps the compiler of its first run in a directory, whatever CXX says.
    if grep -q '^CMAKE_CXX_COMPILER:.*clang' "$fuzzer/CMakeCache.txt"; then
        "$fuzzer/manifest_fuzz" -max_total_time="${1:-60}" -max_len=200000 -verbosity=0 -print_funcs=0 \
            -print_final_stats=1 -artifact_prefix="$fuzzer/" "$fuzzer/corpus" >"$fuzzer/log" 2>&1 ||
            { cat "$fuzzer/log"; exit 1; }
        sed -n 's/^stat::number_of_executed_units: *\(.*\)/\1 manifests, no crash/p' "$fuzzer/log"
    else
        "$fuzzer/manifest_fuzz" "${1:-60}" "$fuzzer"/corpus/*
    fi ;;
get) need "$1" ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; [ "$what" = --help ] || exit 2 ;;
esac
