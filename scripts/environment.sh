# Functions that other scripts source.

# environment EXTRA...: makes .venv (or $VENV) with these extras and those that it has, puts it on
# the PATH, and builds the CPU kernels, whose status is $kernels. What has not changed is kept.
environment() {
    local python=${PYTHON:-python3} venv=${VENV:-.venv} extras stamp
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: $python is not Python 3.11 or newer; install one, or name it: PYTHON=/path/to/python3.12 $0" >&2
        exit 2
    fi
    # An environment can have only one build of ONNX Runtime: both write the same files.
    extras=$({ sed -n 's/^extras //p' "$venv/pass-stamp" 2>/dev/null || true; echo "$*"; } | xargs -n 1 | sort -u | xargs)
    if [[ " $extras " = *" cpu "*"gpu "* ]]; then
        echo "error: $venv has the extra cpu or gpu, and the other one needs an environment of its own: VENV=.venv-gpu $0" >&2
        exit 2
    fi
    stamp="$("$python" -c 'import sys; print(sys.version)') $(cat pyproject.toml constraints.txt | cksum)"
    stamp+=$'\n'"extras $extras"
    if [ "$(cat "$venv/pass-stamp" 2>/dev/null)" != "$stamp" ]; then
        echo "installing into $venv (versions of constraints.txt; extras: $extras)" >&2
        "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            --constraint constraints.txt --editable ".[${extras// /,}]"
        echo "$stamp" >"$venv/pass-stamp"
    fi
    PATH="$PWD/$venv/bin:$PATH"
    kernels=0
    python runtime/kernels/build.py || kernels=$? # without them the CPU is slower
}

# Succeeds if nvidia-smi or the driver's library shows an NVIDIA GPU that CUDA_VISIBLE_DEVICES does not hide.
has_gpu() {
    case ${CUDA_VISIBLE_DEVICES-all} in '' | -1) return 1 ;; esac
    [[ $(nvidia-smi --list-gpus 2>/dev/null) = "GPU "* ]] || "${PYTHON:-python3}" - 2>/dev/null <<'END'
import ctypes

cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
raise SystemExit(cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value)
END
}

test_environment() {
    environment cpu export train serve tensorrt-rtx dev peers
    [ "$kernels" != 1 ] || exit 1 # the sources do not compile: tests would use an older library
}
