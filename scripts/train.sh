#!/usr/bin/env bash
# Trains look-ahead weights for a model of models/registry.toml, and puts them into models/ with the
# acceptance that it measures. It is the whole recipe: corpus, text, training, evaluation, card.
#
#     scripts/train.sh MODEL --minutes M [OPTION...]    # 10 minutes on a GPU; a CPU needs hours
#     scripts/train.sh MODEL [STEPS [OPTION...]]        # 6000 steps by default
#
# With --minutes, text is written while training goes on. Corpus and evaluation take minutes more. A
# second call continues an interrupted run; more STEPS or minutes extend it. If the model has
# weights already, they are trained further. OPTIONs are those of pass-train, for example for
# shorter runs. Variables replace what is set below: CORPUS, OUTPUT and TARGET (directories),
# LOOKAHEAD, SOURCES (of prompts, in turn), ADAPTER_FROM; EVALUATE has options for `pass-train
# evaluate`. models/*/README.md describes trainings that were run like this.
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?usage: scripts/train.sh MODEL [STEPS | --minutes M] [OPTION...], with a name from models/registry.toml}
lookahead=${LOOKAHEAD:-8}
case ${2:-} in
--*) options=("${@:2}") ;;
*) options=(--steps "${2:-6000}" "${@:3}") ;;
esac
# With --minutes, the time alone ends the writing of text.
[[ " ${options[*]} " = *" --minutes "* ]] || options=(--sequences 4096 "${options[@]}")
. scripts/environment.sh
environment cpu train

corpus=${CORPUS:-build/corpus} output=${OUTPUT:-build/train/$model} target=${TARGET:-models/$model}
[ -f "$corpus/train/tasks.jsonl" ] || python scripts/fetch_corpus.py "$corpus"

# Sources take turns. The model writes three of seven prompts, two are tasks, one is an excerpt of
# text and one of code.
data=()
for source in ${SOURCES:-self self self tasks tasks wikipedia python}; do
    if [ "$source" = self ]; then data+=(--data self); else data+=(--data "$corpus/train/$source.jsonl"); fi
done
# The weights to start from are copied, because the trained ones replace them at the end.
mkdir -p "$output" "$target"
if [ -f "$target/lookahead.safetensors" ] && [ ! -f "$output/start.safetensors" ]; then
    cp "$target/lookahead.safetensors" "$output/start.safetensors"
fi
start=()
# Training for acceptance needs weights that can draft already: those that are trained further, or,
# with `both`, what the first part of the run makes.
if [ -f "$output/start.safetensors" ]; then start=(--start "$output/start.safetensors" --aim acceptance); fi
[[ " ${options[*]} " != *" --minutes "* ]] || start+=(--aim both)
pass-train --model "$model" --lookahead "$lookahead" --resume "${data[@]}" --anchors 48 \
    --decay 0.65 --lr 7e-4 --adapter lora --rank 64 --adapter-from "${ADAPTER_FROM:-10}" --head "${start[@]}" \
    "${options[@]}" --output "$output"

for file in lookahead.safetensors metrics.json curves.png; do
    cp "$output/$file" "$target/$file"
done
[ -f "$target/README.md" ] || cp "$output/README.md" "$target/README.md"
# Writes the measured acceptance into the weights and the model card.
# shellcheck disable=SC2086 # several options
pass-train evaluate "$target/lookahead.safetensors" --model "$model" --lookahead "$lookahead" ${EVALUATE:-} --record
