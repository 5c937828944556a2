#!/usr/bin/env bash
# Everything that wants a GPU, in one command: tests on the device, engines, benchmarks, peers, step times.
#   scripts/gpu_check.sh [BUNDLE] [-o DIR] [--budget SECONDS] [--only STEP]     (see --help)
# Runs with the Python at hand (PYTHON=...): GPU machines bring their own torch, onnxruntime-gpu and TensorRT.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}

if ! "$python" -c 'import pass_runtime, pass_exporter' 2>/dev/null; then
    export PYTHONPATH="$root/exporter:$root/runtime${PYTHONPATH:+:$PYTHONPATH}"
fi
if ! missing=$("$python" -c 'import pass_runtime.cli.main' 2>&1); then
    echo "error: $python cannot run the toolkit (${missing##*$'\n'}); run: $python -m pip install '$root[export]'" >&2
    exit 2
fi
# CUDA libraries that came as wheels: torch finds them by itself, onnxruntime does not.
wheels=$("$python" -c '
import glob, importlib.util
nvidia = importlib.util.find_spec("nvidia")
places = nvidia.submodule_search_locations if nvidia else []
print(":".join(sorted(library for place in places for library in glob.glob(f"{place}/*/lib"))))')
if [ -n "$wheels" ]; then
    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$wheels"
fi
exec "$python" "$root/scripts/gpu_check.py" "$@"
