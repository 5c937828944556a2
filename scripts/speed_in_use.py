"""Speed in real use: `auto` against plain decoding, and both against onnxruntime-genai, prompt by prompt.

    pip install -e '.[export,peers]'
    python scripts/speed_in_use.py build/smollm2-135m-w8a8 --prompts 12 --genai build/genai/int4

It runs the first chat, text and code prompts of `pass-train evaluate`, chat through the chat template. Every contestant
writes up to --tokens tokens or to the end token, and they take turns at every prompt, --rounds times. The result for a
kind of prompt is its tokens over its seconds of decoding, and the ratio of that to plain decoding (`ar`) of the same
bundle; the ratio of one prompt is the median of its rounds. The first prompt of every kind is run once before, because
`auto` then times its passes. onnxruntime-genai decodes its own int4 file of the same model greedily (compare_genai.py
makes it), so its texts differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click
from acceptance import PROMPTS
from contestants import Write, Written, open_genai, open_pass, rate, ratio, start

from pass_runtime import load
from pass_runtime.cli.bench import CONTESTANTS
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.measuring.real_use import CORE_KINDS, encode, read_use

THEIRS = {"genai int4": {"ngram": False}, "genai int4, n-gram": {"ngram": True}}


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--prompts", type=click.IntRange(1), default=12, show_default=True, help="Prompts of each kind.")
@click.option("--tokens", default=128, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="How often each prompt is run.")
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 0.8), show_default=True)
@click.option("--genai", type=click.Path(exists=True, path_type=Path), help="An int4 model of onnxruntime-genai.")
@click.option("--threads", default=0, help="0 is each engine's default.")
@one_line_errors
def main(
    bundle: Path,
    prompts: int,
    tokens: int,
    rounds: int,
    temperatures: tuple[float, ...],
    genai: Path | None,
    threads: int,
) -> None:
    """Print tokens/s by kind of prompt, and the ratio to plain decoding."""
    with load(bundle, "cpu") as session:
        texts = [(prompt.kind, encode(session, prompt)) for prompt in read_use(PROMPTS, CORE_KINDS)]
    write = start(open_pass, bundle, threads)
    ours = {name: partial(write, **options) for name, options in CONTESTANTS.items()}
    theirs: dict[str, Write] = {}
    if genai is not None:
        write = start(open_genai, genai, threads)
        theirs = {name: partial(write, **options) for name, options in THEIRS.items()}
    for temperature in temperatures:
        contestants: dict[str, Write] = {name: partial(write, temperature=temperature) for name, write in ours.items()}
        contestants |= theirs if temperature == 0 else {}
        for kind in CORE_KINDS:
            first = [ids for of, ids in texts if of == kind][:prompts]
            for write in contestants.values():
                write(first[0], tokens)
            found: dict[str, list[list[Written]]] = {name: [] for name in contestants}
            for ids in first:
                turns = [{name: write(ids, tokens) for name, write in contestants.items()} for _ in range(rounds)]
                for name in contestants:
                    found[name].append([turn[name] for turn in turns])
            report(f"{kind}, T={temperature:g}", found)


def report(title: str, found: Mapping[str, list[list[Written]]]) -> None:
    """Print a line for every contestant, and the ratio at every prompt. found: what it wrote after each prompt, by
    rounds."""
    print(title)
    plain = found["ar"]
    for name, texts in found.items():
        each = [ratio([[a] for a in ours], [[b] for b in ar]) for ours, ar in zip(texts, plain, strict=True)]
        written = [text for rounds in texts for text in rounds]
        speed, of_ar = rate(written), rate([text for rounds in plain for text in rounds])
        tokens, passes = (sum(getattr(text, count) for text in written) for count in ("timed", "passes"))
        print(
            f"  {name:22} {speed:6.1f} tokens/s  {speed / of_ar:5.2f} of ar  {tokens} tokens, "
            f"{tokens / max(passes, 1):.2f} a pass; by prompt {min(each):.2f} to {max(each):.2f}: "
            + " ".join(f"{value:.2f}" for value in each)
        )


if __name__ == "__main__":
    main()
