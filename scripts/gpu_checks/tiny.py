"""A tiny random model on one device: does every plan write what the CPU writes, and are its passes captured?

It needs no download: model, tokenizer and bundle are made here. Weights are in fp32, so that nothing but a mistake
makes texts part, or two candidates whose scores are as good as equal.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.cli.bench import write_json
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.errors import PassError
from pass_runtime.measuring.lossless import first_difference, run_tokens

VOCABULARY, TOKENS, LENGTH = 1024, 40, 256
PLANS = ("ar", "two-pass", "fused", "auto")
SAMPLINGS = (SamplingParams(), SamplingParams(0.8, seed=7), SamplingParams(1.0, 50, 0.9, 7))


def make_bundle(directory: Path, device: str) -> Path:
    """Export a random Llama of 2 layers, and build engines where the device wants them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from pass_exporter.config import EngineConfig, ExportConfig
    from pass_exporter.engines.build import build_engines
    from pass_exporter.export import export
    from pass_exporter.terminal import Terminal

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model, bundle = directory / "model", directory / "bundle"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w1", eos_token="w2", unk_token="w0")
    fast.save_pretrained(model)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=1,
        eos_token_id=2,
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained(model)
    with Terminal(Console(stderr=True)) as progress:
        export(ExportConfig(str(model), lookahead=4, output=bundle), progress)
        if device in LIBRARIES:
            build_engines(bundle, EngineConfig(device, max_seq_len=LENGTH), progress)
    return bundle


def compare(expected: Session, found: Session) -> dict[str, Any]:
    """Return for every plan whether it wrote the CPU's tokens, and whether everything was captured."""
    prompt = list(range(3, 30))
    plans = []
    for plan in PLANS:
        same = True
        for sampling in SAMPLINGS:
            options = GenerateOptions(TOKENS, sampling, plan=plan, ignore_eos=True)
            plain = run_tokens(
                expected, prompt, GenerateOptions(TOKENS, sampling, plan="ar", ignore_eos=True)
            ).token_ids
            tokens = run_tokens(found, prompt, options).token_ids
            difference = first_difference(expected, prompt, options, plain, tokens)
            same &= difference is None or difference.is_near_tie
        plans.append({"plan": plan, "same_tokens": same, "captured": not found.backend.uncaptured})
    return {"plans": plans, "uncaptured": found.backend.uncaptured}


@click.command()
@click.option("--device", required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the results here, as JSON.")
@one_line_errors
def main(device: str, output: Path | None) -> None:
    """Compare DEVICE with the CPU."""
    with tempfile.TemporaryDirectory() as directory:
        bundle = make_bundle(Path(directory), device)
        with load(bundle, "cpu", threads=1) as on_cpu, load(bundle, device) as on_device:
            report = compare(on_cpu, on_device)
    write_json(report, output)
    wrong = [each["plan"] for each in report["plans"] if not each["same_tokens"]]
    if wrong:
        raise PassError(f"{', '.join(wrong)} on {device} write other tokens than the CPU; please report it")
    click.echo(f"{device}: {', '.join(PLANS)} write what the CPU writes")


if __name__ == "__main__":
    main()
