#!/usr/bin/env bash
# Tests the runtime with the oldest versions that pyproject.toml allows, and without torch: .venv-oldest runs bundles that
# .venv exported, must write the same tokens, and must pass the tests of the runtime and its commands.
# It needs Python 3.11 or 3.12, for which numpy 1.26 was built: set OLDEST_PYTHON=... if it is not on the PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
test_environment

for candidate in ${OLDEST_PYTHON:-python3.11 python3.12}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
        oldest_python=$candidate
        break
    fi
done
if [ -z "${oldest_python:-}" ]; then
    echo "NOT TESTED with the oldest versions: that needs Python 3.11 or 3.12; name one: OLDEST_PYTHON=... $0" >&2
    [ -z "${CI:-}" ] && exit 0 || exit 2
fi

mkdir -p build/ranges
python - >build/ranges/oldest.txt <<'E2'
import re, tomllib
for requirement in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    name, bound = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,.*)?", requirement).groups()
    print(f"{name}=={bound}")
E2
grep -E '^(hypothesis|jsonschema|psutil|pytest|pytest-timeout|pytest-xdist)==' constraints.txt >build/ranges/tools.txt
echo "scipy==1.16.3" >>build/ranges/tools.txt # the last version that works with the oldest numpy
stamp="$("$oldest_python" -c 'import sys; print(sys.version)') $(cat pyproject.toml build/ranges/*.txt | cksum)"
if [ "$(cat .venv-oldest/pass-stamp 2>/dev/null)" != "$stamp" ]; then
    echo "installing into .venv-oldest: $(paste -sd' ' build/ranges/oldest.txt)" >&2
    "$oldest_python" -m venv --clear .venv-oldest
    .venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint build/ranges/oldest.txt --requirement build/ranges/tools.txt --editable .
    echo "$stamp" >.venv-oldest/pass-stamp
fi

echo "exporting and decoding with the newest versions" >&2
export PASS_RANGES=$PWD/build/ranges
pytest -q tests/ranges/record.py
echo "the same, and the tests of the runtime, with $(paste -sd' ' build/ranges/oldest.txt)" >&2
cd tests # pytest looks for plugins here
PYTHONPATH=$PWD:$PWD/ranges ../.venv-oldest/bin/python -m pytest -q -n "${PYTEST_WORKERS:-2}" --dist loadfile \
    --noconftest -p without_exporter ranges/compare.py runtime cli \
    --ignore cli/test_gpu_check.py --ignore cli/test_step_time.py --ignore cli/test_attention_check.py --ignore cli/test_measuring_scripts.py `# scripts, which need the exporter` \
    --ignore runtime/test_manifest_schema.py `# the file is as the newest pydantic writes it`
