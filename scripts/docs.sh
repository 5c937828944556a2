#!/usr/bin/env bash
# Makes a site of README.md, docs/, the docstrings of pass_runtime and what --help prints:
# build/docs/site, which any web server can serve.
#
#     scripts/docs.sh [OPTION...]    # options of `mkdocs build`; --strict: a dead link is an error
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
VENV=.venv-docs environment docs

source=build/docs/source
rm -rf "$source"
mkdir -p "$source/reference"
# The pages, and every file that they link to or show.
cp --parents LICENSE ./*.md docs/*.{md,png,svg} examples/minimal_driver.py models/registry.toml models/*/*.{md,png} \
    runtime/cpp/README.md runtime/pass_server/page.html "$source"
cp docs/mkdocs.yml build/docs

{
    printf '# Commands\n\nWhat `--help` prints.\n'
    for command in "pass-train "{,evaluate} "pass-export "{,build,triton} \
        "pass-run "{,generate,chat,batch,bench,serve,inspect}; do
        printf '\n## `%s`\n\n```text\n' "${command% }"
        $command --help
        printf '```\n'
    done
} >"$source/reference/commands.md"
python - >"$source/reference/python.md" <<'EOF'
import pass_runtime

print("# The Python API\n\nEvery public name of `pass_runtime`; [examples](../docs/python.md).")
for name in sorted(pass_runtime.__all__, key=lambda name: (name.isupper(), name.lower())):
    if name != "__version__":
        print(f"\n::: pass_runtime.{name}")
EOF
NO_MKDOCS_2_WARNING=1 mkdocs build --config-file build/docs/mkdocs.yml "$@"
echo "build/docs/site: python3 -m http.server --directory build/docs/site"
