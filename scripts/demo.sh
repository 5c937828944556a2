#!/usr/bin/env bash
# Quick start: installs the toolkit, exports SmolLM2-135M, decodes with PaSS, and compares with
# plain decoding on nine prompts; the exit status is 1 if a text differs. A second run skips what
# is there.
#
#     scripts/demo.sh [--model NAME] [--cpu]
#
# On a machine with an NVIDIA GPU it runs in fp16 on the GPU, in an environment with the CUDA
# libraries, .venv-gpu. Otherwise, and with --cpu, it runs in int4 on the CPU, in .venv, with kernels
# that a C++ compiler builds (without one it is slower); PASS_WEIGHTS=full|int8|int4 chooses another
# format. --model names another model of models/registry.toml: qwen2.5-coder-0.5b has trained
# look-ahead weights too.
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

if [ $device = cuda ]; then
    venv=.venv-gpu
    VENV=$venv environment gpu export serve
    # fp16 is the only format with measurements on a GPU (docs/cuda.md).
    format=(--dtype fp16) bundle=build/$model-fp16
else
    venv=.venv
    VENV=$venv environment cpu export serve
    weights=${PASS_WEIGHTS:-int4}
    format=(--weights "$weights") bundle=build/$model-$weights
fi
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
