"""The quality of weight formats: perplexity of bundles, and of onnxruntime-genai's exports, on the same text.

    python scripts/fetch_corpus.py build/corpus
    python scripts/perplexity.py build/fp32 build/int4 build/w8a8 --genai build/genai/int4 \\
        --text build/corpus/held-out/wikipedia.jsonl --text build/corpus/held-out/python.jsonl

The others are compared with the first bundle. Each text is cut into windows of 256 tokens, spread over its
documents; every window is one pass over an empty cache, and its first token is not scored. A text is a .jsonl file with
`text` in every line, or plain text. The held-out part of the corpus is not trained on, nor calibrated on if --calibrate
has text of the other part.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from pass_exporter.checks.perplexity import WINDOW, Logits, score, scorer
from pass_runtime.bundle.read import read_manifest
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.errors import PassError
from pass_runtime.session import read_tokenizer
from pass_trainer.corpus import documents_of

Ids = npt.NDArray[np.int64]


def genai_scorer(directory: Path) -> Logits:
    import onnxruntime_genai as og

    model = og.Model(str(directory))

    def logits(row: Ids) -> npt.NDArray[np.float32]:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(row) + 1)
        generator = og.Generator(model, params)
        generator.append_tokens(row.astype(np.int32))
        found: npt.NDArray[np.float32] = np.asarray(generator.get_output("logits"))[0]
        return found

    return logits


def windows(path: Path, tokenizer: Tokenizer, count: int) -> Ids:
    """Return at most `count` windows, [n,WINDOW], from every document in turn, so that no long one dominates."""
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for _, text in documents_of(path)]
    longest = max(map(len, texts), default=0)
    starts = range(0, longest - WINDOW + 1, WINDOW)
    found = [ids[start : start + WINDOW] for start in starts for ids in texts if len(ids) >= start + WINDOW]
    if not found:
        raise PassError(f"{path} has no document of {WINDOW} tokens")
    return np.array(found[:count], np.int64)


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--text", "texts", multiple=True, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--genai", multiple=True, type=click.Path(exists=True, path_type=Path), help="An exported directory.")
@click.option("--windows", "count", default=24, show_default=True, help="Of each text.")
@one_line_errors
def main(bundles: tuple[Path, ...], texts: tuple[Path, ...], genai: tuple[Path, ...], count: int) -> None:
    """Print perplexity, and its ratio to that of the first bundle, of every text."""
    tokenizer = read_tokenizer(bundles[0])
    rows = {path: windows(path, tokenizer, count) for path in texts}
    click.echo(f"{'':28}" + "".join(f"{path.stem} ({len(ids)} windows)".rjust(26) for path, ids in rows.items()))
    baseline: list[float] = []
    for path in (*bundles, *genai):
        logits = genai_scorer(path) if path in genai else scorer(path, read_manifest(path))
        found = [float(np.exp(-np.mean([score(logits(row), row)[0] for row in ids]))) for ids in rows.values()]
        baseline = baseline or found
        cells = (f"{value:.2f} ({value / first:.3f})".rjust(26) for value, first in zip(found, baseline, strict=True))
        click.echo(f"{path.name:28}" + "".join(cells))


if __name__ == "__main__":
    main()
