#!/usr/bin/env bash
# Builds the C++ runtime and the CPU kernels on a Debian machine: installs what they need, compiles,
# and runs ctest.
#
#     scripts/build_cpp.sh                        # build/cpp/release
#     scripts/build_cpp.sh --sanitize thread      # build/cpp/thread; or address, undefined, or both
#     scripts/build_cpp.sh --no-tests             # without ctest
#     scripts/build_cpp.sh --into DIRECTORY       # builds there
#     scripts/build_cpp.sh --target "NAME ..."    # builds only these targets
#     scripts/build_cpp.sh -- -DPASS_X=Y          # arguments for cmake
#
# Variables:
#     PYTHON                 the interpreter whose onnxruntime package has the library
#     ONNXRUNTIME_LIBRARY    the library of another onnxruntime,
#     ONNXRUNTIME_INCLUDE    and the directory with its headers
#     TENSORRT_INCLUDE       TensorRT's headers (default: those of 10.14, from a Python package);
#                            for versions 10 and 11, two directories: "A;B"
#     CPP_JOBS               how many compilers run at a time (2)
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }
say() { echo "build_cpp: $*" >&2; }
die() { say "$*"; exit 2; }

sanitize='' run_tests=1 build='' target=all
while [ $# -gt 0 ]; do
    case $1 in
    --sanitize) sanitize=${2:?--sanitize wants address, undefined or thread}; shift 2 ;;
    --no-tests) run_tests=0; shift ;;
    --into) build=${2:?--into wants a directory}; shift 2 ;;
    --target) target=${2:?--target wants names}; shift 2 ;;
    --) shift; break ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument $1; see --help" ;;
    esac
done
case $sanitize in '' | address | undefined | thread | address,undefined) ;;
*) die "--sanitize is address, undefined, thread or address,undefined, not $sanitize" ;; esac
cache=build/cpp
mkdir -p "$cache"

packages() { # installs those of Debian's that are missing
    command -v dpkg-query >/dev/null || { say "no Debian here: compiler and libraries must be there"; return; }
    local wanted=(g++ cmake ninja-build python3 nlohmann-json3-dev libcli11-dev libssl-dev catch2) missing=() name
    for name in "${wanted[@]}"; do
        dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q "ok installed" || missing+=("$name")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    local install="apt-get install -y --no-install-recommends ${missing[*]}"
    [ "$(id -u)" = 0 ] || die "packages are missing; run: sudo $install"
    say "installing ${missing[*]}"
    { apt-get update && DEBIAN_FRONTEND=noninteractive $install; } >"$cache/apt.log" 2>&1 ||
        die "installing failed; see $cache/apt.log"
}

find_library() { # prints the path of ONNX Runtime's library; fails if there is none
    [ -z "${ONNXRUNTIME_LIBRARY:-}" ] || { echo "$ONNXRUNTIME_LIBRARY"; return; }
    local python
    for python in "${PYTHON:-}" python3 .venv/bin/python; do
        [ -n "$python" ] && "$python" - <<'PY' 2>/dev/null && return
import glob, importlib.util, os
root = os.path.dirname(importlib.util.find_spec("onnxruntime").origin)
print(sorted(glob.glob(os.path.join(root, "capi", "libonnxruntime.so.*")))[-1])
PY
    done
    return 1
}
library() { # prints its path; without an onnxruntime, installs one into .venv
    find_library && return
    . scripts/environment.sh
    environment >&2
    PYTHON=.venv/bin/python find_library || die "the onnxruntime package of .venv has no libonnxruntime.so"
}

# headers LIBRARY: prints the directory of ONNX Runtime's headers, which no wheel has, but Debian's
# libonnxruntime-dev. They must not be newer than the library; sid's are the newest.
headers() {
    [ -z "${ONNXRUNTIME_INCLUDE:-}" ] || { echo "$ONNXRUNTIME_INCLUDE"; return; }
    local suite newest # API version of the library
    newest=$(sed -n 's/.*libonnxruntime\.so\.1\.\([0-9]*\).*/\1/p' <<<"$1")
    for suite in sid trixie; do
        local target=$cache/onnxruntime-$suite api
        [ -e "$target/done" ] || fetch_headers "$suite" "$target" || continue
        api=$(sed -n 's/^#define ORT_API_VERSION \([0-9]*\).*/\1/p' "$(find "$target" -name onnxruntime_c_api.h)")
        [ "$api" -gt "${newest:-999}" ] && { say "$suite's headers (1.$api) are newer than the library"; continue; }
        dirname "$PWD/$(find "$target" -name onnxruntime_cxx_api.h)"
        return
    done
    die "no headers of ONNX Runtime found; name a release's include directory: ONNXRUNTIME_INCLUDE=... $0"
}
# fetch_headers SUITE DIRECTORY: unpacks the suite's package from this system's mirror of Debian.
fetch_headers() {
    local root=$2 mirror keys=/usr/share/keyrings/debian-archive-keyring.gpg
    mirror=$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' 2>/dev/null | awk '$1 == "Debian" { print $2; exit }')
    [ -n "$mirror" ] || return 1
    say "fetching ONNX Runtime's headers (libonnxruntime-dev of Debian $1)"
    rm -rf "$root" && mkdir -p "$root/lists/partial" "$root/archives/partial"
    echo "deb [signed-by=$keys] $mirror $1 main" >"$root/sources.list"
    local private=(-o "Dir::Etc::SourceList=$PWD/$root/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$PWD/$root/lists" -o "Dir::Cache=$PWD/$root" -o "Dir::Cache::Archives=$PWD/$root/archives"
        -o APT::Sandbox::User= -o Acquire::Languages=none)
    (
        cd "$root"
        apt-get "${private[@]}" update && apt-get "${private[@]}" download "libonnxruntime-dev/$1"
        dpkg -x libonnxruntime-dev_*.deb unpacked
    ) >"$root.log" 2>&1 || { say "that failed; see $root.log"; return 1; }
    rm -rf "$root/lists" "$root/archives" "$root"/*.bin "$root"/*.deb
    touch "$root/done"
}

tensorrt() { # prints the directory of TensorRT's headers, from a Python package, or nothing
    [ -z "${TENSORRT_INCLUDE:-}" ] || { echo "$TENSORRT_INCLUDE"; return; }
    local package=kernel-lens==2.0.1 target=$cache/tensorrt python
    if [ ! -e "$target/done" ]; then
        say "fetching TensorRT's headers ($package)"
        rm -rf "$target" && mkdir -p "$target"
        for python in "${PYTHON:-}" python3 .venv/bin/python; do
            [ -n "$python" ] && "$python" -m pip download --quiet --no-deps --dest "$target" "$package" >"$target.log" 2>&1 &&
                "$python" -m zipfile -e "$target"/*.whl "$target" && touch "$target/done" && break
        done
    fi
    if [ -e "$target/done" ]; then echo "$PWD/$target/kernel_lens/include/tensorrt"; else say "that failed; see $target.log"; fi
}

genai() { # $1: onnxruntime's library. Prints the path of onnxruntime-genai's, if it is installed.
    local library
    library=$(dirname "$(dirname "$(dirname "$1")")")/onnxruntime_genai/libonnxruntime-genai.so
    if [ -e "$library" ]; then echo "$library"; fi
}

packages
library=$(library)
include=$(headers "$library")
[ -n "$build" ] || build=$cache/$(tr , - <<<"${sanitize:-release}")
tensorrt=$(tensorrt)
say "ONNX Runtime: $library; headers: ${include#"$PWD"/}; TensorRT's: ${tensorrt:-none}"
say "building $build"
cmake -S runtime/cpp -B "$build" -G Ninja -DPASS_WERROR=ON -DPASS_SANITIZE="$sanitize" \
    -DPASS_ONNXRUNTIME_INCLUDE="$include" -DPASS_ONNXRUNTIME_LIBRARY="$library" \
    -DPASS_ONNXRUNTIME_GENAI="$(genai "$library")" -DPASS_TENSORRT_INCLUDE="$tensorrt" \
    "$@" >"$build.configure.log" 2>&1 ||
    { cat "$build.configure.log" >&2; exit 1; }
cmake --build "$build" --parallel "${CPP_JOBS:-2}" --target $target # unquoted: a word per target
[ "$run_tests" = 0 ] || ctest --test-dir "$build" --output-on-failure
