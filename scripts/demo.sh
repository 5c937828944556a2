#!/usr/bin/env bash
# Quick start: installs the toolkit, exports SmolLM2-135M, decodes with PaSS, and compares with
# plain decoding on nine prompts; the exit status is 1 if a text differs. A second run skips what
# is there.
#
#     scripts/demo.sh [--model NAME] [--cpu]
#
# With an NVIDIA GPU it runs there in fp16, in .venv-gpu; otherwise, and with --cpu, in int4 on the
# CPU, in .venv (slower without a C++ compiler). PASS_WEIGHTS=full|int8|int4 chooses another format,
# --model another model of models/registry.toml, such as qwen2.5-coder-0.5b.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
model=smollm2-135m device=
while [ $# -gt 0 ]; do
    case $1 in
    --cpu) device=cpu ;;
    --model) model=${2:?"usage: scripts/demo.sh [--model NAME] [--cpu]"} && shift ;;
    *) echo "usage: scripts/demo.sh [--model NAME] [--cpu]" >&2 && exit 2 ;;
    esac
    shift
done
[ -n "$device" ] || if has_gpu; then device=cuda; else device=cpu; fi

weights=${PASS_WEIGHTS:-int4}
if [ $device = cuda ]; then
    venv=.venv-gpu extra=gpu format=(--dtype fp16) bundle=build/$model-fp16 # other formats are not measured there
else
    venv=.venv extra=cpu format=(--weights "$weights") bundle=build/$model-$weights
fi
VENV=$venv environment $extra export serve
printf 'device: %s, format: %s\n' $device "${format[*]}"
if [ ! -f "$bundle/pass_config.json" ]; then
    pass-export --model "$model" --lookahead 4 "${format[@]}" --output "$bundle"
fi

prompt="Explain in a few sentences why the sky is blue."
printf '\n> %s\n' "$prompt"
pass-run generate "$bundle" --device $device --chat --prompt "$prompt" --max-new-tokens 96

printf '\nThe same bundle on nine prompts that nothing was trained on, in about a minute: plain decoding\n'
printf '(ar), the plan auto with look-ahead drafts, and auto with all drafts:\n'
pass-run bench "$bundle" --device $device
printf '\nTo serve the OpenAI API, and a page to try the model: %s/bin/pass-run serve %s\n' $venv "$bundle"
