"""Compares the toolkit's plans with onnxruntime-genai: same weights, prompts, machine and run.

    pip install -e '.[export,peers]'
    python scripts/compare_genai.py build/smollm2-135m --int4 build/smollm2-135m-int4 --w8a8 build/smollm2-135m-w8a8

Decoding is greedy, with the same prompt tokens and as many forced tokens. Each contestant is a process of its own. They
take turns, so that no other threads spin while one is timed. Every round gives one ratio to onnxruntime-genai's plain
fp32 decoding, and the median is printed. Each toolkit makes its own int4 file, so those texts differ; w8a8 has no
counterpart and is compared with fp32 text.
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
from tokenizers import Tokenizer

PROMPT = (
    "The Roman Empire was one of the largest in the ancient world. At its height it reached from Britain to the "
    "Euphrates, and its roads, laws and languages shaped the lands around the Mediterranean for centuries after "
    "its western half had fallen. Historians still argue about the causes of"
)
PLANS = ("ar", "two-pass", "fused", "auto")
NGRAM = {"ngram_size": 3, "max_draft_tokens": 8}
Measure = Callable[[list[int], int], tuple[float, list[int]]]
"""(prompt ids, tokens to write) -> (seconds of decoding, the tokens)."""


def run_pass(bundle: str, plan: str, threads: int, pipe: Any) -> None:
    from pass_runtime import GenerateOptions, load
    from pass_runtime.measuring.lossless import run_tokens

    session = load(bundle, "cpu", threads=threads)

    def measure(ids: list[int], count: int) -> tuple[float, list[int]]:
        stream = run_tokens(session, ids, GenerateOptions(max_new_tokens=count, plan=plan, ignore_eos=True))
        return stream.stats.decode_seconds, stream.token_ids

    serve(measure, pipe)


def open_genai(directory: str, threads: int) -> Any:
    import onnxruntime_genai as og

    config = og.Config(directory)
    if threads:
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    return og.Model(config)


def run_genai(directory: str, ngram: bool, threads: int, pipe: Any) -> None:
    import onnxruntime_genai as og

    model = open_genai(directory, threads)

    def measure(ids: list[int], count: int) -> tuple[float, list[int]]:
        params = og.GeneratorParams(model)
        total = len(ids) + count
        params.set_search_options(max_length=total, min_length=total, do_sample=False)
        if ngram:
            params.set_speculative_options(**NGRAM)
        generator = og.Generator(model, params)
        generator.append_tokens(ids)  # prefill
        started, tokens = time.perf_counter(), []
        for _ in range(count):
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        return time.perf_counter() - started, tokens

    serve(measure, pipe)


def serve(measure: Callable[..., Any], pipe: Any) -> None:
    """Call `measure` with every request from the pipe and send back the result, until a request is None."""
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        pipe.send(measure(*request))


def build_genai(bundle: Path, directory: Path, precision: str) -> str:
    """Return the directory of onnxruntime-genai's own CPU export of the bundle's base model, made if necessary."""
    if not (directory / "genai_config.json").is_file():
        os.environ["TQDM_DISABLE"] = "1"
        from pass_exporter.model.load import load_model
        from pass_exporter.model.registry import resolve
        from pass_runtime import read_manifest

        base = directory / "base"
        loaded = load_model(resolve(read_manifest(bundle).model.name), "fp32")
        loaded.model.save_pretrained(base)
        loaded.tokenizer.save_pretrained(base)
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", base, "-o", directory]
        subprocess.run([*builder, "-p", precision, "-e", "cpu"], check=True, stdout=subprocess.DEVNULL)
    return str(directory)


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--int4", type=click.Path(exists=True, path_type=Path), help="The same model exported with --weights int4."
)
@click.option("--w8a8", type=click.Path(exists=True, path_type=Path), help="The same with --weights w8a8.")
@click.option("--prompt-file", type=click.Path(exists=True, path_type=Path), help='.jsonl with {"prompt": text}.')
@click.option("--genai", type=click.Path(path_type=Path), default=Path("build/genai"), show_default=True)
@click.option("--tokens", default=128, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=0, help="0 is each engine's default.")
def main(
    bundle: Path,
    int4: Path | None,
    w8a8: Path | None,
    prompt_file: Path | None,
    genai: Path,
    tokens: int,
    rounds: int,
    threads: int,
) -> None:
    """Print tokens per second of each contestant and the ratio to onnxruntime-genai, medians over rounds."""
    from pass_runtime.cli.prompts import read_prompts

    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    texts = read_prompts(prompt_file) if prompt_file else [PROMPT]
    prompts = [tokenizer.encode(text).ids[:64] for text in texts]
    targets: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {}
    for precision, ours in (("fp32", bundle), ("int4", int4)):
        if ours is not None:
            theirs = build_genai(bundle, genai / precision, precision)
            targets[f"{precision} genai"] = (run_genai, (theirs, False, threads))
            targets[f"{precision} genai n-gram"] = (run_genai, (theirs, True, threads))
            targets |= {f"{precision} pass {plan}": (run_pass, (str(ours), plan, threads)) for plan in PLANS}
    if w8a8 is not None:
        targets |= {f"w8a8 pass {plan}": (run_pass, (str(w8a8), plan, threads)) for plan in PLANS}
    report(compare(targets, prompts, tokens, rounds), len(prompts) * tokens)


def compare(
    targets: dict[str, tuple[Callable[..., None], tuple[Any, ...]]], prompts: list[list[int]], tokens: int, rounds: int
) -> dict[str, tuple[list[float], list[list[int]]]]:
    """Return by contestant the tokens per second of every round, and the last round's texts. Round 0 warms up."""
    spawn, pipes = multiprocessing.get_context("spawn"), {}
    for name, (target, arguments) in targets.items():
        pipes[name], there = spawn.Pipe()
        spawn.Process(target=target, args=(*arguments, there), daemon=True).start()
        pipes[name].recv()  # so that they load one after the other, which needs less memory
    found: dict[str, tuple[list[float], list[list[int]]]] = {name: ([], []) for name in targets}
    for number in range(rounds + 1):
        for name, pipe in pipes.items():
            answers = []
            for prompt in prompts:
                pipe.send((prompt, tokens))
                answers.append(pipe.recv())
            if number:
                found[name][0].append(len(prompts) * tokens / sum(seconds for seconds, _ in answers))
            found[name][1][:] = [text for _, text in answers]
    for pipe in pipes.values():
        pipe.send(None)
    return found


def report(found: dict[str, tuple[list[float], list[list[int]]]], total: int) -> None:
    baseline = found["fp32 genai"][0]
    for name, (rates, texts) in found.items():
        plain = found.get(f"{name.split()[0]} genai", found["fp32 genai"])[1]
        ratio = statistics.median(a / b for a, b in zip(rates, baseline, strict=True))
        same = sum(a == b for ours, theirs in zip(texts, plain, strict=True) for a, b in zip(ours, theirs, strict=True))
        print(
            f"{name:18} {statistics.median(rates):6.1f} tokens/s  {ratio:5.2f}x  {same}/{total} tokens as genai's plain"
        )


if __name__ == "__main__":
    main()
