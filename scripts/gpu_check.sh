#!/usr/bin/env bash
# Checks if the toolkit works on this machine's GPU, and how fast; --help lists the options.
#
#     scripts/gpu_check.sh [BUNDLE] [OPTION...]                    # everything: 10 minutes
#     scripts/gpu_check.sh --measure --tokens 128 --minutes 20     # ONNX Runtime alone
#
# PYTHON names the interpreter (default: .venv-gpu's, which scripts/demo.sh makes, else python3).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=python3
[ ! -x "$root/.venv-gpu/bin/python" ] || python=$root/.venv-gpu/bin/python
python=${PYTHON:-$python}
export PYTHONPATH="$root/exporter:$root/runtime${PYTHONPATH:+:$PYTHONPATH}"
if ! error=$("$python" -c 'import pass_runtime.cli.main' 2>&1); then
    echo "error: $python cannot run the toolkit (${error##*$'\n'}); run: $python -m pip install '$root[gpu,export]'" >&2
    exit 2
fi
# onnxruntime does not find the CUDA libraries of wheels by itself.
libraries=$("$python" -c 'import glob, site; print(":".join(glob.glob(site.getsitepackages()[0] + "/nvidia/*/lib")))')
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$python" "$root/scripts/gpu_check.py" "$@"
