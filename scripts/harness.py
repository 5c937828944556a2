"""Writes what lm-evaluation-harness needs to measure what formats cost, beside its own `hf`.

    pip install 'lm-eval[api]==0.4.13'
    python scripts/harness.py smollm2-135m build/harness
    lm_eval --include_path build/harness --tasks endings,texts --device cpu \\
        --model hf --model_args pretrained=build/harness/checkpoint,dtype=float32
    pass-run serve BUNDLE &
    lm_eval --include_path build/harness --tasks endings,texts --device cpu --batch_size 8 \\
        --model local-completions --model_args model=NAME,base_url=http://127.0.0.1:8000/v1/completions,\\
        tokenizer=build/harness/checkpoint,tokenizer_backend=huggingface

The tasks are made of the prompts of `pass-train evaluate`. `endings`: which of four endings is a
text's own. `texts`: perplexity.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from bench_peers import PROMPTS, write_checkpoint

from pass_runtime.commands.errors import one_line_errors
from pass_runtime.measuring.real_use import read_prompt_set

KINDS, CHOICES = ("text", "code", "summary"), 4
TASKS: dict[str, dict[str, Any]] = {
    "endings": {
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


def items() -> Iterator[dict[str, Any]]:
    """Yield the tasks' items: each text in two halves, and the second halves of others."""
    for kind in KINDS:
        texts = [each.text.split(" ") for each in read_prompt_set(PROMPTS) if each.kind == kind]
        halves = [
            (" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :]))
            for words in texts
        ]
        for i, (context, ending) in enumerate(halves):
            choices = [halves[(i + j) % len(halves)][1] for j in range(CHOICES)]
            gold = i % CHOICES
            choices[0], choices[gold] = choices[gold], choices[0]
            item = {"context": context, "choices": choices, "gold": gold}
            yield item | {"text": f"{context} {ending}"}


@click.command()
@click.argument("model")
@click.argument("output", type=click.Path(path_type=Path))
@one_line_errors
def main(model: str, output: Path) -> None:
    """Write the tasks, and MODEL as a float32 checkpoint, into OUTPUT."""
    output.mkdir(parents=True, exist_ok=True)
    data = output.absolute() / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items()), encoding="utf-8")
    for name, task in TASKS.items():
        about = {"task": name, "dataset_path": "json", "test_split": "test"}
        about |= {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        # JSON is YAML, too.
        (output / f"{name}.yaml").write_text(json.dumps(about | task), encoding="utf-8")
    write_checkpoint(model, output / "checkpoint")


if __name__ == "__main__":
    main()
