#!/usr/bin/env bash
# Trains look-ahead weights for a model of models/registry.toml, and puts them into models/ with the
# acceptance that it measures.
#
#     scripts/train.sh MODEL --minutes M [OPTION...]    # 10 minutes on a GPU; a CPU needs hours
#     scripts/train.sh MODEL [STEPS [OPTION...]]        # 6000 steps by default
#
# OPTIONs are those of pass-train. A second call continues a run, a finished one too if it gets more
# steps. In another OUTPUT, weights that are there are trained further. Variables: PROMPTS (`self` or
# files as for --data, in turn), OUTPUT, TARGET, LOOKAHEAD, ADAPTER_FROM, and EVALUATE (options of
# `pass-train evaluate`).
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?usage: scripts/train.sh MODEL [STEPS | --minutes M] [OPTION...], with a name from models/registry.toml}
case ${2:-} in
--*) options=("${@:2}") ;;
*) options=(--steps "${2:-6000}" "${@:3}") ;;
esac
start=()
if [[ " ${options[*]} " != *" --minutes "* ]]; then start=(--sequences 4096); fi
. scripts/environment.sh
environment cpu train

output=${OUTPUT:-build/train/$model} target=${TARGET:-models/$model} lookahead=${LOOKAHEAD:-8}
mkdir -p "$output" "$target"
# A run that began without weights, and may have put its own there, continues without.
if [ -f "$target/lookahead.safetensors" ] && [ ! -f "$output/start.safetensors" ] && [ ! -d "$output/checkpoint" ]; then
    cp "$target/lookahead.safetensors" "$output/start.safetensors" # the trained ones replace it
fi
if [ -f "$output/start.safetensors" ]; then start+=(--start "$output/start.safetensors"); fi
for source in ${PROMPTS:-self}; do start+=(--data "$source"); done
pass-train --model "$model" --lookahead "$lookahead" --resume --anchors 48 --decay 0.65 --lr 7e-4 \
    --adapter lora --rank 64 --adapter-from "${ADAPTER_FROM:-10}" --head "${start[@]}" "${options[@]}" --output "$output"

cp "$output"/{lookahead.safetensors,metrics.json,curves.png} "$target"
[ -f "$target/README.md" ] || cp "$output/README.md" "$target/README.md"
# shellcheck disable=SC2086 # several options
pass-train evaluate "$target/lookahead.safetensors" --model "$model" --lookahead "$lookahead" ${EVALUATE:-} --record
