#!/usr/bin/env bash
# Reproduce the look-ahead weights under models/smollm2-135m: fetch the corpus, train, measure, study.
# Hours on a CPU, less with a GPU; a run that was cut off goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
environment train

corpus=build/corpus
[ -f "$corpus/held-out/humaneval.jsonl" ] || python scripts/fetch_corpus.py "$corpus"

common=(--model smollm2-135m --lookahead 8 --sequences 640 --resume
    --data "$corpus/train/wikipedia.jsonl" --data "$corpus/train/python.jsonl" --data "$corpus/train/english.jsonl")
pass-train "${common[@]}" --steps 360 --anchors 40 --output build/train/embeddings-only
pass-train "${common[@]}" --steps 2300 --anchors 36 --adapter lora --rank 96 --output build/train/adapter

target=models/smollm2-135m
mkdir -p "$target/embeddings-only"
for file in lookahead.safetensors metrics.json curves.png; do
    cp "build/train/adapter/$file" "$target/$file"
    cp "build/train/embeddings-only/$file" "$target/embeddings-only/$file"
done
# States the figures in the weights; the study puts those of all three kinds at L=4 into the model card.
for weights in "$target" "$target/embeddings-only"; do
    pass-train evaluate "$weights/lookahead.safetensors" --model smollm2-135m --lookahead 8 --temperatures 0,0.8 --record
done
python scripts/study.py --corpus "$corpus/held-out" --weights "$target" --output "$target"
