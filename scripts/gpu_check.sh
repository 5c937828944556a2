#!/usr/bin/env bash
# Checks in one command if the toolkit works on a machine with a GPU: the device and all backends,
# the time of passes by rows; then engines, benchmarks, tests. scripts/gpu_check.sh [BUNDLE] [-o
# DIR] [--minutes 10] [--only STEP], see --help
#
#     scripts/gpu_check.sh --measure --tokens 128 --minutes 20 [--before
#     build/gpu-before/report.json]
#
# runs what docs/cuda.md has figures of, each step with a time limit, and shows the figures beside
# those of an earlier run. PYTHON names the interpreter whose packages are used: by default that of
# .venv-gpu, which scripts/demo.sh makes, else python3, since GPU machines may bring their own
# torch, onnxruntime-gpu and TensorRT.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=python3
[ ! -x "$root/.venv-gpu/bin/python" ] || python=$root/.venv-gpu/bin/python
python=${PYTHON:-$python}

if ! "$python" -c 'import pass_runtime, pass_exporter' 2>/dev/null; then
    export PYTHONPATH="$root/exporter:$root/runtime${PYTHONPATH:+:$PYTHONPATH}"
fi
if ! error=$("$python" -c 'import pass_runtime.cli.main' 2>&1); then
    echo "error: $python cannot run the toolkit (${error##*$'\n'}); run: $python -m pip install '$root[gpu,export]'" >&2
    exit 2
fi
# torch finds CUDA libraries from wheels by itself; onnxruntime does not, and pass-cpp does not find
# TensorRT's.
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
