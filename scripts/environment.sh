# Other scripts source this. `environment EXTRA...` makes .venv (or $VENV) with these extras and puts it on the PATH.
# A second call installs nothing if pyproject.toml, constraints.txt, the extras and the interpreter are the same.

environment() {
    local python=${PYTHON:-python3} venv=${VENV:-.venv} extras stamp
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: $python is not Python 3.11 or newer; install one, or name it: PYTHON=/path/to/python3.12 $0" >&2
        exit 2
    fi
    extras=$(IFS=,; echo "$*")
    stamp="$("$python" -c 'import sys; print(sys.version)') $extras $(cat pyproject.toml constraints.txt | cksum)"
    if [ "$(cat "$venv/pass-stamp" 2>/dev/null)" != "$stamp" ]; then
        echo "installing into $venv (versions of constraints.txt; extras: $extras)" >&2
        "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            --constraint constraints.txt --editable ".[$extras]"
        echo "$stamp" >"$venv/pass-stamp"
    fi
    PATH="$PWD/$venv/bin:$PATH"
}

test_environment() { environment train serve tensorrt-rtx dev peers; }
