#!/usr/bin/env bash
# The tests that need Ray, in .venv-ray: ray and what it wants are 38 packages that no other test has to wait for.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
stamp="$("$python" -c 'import sys; print(sys.version)') $(cat pyproject.toml constraints.txt | cksum)"
if [ "$(cat .venv-ray/pass-stamp 2>/dev/null)" != "$stamp" ]; then
    echo "installing into .venv-ray" >&2
    "$python" -m venv --clear .venv-ray
    .venv-ray/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable '.[train,serve,ray,dev]'
    echo "$stamp" >.venv-ray/pass-stamp
fi
.venv-ray/bin/python -m pytest tests/serve/test_ray.py "$@"
