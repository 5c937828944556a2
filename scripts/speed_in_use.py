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

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click
from acceptance import PROMPTS, encode
from contestants import Write, Written, open_genai, open_pass, rate, start

from pass_runtime import load
from pass_runtime.cli.errors import one_line_errors
from pass_runtime.measuring.real_use import KINDS, read_use

OURS = {
    "ar": {"plan": "ar"},
    "auto": {"plan": "auto"},
    "auto, look-ahead only": {"plan": "auto", "draft": "lookahead"},
}
THEIRS = {"genai int4": {"ngram": False}, "genai int4, n-gram": {"ngram": True}}


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--prompts", type=click.IntRange(1), default=12, show_default=True, help="Prompts of each kind.")
@click.option("--tokens", default=128, show_default=True)
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 0.8), show_default=True)
@click.option("--genai", type=click.Path(exists=True, path_type=Path), help="An int4 model of onnxruntime-genai.")
@click.option("--threads", default=0, help="0 is each engine's default.")
@one_line_errors
def main(
    bundle: Path, prompts: int, tokens: int, temperatures: tuple[float, ...], genai: Path | None, threads: int
) -> None:
    """Print tokens/s by kind of prompt, and the ratio to plain decoding."""
    with load(bundle, "cpu") as session:
        texts = [(prompt.kind, encode(session, prompt)) for prompt in read_use(PROMPTS)]
    write = start(open_pass, bundle, threads)
    ours = {name: partial(write, **options) for name, options in OURS.items()}
    theirs: dict[str, Write] = {}
    if genai is not None:
        write = start(open_genai, genai, threads)
        theirs = {name: partial(write, **options) for name, options in THEIRS.items()}
    for temperature in temperatures:
        contestants: dict[str, Write] = {name: partial(write, temperature=temperature) for name, write in ours.items()}
        contestants |= theirs if temperature == 0 else {}
        for kind in KINDS:
            first = [ids for of, ids in texts if of == kind][:prompts]
            found: dict[str, list[Written]] = {name: [] for name in contestants}
            for ids in [first[0], *first]:
                for name, write in contestants.items():
                    found[name].append(write(ids, tokens))
            report(f"{kind}, T={temperature:g}", {name: written[1:] for name, written in found.items()})


def report(title: str, found: Mapping[str, list[Written]]) -> None:
    """Print a line for every contestant. found: what it wrote after each prompt."""
    print(title)
    for name, texts in found.items():
        each = [rate([ours]) / rate([plain]) for ours, plain in zip(texts, found["ar"], strict=True)]
        tokens, passes = (sum(getattr(text, count) for text in texts) for count in ("timed", "passes"))
        print(
            f"  {name:22} {rate(texts):6.1f} tokens/s  {rate(texts) / rate(found['ar']):5.2f} of ar  "
            f"(prompts {min(each):.2f} to {max(each):.2f})  {tokens} tokens, {tokens / max(passes, 1):.2f} a pass"
        )


if __name__ == "__main__":
    main()
