# Other scripts source this. `environment EXTRA...` makes .venv (or $VENV) with these extras, and with those that it has
# already, and puts it on the PATH. It installs nothing if there is no new one, and pyproject.toml, constraints.txt and
# the interpreter are those of the last time.

environment() {
    local python=${PYTHON:-python3} venv=${VENV:-.venv} extras stamp
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: $python is not Python 3.11 or newer; install one, or name it: PYTHON=/path/to/python3.12 $0" >&2
        exit 2
    fi
    extras=$({ sed -n 's/^extras //p' "$venv/pass-stamp" 2>/dev/null || true; echo "$*"; } | xargs -n 1 | sort -u | xargs)
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
}

test_environment() { environment export train serve tensorrt-rtx dev peers; }
