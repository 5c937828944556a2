#!/usr/bin/env bash
# Quick start: install, export SmolLM2-135M, decode with PaSS, and compare with plain decoding.
# A second run skips what is there already.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
environment export

bundle=build/smollm2-135m
if [ ! -f "$bundle/pass_config.json" ]; then
    pass-export --model smollm2-135m --lookahead 4 --output "$bundle"
fi

prompt="Explain in a few sentences why the sky is blue."
printf '\n> %s\n' "$prompt"
pass-run generate "$bundle" --chat --prompt "$prompt" --max-new-tokens 96

printf "\nThe same bundle: plain decoding (ar) and the other plans, in alternation:\n"
pass-run bench "$bundle" --max-new-tokens 32 --repeat 2
