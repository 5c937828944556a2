"""Plain decoding (`ar`) and two-pass against onnxruntime-genai on the same weights, machine and run.

    pip install -e '.[export,peers]'
    python scripts/compare_genai.py build/smollm2-135m

Greedy, the same prompt tokens, the same number of forced tokens. Each engine is a process of its own, and they take
turns, so that neither's threads are awake while the other is timed; every round gives one ratio, the median counts.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

PROMPT = (
    "The Roman Empire was one of the largest in the ancient world. At its height it reached from Britain to the "
    "Euphrates, and its roads, laws and languages shaped the lands around the Mediterranean for centuries after "
    "its western half had fallen. Historians still argue about the causes of"
)


def run_pass(bundle: str, plan: str, threads: int, pipe: Any) -> None:
    from pass_runtime import GenerateOptions, load
    from pass_runtime.lossless import run_tokens

    session = load(bundle, "cpu", threads=threads)

    def measure(ids: list[int], count: int) -> tuple[float, list[int]]:
        options = GenerateOptions(max_new_tokens=count, plan=plan, ignore_eos=True)
        stream = run_tokens(session, ids, options)
        return stream.stats.decode_tokens_per_second, stream.token_ids

    pipe.send(session.encode(PROMPT)[:64])
    _serve(measure, pipe)


def run_genai(directory: str, threads: int, pipe: Any) -> None:
    import onnxruntime_genai as og

    config = og.Config(directory)
    if threads:
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = og.Model(config)

    def measure(ids: list[int], count: int) -> tuple[float, list[int]]:
        params = og.GeneratorParams(model)
        total = len(ids) + count
        params.set_search_options(max_length=total, min_length=total, do_sample=False)
        generator = og.Generator(model, params)
        generator.append_tokens(ids)  # prefill
        started, tokens = time.perf_counter(), []
        for _ in range(count):
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        return count / (time.perf_counter() - started), tokens

    _serve(measure, pipe)


def _serve(measure: Callable[[list[int], int], tuple[float, list[int]]], pipe: Any) -> None:
    while (request := pipe.recv()) is not None:
        pipe.send(measure(*request))


def build_genai(bundle: Path, directory: Path) -> None:
    """onnxruntime-genai's own fp32 CPU export of the bundle's base model."""
    if (directory / "genai_config.json").is_file():
        return
    os.environ["TQDM_DISABLE"] = "1"
    from pass_exporter.load import load_model
    from pass_exporter.registry import resolve
    from pass_runtime import read_manifest

    base = directory / "base"
    loaded = load_model(resolve(read_manifest(bundle).model.name), "fp32")
    loaded.model.save_pretrained(base)
    loaded.tokenizer.save_pretrained(base)
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", base, "-o", directory]
    subprocess.run([*builder, "-p", "fp32", "-e", "cpu"], check=True, stdout=subprocess.DEVNULL)


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--genai", type=click.Path(path_type=Path), default=Path("build/genai-fp32"), show_default=True)
@click.option("--tokens", default=128, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--threads", default=0, help="0 is each engine's default.")
def main(bundle: Path, genai: Path, tokens: int, rounds: int, threads: int) -> None:
    """Print tokens/s of each engine and its ratio to onnxruntime-genai, medians over rounds."""
    build_genai(bundle, genai)
    spawn = multiprocessing.get_context("spawn")
    targets: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
        "onnxruntime-genai": (run_genai, (str(genai), threads)),
        "pass ar": (run_pass, (str(bundle), "ar", threads)),
        "pass two-pass": (run_pass, (str(bundle), "two-pass", threads)),
    }
    pipes, prompt = {}, []
    for name, (target, arguments) in targets.items():
        pipes[name], there = spawn.Pipe()
        spawn.Process(target=target, args=(*arguments, there), daemon=True).start()
        if name.startswith("pass"):
            prompt = pipes[name].recv()
    rates: dict[str, list[float]] = {name: [] for name in targets}
    texts: dict[str, list[int]] = {}
    for number in range(rounds + 1):  # the first round warms up
        for name, pipe in pipes.items():
            pipe.send((prompt, tokens))
            rate, texts[name] = pipe.recv()
            if number:
                rates[name].append(rate)
    for pipe in pipes.values():
        pipe.send(None)
    baseline = rates["onnxruntime-genai"]
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(values, baseline, strict=True))
        same = sum(a == b for a, b in zip(texts[name], texts["onnxruntime-genai"], strict=True))
        print(f"{name:18} {statistics.median(values):6.1f} tokens/s  {ratio:5.2f}x  {same}/{tokens} tokens as genai's")


if __name__ == "__main__":
    main()
