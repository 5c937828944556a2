#!/usr/bin/env bash
# Quick start: install, export SmolLM2-135M in w8a8, decode with PaSS, and compare with plain decoding on nine prompts;
# the status is 1 if the texts differ. A second run skips what is there already.
# PASS_WEIGHTS=full|int8|int4|source|w8a8 chooses another format, and `--model NAME` another model of
# models/registry.toml: qwen2.5-coder-0.5b has trained weights too.
set -euo pipefail
cd "$(dirname "$0")/.."
model=smollm2-135m
if [ $# -gt 0 ]; then
    if [ "$1" != --model ] || [ $# -ne 2 ]; then
        echo "usage: scripts/demo.sh [--model NAME]" >&2
        exit 2
    fi
    model=$2
fi
. scripts/environment.sh
environment export

weights=${PASS_WEIGHTS:-w8a8} # several rows of it cost little more than one, so drafts pay
bundle=build/$model-$weights
printf 'weights: %s\n' "$weights"
if [ ! -f "$bundle/pass_config.json" ]; then
    pass-export --model "$model" --lookahead 4 --weights "$weights" --output "$bundle"
fi

prompt="Explain in a few sentences why the sky is blue."
printf '\n> %s\n' "$prompt"
pass-run generate "$bundle" --chat --prompt "$prompt" --max-new-tokens 96

printf '\nThe same bundle on nine prompts that nothing was trained on, in about a minute: plain decoding\n'
printf '(ar), the plan auto with look-ahead drafts, and auto with all drafts:\n'
pass-run bench "$bundle"
