#!/usr/bin/env bash
# A verdict on a machine with a GPU, in one command: does the device work, do all backends, what do rows cost; then
# engines, benchmarks, tests, a whole 7B, peers.
#   scripts/gpu_check.sh [BUNDLE] [-o DIR] [--minutes 10] [--only STEP]     (see --help)
#   scripts/gpu_check.sh --pack DIR [BUNDLE]     the toolkit, and a bundle, in pieces to carry to that machine
# Runs with the Python at hand (PYTHON=...): GPU machines bring their own torch, onnxruntime-gpu and TensorRT.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}

if [ "${1:-}" = --pack ]; then
    to=${2:?--pack wants a directory} bundle=${3:-} piece=60M
    [ -z "$bundle" ] || [ -f "$bundle/pass_config.json" ] || { echo "error: $bundle is not a bundle" >&2; exit 2; }
    mkdir -p "$to"
    [ -z "$(ls -A "$to")" ] || { echo "error: $to is not empty; name a new directory" >&2; exit 2; }
    to=$(cd "$to" && pwd)
    given=()
    [ -z "$bundle" ] || given=(--recursion -C "$(dirname "$(realpath "$bundle")")" "$(basename "$(realpath "$bundle")")")
    (cd "$root" && git ls-files -z) |
        tar -c --null --no-recursion -C "$root" --files-from=- "${given[@]}" | split -b "$piece" - "$to/pass-toolkit.tar."
    (cd "$to" && sha256sum pass-toolkit.tar.* >SHA256SUMS)
    echo "$(($(ls "$to" | wc -l) - 1)) of at most $piece each in $to. There:"
    echo "    sha256sum -c SHA256SUMS && cat pass-toolkit.tar.* | tar x && scripts/gpu_check.sh${bundle:+ $(basename "$bundle")}"
    exit
fi

if ! "$python" -c 'import pass_runtime, pass_exporter' 2>/dev/null; then
    export PYTHONPATH="$root/exporter:$root/runtime${PYTHONPATH:+:$PYTHONPATH}"
fi
if ! missing=$("$python" -c 'import pass_runtime.cli.main' 2>&1); then
    echo "error: $python cannot run the toolkit (${missing##*$'\n'}); run: $python -m pip install '$root[export]'" >&2
    exit 2
fi
# CUDA libraries from wheels: torch finds them by itself, onnxruntime does not, and pass-cpp does not find TensorRT's.
wheels=$("$python" -c '
import glob, importlib.util
def places(name):
    found = importlib.util.find_spec(name)
    return list(found.submodule_search_locations) if found else []
cuda = [library for place in places("nvidia") for library in glob.glob(f"{place}/*/lib")]
print(":".join(sorted(cuda) + places("tensorrt_libs") + places("tensorrt_rtx_libs")))')
if [ -n "$wheels" ]; then
    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$wheels"
fi
exec "$python" "$root/scripts/gpu_check.py" "$@"
