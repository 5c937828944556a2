#!/usr/bin/env bash
# Checks the C++ sources with clang-format and clang-tidy.
#
#     scripts/check_cpp.sh format [--fix]   # clang-format; --fix also writes the files
#     scripts/check_cpp.sh tidy             # clang-tidy, after build_cpp.sh; what has not changed
#                                           # since it was clean is skipped
#     scripts/check_cpp.sh get PACKAGE      # installs a tool from Debian, if it is missing
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "check_cpp: $*" >&2; exit 2; }
need() {
    command -v "$1" >/dev/null && return
    local install="apt-get install -y --no-install-recommends $1"
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || die "$1 is missing; run: $install"
    echo "check_cpp: installing $1" >&2
    mkdir -p build/cpp
    { apt-get update && DEBIAN_FRONTEND=noninteractive $install; } >build/cpp/apt.log 2>&1 ||
        die "installing failed; see build/cpp/apt.log"
}
# Writes a source for each directory that includes the directory's sources, because clang-tidy
# spends most of its time on headers. Prints the paths.
joined_sources() {
    python3 - <<'PY'
import json
from pathlib import Path

joined = {}  # sources and their commands by folder
for entry in json.loads(Path("build/cpp/release/compile_commands.json").read_text("utf-8")):
    folder = Path(entry["file"]).parent.relative_to(Path("runtime/cpp").resolve())
    if folder.parts[0] in ("src", "cli"):
        sources = joined.setdefault(folder, {})  # test programs compile cli, too
        sources.setdefault(entry["file"], entry["command"].partition(" -o ")[0])
entries = []
for folder, sources in joined.items():
    for number, command in enumerate(dict.fromkeys(sources.values())):
        path = Path("build/cpp/tidy", f"{'-'.join(folder.parts)}-{number}.cpp").resolve()
        files = sorted(source for source in sources if sources[source] == command)
        path.write_text("".join(f'#include "{file}"\n' for file in files), "utf-8")
        entries.append({"directory": str(path.parent), "file": str(path), "command": f"{command} -c {path}"})
        print(path)
Path("build/cpp/tidy/compile_commands.json").write_text(json.dumps(entries), "utf-8")
PY
}

what=${1:-}; shift || true
case $what in
format)
    need clang-format
    mode=(--dry-run -Werror); [ "${1:-}" = --fix ] && mode=(-i)
    find runtime/cpp -name '*.cpp' -o -name '*.[ch]' -o -name '*.hpp' | xargs clang-format --style=file "${mode[@]}" ;;
tidy)
    need clang-tidy
    [ -e build/cpp/release/compile_commands.json ] || die "nothing is built yet; run: scripts/build_cpp.sh"
    mkdir -p build/cpp/tidy
    joined_sources | xargs -n 1 -P "${CPP_JOBS:-2}" bash scripts/check_cpp.sh tidy-one ;;
tidy-one) # a file of joined_sources; FILE.clean gets a hash of it and all project headers if it is clean
    inputs=$({ clang-tidy --version; cat runtime/cpp/.clang-tidy "$1"; sed -n 's/^#include "\(.*\)"$/\1/p' "$1" | xargs cat
        find runtime/cpp runtime/kernels -name '*.h*' | sort | xargs cat; } | sha256sum)
    [ "$(cat "$1.clean" 2>/dev/null)" != "$inputs" ] || exit 0
    report=$(clang-tidy --quiet -p build/cpp/tidy --config-file=runtime/cpp/.clang-tidy \
        --checks=-bugprone-suspicious-include --extra-arg=-Wno-shadow "$1" 2>&1) || { echo "$report"; exit 1; }
    echo "$inputs" >"$1.clean" ;;
get) need "$1" ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; [ "$what" = --help ] || exit 2 ;;
esac
