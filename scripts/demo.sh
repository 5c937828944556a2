#!/usr/bin/env bash
# Quick start: install, export SmolLM2-135M in the format that is fastest here, decode with PaSS, and compare with plain
# decoding. A second run skips what is there already. PASS_WEIGHTS=full|int8|int4|source|w8a8 chooses another format.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
environment export

# With 8-bit dot products, a w8a8 pass over several rows takes little longer than over one; without them it is inexact.
if grep -qE 'avx512_vnni|avx_vnni|amx_int8|asimddp' /proc/cpuinfo 2>/dev/null; then best=w8a8; else best=int4; fi
weights=${PASS_WEIGHTS:-$best}
bundle=build/smollm2-135m-$weights
printf 'weights: %s (fastest on this CPU: %s)\n' "$weights" "$best"
if [ ! -f "$bundle/pass_config.json" ]; then
    mkdir -p build
    cat docs/*.md >build/demo-text.md
    printf 'the loss of quality is measured on the text of docs/\n'
    pass-export --model smollm2-135m --lookahead 4 --weights "$weights" --verify build/demo-text.md --output "$bundle"
fi

prompt="Explain in a few sentences why the sky is blue."
printf '\n> %s\n' "$prompt"
pass-run generate "$bundle" --chat --prompt "$prompt" --max-new-tokens 96

printf "\nThe same bundle: plain decoding (ar) and the other plans, in alternation:\n"
pass-run bench "$bundle" --max-new-tokens 32 --repeat 2
