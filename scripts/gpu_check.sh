#!/usr/bin/env bash
# Checks if the toolkit works on this machine's GPU, and how fast: the device, all backends, times
# of passes, engines, benchmarks, tests.
#
#     scripts/gpu_check.sh [BUNDLE] [OPTION...]     # 10 minutes; --help lists the options
#     scripts/gpu_check.sh --measure --tokens 128 --minutes 20 --before build/gpu/report.json
#
# --measure runs only what docs/cuda.md has figures of; --before shows an earlier run's figures too.
# PYTHON names the interpreter whose packages are used, since GPU machines may bring their own
# torch, onnxruntime-gpu and TensorRT. The default is that of .venv-gpu, which scripts/demo.sh
# makes, and python3 without it.
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
# onnxruntime does not find the CUDA libraries of wheels by itself, as torch does, and pass-cpp does
# not find TensorRT's.
wheels=$("$python" -c '
import glob, importlib.util
def places(name):
    spec = importlib.util.find_spec(name)
    return list(spec.submodule_search_locations) if spec else []
cuda = [library for place in places("nvidia") for library in glob.glob(f"{place}/*/lib")]
print(":".join(sorted(cuda) + places("tensorrt_libs") + places("tensorrt_rtx_libs")))')
if [ -n "$wheels" ]; then
    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$wheels"
fi
exec "$python" "$root/scripts/gpu_check.py" "$@"
