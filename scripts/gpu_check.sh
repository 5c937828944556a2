#!/usr/bin/env bash
# Checks in one command if the toolkit works on a machine with a GPU: the device and all backends, the time of passes by
# rows; then engines, benchmarks, tests. scripts/gpu_check.sh [BUNDLE] [-o DIR] [--minutes 10] [--only STEP], see --help
# It uses python3, or PYTHON, and its packages: GPU machines bring their own torch, onnxruntime-gpu and TensorRT.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}

if ! "$python" -c 'import pass_runtime, pass_exporter' 2>/dev/null; then
    export PYTHONPATH="$root/exporter:$root/runtime${PYTHONPATH:+:$PYTHONPATH}"
fi
if ! error=$("$python" -c 'import pass_runtime.cli.main' 2>&1); then
    echo "error: $python cannot run the toolkit (${error##*$'\n'}); run: $python -m pip install '$root[export]'" >&2
    exit 2
fi
# torch finds CUDA libraries from wheels by itself; onnxruntime does not, and pass-cpp does not find TensorRT's.
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
