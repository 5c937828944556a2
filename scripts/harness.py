"""Measures what formats cost with lm-evaluation-harness, over HTTP, beside its own `hf` on torch.

    python scripts/harness.py smollm2-135m build/smollm2-135m build/smollm2-135m-int4

The harness is installed into an environment of its own (build/lm-eval), which sees the packages of
this one. Its tasks need no data from elsewhere: they are made of the prompts of `pass-train
evaluate`. `endings`: which of four endings is a text's own. `texts`: perplexity. `hf` evaluates
MODEL as an export reads it, in float32; each BUNDLE is served. The harness prints its tables; the
last one compares them, with the largest difference of a log-likelihood from that of `hf`.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from bench_engines import write_checkpoint
from bench_peers import PROMPTS
from serve_load import install, serving

from pass_runtime.commands.errors import one_line_errors
from pass_runtime.errors import PassError
from pass_runtime.measuring.real_use import read_prompt_set

LM_EVAL = "lm-eval[api]==0.4.13"
LM_EVAL_VENV = Path(__file__).parents[1] / "build" / "lm-eval"
KINDS = ("text", "code", "summary")
CHOICES = 4
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
METRICS = (("endings", "acc"), ("endings", "acc_norm"), ("texts", "bits_per_byte"))
COLUMNS = ("", *(f"{metric} of {task}" for task, metric in METRICS), "largest difference from hf")


def install_lm_eval() -> Path:
    return install(LM_EVAL, LM_EVAL_VENV, "lm_eval", sees_ours=True)


def items() -> Iterable[dict[str, Any]]:
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


def write_tasks(directory: Path) -> None:
    data = directory / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items()), encoding="utf-8")
    for name, task in TASKS.items():
        about = {"task": name, "dataset_path": "json", "test_split": "test"}
        about |= {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        # JSON is YAML, too.
        (directory / f"{name}.yaml").write_text(json.dumps(about | task), encoding="utf-8")


def evaluate(
    program: Path, tasks: Path, model: str, arguments: dict[str, Any], batch: int
) -> tuple[Any, Any]:
    """Run the harness with `batch` prompts at a time. Return its results by task, and all
    log-likelihoods."""
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    with tempfile.TemporaryDirectory() as name:
        flags = ["--model", model, "--model_args", given, "--include_path", str(tasks)]
        flags += ["--tasks", ",".join(TASKS), "--output_path", name, "--log_samples"]
        flags += ["--batch_size", str(batch)]
        if subprocess.run([str(program), *flags, "--device", "cpu"], check=False).returncode:
            raise PassError("the harness failed: see its messages above")
        (results,) = Path(name).rglob("results_*.json")
        samples = [path for task in TASKS for path in Path(name).rglob(f"samples_{task}_*.jsonl")]
        lines = [json.loads(line) for path in samples for line in path.open(encoding="utf-8")]
        ordered = sorted(lines, key=lambda line: (len(line["resps"]), line["doc_id"]))
        values = [float(first_number(each)) for line in ordered for each in line["resps"]]
        return json.loads(results.read_text(encoding="utf-8"))["results"], values


def first_number(response: Any) -> Any:
    """Return the log-likelihood in a response, which the harness puts into lists."""
    return first_number(response[0]) if isinstance(response, list) else response


def row(name: str, results: Any, differences: Iterable[float]) -> str:
    cells = [f"{results[task][f'{metric},none']:.4f}" for task, metric in METRICS]
    return "| " + " | ".join((name, *cells, f"{max(map(abs, differences)):.5f}")) + " |"


@click.command()
@click.argument("model")
@click.argument("bundles", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option("--threads", default=0, help="CPU threads of servers; 0 is the engine's choice.")
@click.option("--slots", default=8, help="Slots of servers, and prompts of a request.")
def main(model: str, bundles: tuple[Path, ...], threads: int, slots: int) -> None:
    program = install_lm_eval()
    with tempfile.TemporaryDirectory() as name:
        directory, checkpoint = Path(name), Path(name) / "checkpoint"
        write_tasks(directory)
        write_checkpoint(model, checkpoint)
        hf = {"pretrained": checkpoint, "dtype": "float32"}
        results, expected = evaluate(program, directory, "hf", hf, 1)
        rows = [row("hf", results, [0])]
        for bundle in bundles:
            with serving(bundle, threads, slots) as (url, served, _):
                api = {"model": served, "base_url": f"{url}/v1/completions"}
                api |= {"tokenizer": checkpoint, "tokenizer_backend": "huggingface"}
                results, values = evaluate(program, directory, "local-completions", api, slots)
            differences = [a - b for a, b in zip(values, expected, strict=True)]
            rows.append(row(bundle.name, results, differences))
    click.echo("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    click.echo("\n".join(rows))


if __name__ == "__main__":
    one_line_errors(main)()
