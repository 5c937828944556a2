"""Speed in real use: `auto` against plain decoding, and both against onnxruntime-genai, prompt by prompt.

    pip install -e '.[export,peers]'
    python scripts/speed_in_use.py build/smollm2-135m-w8a8 --prompts 12 --genai build/genai/int4

It runs the first chat, text and code prompts of `pass-train evaluate`, chat through the chat template. Every contestant
writes up to --tokens tokens or to the end token, and they take turns at every prompt. The result for a kind of prompt
is its tokens over its seconds of decoding, and the ratio of that to plain decoding (`ar`) of the same bundle. The first
prompt of every kind is run once before, because `auto` then times its passes. onnxruntime-genai decodes its own int4
file of the same model greedily (compare_genai.py makes it), so its texts differ.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from acceptance import PROMPTS, encode
from compare_genai import NGRAM, open_genai, serve

from pass_runtime.measuring.real_use import KINDS, Prompt, read_use

OURS = {
    "ar": {"plan": "ar"},
    "auto": {"plan": "auto"},
    "auto, look-ahead only": {"plan": "auto", "draft": "lookahead"},
}
Spent = tuple[int, float, int]
"""Tokens, seconds of decoding them, and passes."""


def run_ours(bundle: str, threads: int, pipe: Any) -> None:
    """Serve requests (contestant, prompt, tokens, temperature) with (Spent, prompt ids)."""
    from pass_runtime import GenerateOptions, SamplingParams, load

    session = load(bundle, "cpu", threads=threads)

    def measure(name: str, prompt: Prompt, tokens: int, temperature: float) -> tuple[Spent, list[int]]:
        ids = encode(session, prompt)
        sampling = SamplingParams(temperature=temperature, seed=1)
        stream = session.generate_ids(ids, GenerateOptions(max_new_tokens=tokens, sampling=sampling, **OURS[name]))
        stats = stream.result().stats
        return (stats.generated_tokens, stats.decode_seconds, stats.passes), ids

    serve(measure, pipe)


def run_genai(directory: str, threads: int, pipe: Any) -> None:
    """Serve requests (contestant, prompt ids, tokens, temperature 0) with (Spent, prompt ids)."""
    import onnxruntime_genai as og

    model = open_genai(directory, threads)

    def measure(name: str, ids: list[int], tokens: int, _: float) -> tuple[Spent, list[int]]:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(ids) + tokens, do_sample=False)
        if name.endswith("n-gram"):
            params.set_speculative_options(**NGRAM)
        generator = og.Generator(model, params)
        generator.append_tokens(ids)
        started, count = time.perf_counter(), 0
        while count < tokens and not generator.is_done():
            generator.generate_next_token()
            count += len(generator.get_next_tokens())
        return (count, time.perf_counter() - started, 0), ids  # genai does not report passes

    serve(measure, pipe)


class Contestant:
    """A name, and the process that runs it."""

    def __init__(self, name: str, pipe: Any) -> None:
        self.name, self._pipe = name, pipe

    def __call__(self, prompt: Any, tokens: int, temperature: float) -> tuple[Spent, list[int]]:
        self._pipe.send((self.name, prompt, tokens, temperature))
        answer: tuple[Spent, list[int]] = self._pipe.recv()
        return answer


def start(target: Callable[..., None], path: Path, threads: int, names: list[str]) -> list[Contestant]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    spawn.Process(target=target, args=(str(path), threads, there), daemon=True).start()
    here.recv()
    return [Contestant(name, here) for name in names]


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--prompts", default=12, show_default=True, help="Prompts of each kind.")
@click.option("--tokens", default=128, show_default=True)
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 0.8), show_default=True)
@click.option("--genai", type=click.Path(exists=True, path_type=Path), help="An int4 model of onnxruntime-genai.")
@click.option("--threads", default=0, help="0 is each engine's default.")
def main(
    bundle: Path, prompts: int, tokens: int, temperatures: tuple[float, ...], genai: Path | None, threads: int
) -> None:
    """Print tokens/s by kind of prompt, and the ratio to plain decoding."""
    ours = start(run_ours, bundle, threads, [*OURS])
    theirs = start(run_genai, genai, threads, ["genai int4", "genai int4, n-gram"]) if genai else []
    available = read_use(PROMPTS)
    for temperature in temperatures:
        for kind in KINDS:
            first = [prompt for prompt in available if prompt.kind == kind][:prompts]
            spent = run_kind(ours, theirs if temperature == 0 else [], first, tokens, temperature)
            report(f"{kind}, T={temperature:g}", spent)


def run_kind(
    ours: list[Contestant], theirs: list[Contestant], prompts: list[Prompt], tokens: int, temperature: float
) -> dict[str, list[Spent]]:
    """Return by contestant the tokens, seconds and passes of each prompt."""
    found: dict[str, list[Spent]] = defaultdict(list)
    for number, prompt in enumerate([prompts[0], *prompts]):
        ids: list[int] = []
        for contestant in [*ours, *theirs]:
            spent, ids = contestant(prompt if contestant in ours else ids, tokens, temperature)
            if number:
                found[contestant.name].append(spent)
    return found


def report(title: str, found: dict[str, list[Spent]]) -> None:
    print(title)
    totals = {name: tuple(map(sum, zip(*spent, strict=True))) for name, spent in found.items()}
    rates = {name: tokens / seconds for name, (tokens, seconds, _) in totals.items()}
    for name, spent in found.items():
        tokens, _, passes = totals[name]
        each = [n / s / (m / r) for (n, s, _), (m, r, _) in zip(spent, found["ar"], strict=True)]
        print(
            f"  {name:22} {rates[name]:6.1f} tokens/s  {rates[name] / rates['ar']:5.2f} of ar  "
            f"(prompts {min(each):.2f} to {max(each):.2f})  {tokens} tokens, {tokens / max(passes, 1):.2f} a pass"
        )


if __name__ == "__main__":
    main()
