#!/usr/bin/env bash
# Reproduces the look-ahead weights under models/smollm2-135m: fetches the corpus, trains, measures, runs the study.
# It takes hours on a CPU, less with a GPU; an interrupted run continues where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
environment train

corpus=build/corpus
[ -f "$corpus/held-out/humaneval.jsonl" ] || python scripts/fetch_corpus.py "$corpus"
wikipedia=$corpus/train/wikipedia.jsonl python=$corpus/train/python.jsonl english=$corpus/train/english.jsonl
train=(pass-train --model smollm2-135m --lookahead 8 --resume)

# Trained on continuations of corpora: the paper's embeddings, and a first adapter.
first=(--data "$wikipedia" --data "$python" --data "$english" --sequences 640 --temperatures 0,0.8 --decay 0.8)
"${train[@]}" "${first[@]}" --steps 360 --anchors 40 --output build/train/embeddings-only
"${train[@]}" "${first[@]}" --steps 2300 --anchors 36 --adapter lora --rank 96 --output build/train/adapter

# Trained on three fifths of the model's own conversations: the adapter's main directions in the upper layers, and a head.
self=(--data self --data self --data self --data "$wikipedia" --data "$python" --decay 0.65 --anchors 48 --lr 1e-3
    --adapter lora --rank 64 --adapter-from 10 --head)
"${train[@]}" "${self[@]}" --sequences 768 --steps 1400 --start build/train/adapter/lookahead.safetensors \
    --output build/train/head
"${train[@]}" "${self[@]}" --sequences 1088 --steps 1200 --start build/train/head/lookahead.safetensors \
    --output build/train/more
"${train[@]}" "${self[@]}" --sequences 1792 --steps 2200 --start build/train/more/lookahead.safetensors \
    --output build/train/final

target=models/smollm2-135m
mkdir -p "$target/embeddings-only"
for file in lookahead.safetensors metrics.json curves.png; do
    cp "build/train/final/$file" "$target/$file"
    cp "build/train/embeddings-only/$file" "$target/embeddings-only/$file"
done
# Writes the measured acceptance into the weights and the model card.
for weights in "$target" "$target/embeddings-only"; do
    pass-train evaluate "$weights/lookahead.safetensors" --model smollm2-135m --lookahead 8 --record
done
python scripts/study.py --corpus "$corpus/held-out" --weights "$target" --output "$target"
