"""Compares the toolkit's plans with onnxruntime-genai: same weights, prompts, machine and run.

    pip install -e '.[export,peers]'
    python scripts/compare_genai.py build/smollm2-135m --int4 build/smollm2-135m-int4 --w8a8 build/smollm2-135m-w8a8

Decoding is greedy, with the same prompt tokens and as many forced tokens. Every bundle and every model of
onnxruntime-genai has a process of its own, and they take turns. Every round gives one ratio to onnxruntime-genai's
plain fp32 decoding, and the median is printed. Each toolkit makes its own int4 file, so those texts differ; w8a8 has no
counterpart and is compared with fp32 text.

Two more read the GGUF file of the default model: --openvino adds OpenVINO GenAI (`pip install openvino-genai`), and
--llama-cpp adds llama.cpp (`pip install llama-cpp-python`, which compiles it).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import click
from contestants import (
    Write,
    Written,
    open_genai,
    open_llama_cpp,
    open_openvino,
    open_pass,
    rate,
    ratio,
    same_tokens,
    start,
)

from pass_runtime import GenerateOptions
from pass_runtime.cli.bench import PLANS
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.cli.prompt_io import read_prompts
from pass_runtime.measuring.real_use import in_turns
from pass_runtime.session import read_tokenizer

PROMPT = (
    "The Roman Empire was one of the largest in the ancient world. At its height it reached from Britain to the "
    "Euphrates, and its roads, laws and languages shaped the lands around the Mediterranean for centuries after "
    "its western half had fallen. Historians still argue about the causes of"
)
BUNDLE = click.Path(exists=True, path_type=Path)


def build_genai(bundle: Path, directory: Path, precision: str) -> Path:
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
    return directory


@click.command()
@click.argument("bundle", type=BUNDLE)
@click.option("--int4", type=BUNDLE, help="The same model exported with --weights int4.")
@click.option("--w8a8", type=BUNDLE, help="The same with --weights w8a8.")
@click.option("--prompt-file", type=BUNDLE, help='.jsonl with {"prompt": text}.')
@click.option("--genai", type=click.Path(path_type=Path), default=Path("build/genai"), show_default=True)
@click.option("--openvino", type=BUNDLE, help="The model's GGUF file: OpenVINO GenAI decodes it as well.")
@click.option("--llama-cpp", type=BUNDLE, help="The model's GGUF file: llama.cpp decodes it as well.")
@click.option("--plans", default=",".join(PLANS), show_default=True, help="Those of ours to run.")
@click.option("--tokens", default=128, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--threads", default=0, help="0 is each engine's default.")
@one_line_errors
def main(
    bundle: Path,
    int4: Path | None,
    w8a8: Path | None,
    prompt_file: Path | None,
    genai: Path,
    openvino: Path | None,
    llama_cpp: Path | None,
    plans: str,
    tokens: int,
    rounds: int,
    threads: int,
) -> None:
    """Print tokens per second of each contestant and the ratio to onnxruntime-genai, medians over rounds."""
    for plan in plans.split(","):
        GenerateOptions(plan=plan)  # raises PassError for an unknown one
    tokenizer = read_tokenizer(bundle)
    prompts = [tokenizer.encode(text).ids[:64] for text in (read_prompts(prompt_file) if prompt_file else [PROMPT])]
    bundles = {name: path for name, path in {"fp32": bundle, "int4": int4, "w8a8": w8a8}.items() if path is not None}
    theirs = {name: build_genai(bundle, genai / name, name) for name in bundles if name != "w8a8"}
    contestants: dict[str, Write] = {}
    for precision, ours in bundles.items():
        if precision in theirs:
            write = start(open_genai, theirs[precision], threads)
            contestants |= {f"{precision} genai": write, f"{precision} genai n-gram": partial(write, ngram=True)}
        write = start(open_pass, ours, threads)
        contestants |= {f"{precision} pass {plan}": partial(write, plan=plan) for plan in plans.split(",")}
    if openvino is not None:
        contestants["GGUF openvino"] = start(open_openvino, openvino, threads)
        contestants["GGUF openvino n-gram"] = start(partial(open_openvino, lookup=True), openvino, threads)
    if llama_cpp is not None:
        contestants["GGUF llama.cpp"] = start(open_llama_cpp, llama_cpp, threads)

    def run(write: Write) -> list[Written]:
        return [write(ids, tokens, ignore_eos=True) for ids in prompts]

    *_, found = in_turns({name: partial(run, write) for name, write in contestants.items()}, rounds)
    for name, texts in found.items():
        plain = found.get(f"{name.split()[0]} genai", found["fp32 genai"])
        same, total = same_tokens(texts[-1], plain[-1])
        speed = f"{statistics.median(map(rate, texts)):6.1f} tokens/s  {ratio(texts, found['fp32 genai']):5.2f}x"
        print(f"{name:20} {speed}  {same}/{total} tokens as genai's plain")


if __name__ == "__main__":
    main()
