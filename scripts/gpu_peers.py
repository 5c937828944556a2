"""The speed of the same model in torch on the same GPU: Hugging Face's `generate`, and a compiled loop.

    python scripts/gpu_peers.py --model smollm2-135m --prompt-file prompts.jsonl -o gpu_peers.json

Decoding is greedy, with the prompts of `pass-run bench` and as many tokens, ignoring end tokens. Prefill, which gives
the first token, and compiling are not timed. The contenders take turns, and medians over rounds are printed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from contestants import Write, Written, rate, ratio, same_tokens

from pass_runtime.cli.bench import write_json
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.cli.prompt_io import read_prompts
from pass_runtime.cli.tables import show_rows
from pass_runtime.errors import PassError
from pass_runtime.measuring.real_use import FIRST_LOOK, in_turns, read_use

try:
    import torch
    import transformers
except ImportError as missing:
    raise SystemExit(f"error: {missing}; install torch and transformers, as pip install -e '.[export]' does") from None


@dataclass
class Peer:
    """A contender, whose prefill gives the first token and is not timed. error: why it dropped out."""

    name: str
    write: Write
    error: str | None = None

    def run(self, prompts: Sequence[list[int]], tokens: int) -> list[Written]:
        """Continue every prompt; a peer that has failed does nothing."""
        if self.error is None:
            try:
                with torch.no_grad():
                    return [self.write(ids, tokens) for ids in prompts]
            except Exception as error:  # a compiler can raise anything
                self.error = (" ".join(str(error).split()) or type(error).__name__)[:400]
        return []

    def as_dict(self, rounds: list[list[Written]], first: list[list[Written]]) -> dict[str, Any]:
        """Return its results. first: the rounds to which ratio and same_tokens refer."""
        if self.error is not None:
            return {"name": self.name, "error": self.error}
        same, total = same_tokens(rounds[-1], first[-1])
        speed = statistics.median(map(rate, rounds))
        return {
            "name": self.name,
            "tokens_per_second": speed,
            "ratio": ratio(rounds, first),
            "milliseconds_per_pass": 1e3 / speed,
            "same_tokens": same / total,
        }


class Stopwatch:
    """A streamer: `generate` passes it the prompt, then every token as soon as it is known."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.tokens += value.flatten().tolist()

    def end(self) -> None: ...


def generate(model: Any) -> Write:
    """Return the decoding of transformers' own loop with its growing cache."""
    model.generation_config.eos_token_id = None  # so that no text ends early

    def write(ids: list[int], count: int) -> Written:
        watch = Stopwatch()
        window = torch.tensor([ids], device=model.device)
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "streamer": watch}
        model.generate(window, attention_mask=torch.ones_like(window), **options)
        return Written(watch.tokens[len(ids) :], count - 1, watch.times[-1] - watch.times[1])

    return write


def compiled(model: Any, capacity: int) -> Write:
    """Return plain decoding with torch.compile and a static cache: on a GPU, one CUDA graph per pass."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=capacity)

    def step(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Map ids [1,Q] at positions [1,Q] to the next token [1,1]."""
        logits = model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits
        return logits[:, -1:].argmax(-1)

    steps = [torch.compile(step, mode="reduce-overhead", fullgraph=whole) for whole in (True, False)]

    def advance(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        try:
            return steps[0](token, position).clone()  # the next replay overwrites it
        except torch._dynamo.exc.TorchDynamoException:
            if len(steps) == 1:
                raise
            del steps[0]
            return advance(token, position)

    def write(ids: list[int], count: int) -> Written:
        cache.reset()
        position = torch.arange(len(ids), device=model.device)[None]
        tokens = [step(torch.tensor([ids], device=model.device), position)]
        position = position[:, -1:] + 1
        _synchronize(model)
        started = time.perf_counter()
        for _ in range(count - 1):
            tokens.append(advance(tokens[-1], position))
            position += 1
        _synchronize(model)
        seconds = time.perf_counter() - started
        return Written(torch.cat(tokens).flatten().tolist(), count - 1, seconds)

    return write


def _synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


@click.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="As pass-export takes it.")
@click.option("--dtype", type=click.Choice(("fp16", "bf16", "fp32")), default="fp16", show_default=True)
@click.option("--device", type=click.Choice(("cuda", "cpu")), default="cuda", show_default=True)
@click.option("--prompt-file", type=click.Path(exists=True, path_type=Path), help='.jsonl with {"prompt": text}.')
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="For each prompt.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the results here, as JSON.")
@one_line_errors
def main(
    model: str, dtype: str, device: str, prompt_file: Path | None, tokens: int, rounds: int, output: Path | None
) -> None:
    """Print tokens per second of each contender. Status 1 if one of them failed."""
    if device == "cuda" and not torch.cuda.is_available():
        raise PassError(f"torch {torch.__version__} sees no CUDA device; install a CUDA build of it, or --device cpu")
    from pass_exporter.model.load import load_model
    from pass_exporter.model.registry import resolve
    from pass_trainer.evaluation.answers import encode

    loaded = load_model(resolve(model), dtype)
    if prompt_file is None:
        prompts = [encode(loaded.tokenizer, prompt) for prompt in read_use(FIRST_LOOK)]
    else:
        prompts = [loaded.tokenizer(text).input_ids for text in read_prompts(prompt_file)]
    network: Any = loaded.model.to(device)
    capacity = -(-(max(map(len, prompts)) + tokens) // 64) * 64
    peers = [Peer("generate", generate(network)), Peer("compiled", compiled(network, capacity))]
    *_, found = in_turns({peer.name: partial(peer.run, prompts, tokens) for peer in peers}, rounds)
    first = next((found[peer.name] for peer in peers if peer.error is None), [])
    report: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "prompts": len(prompts),
        "max_new_tokens": tokens,
        "rounds": rounds,
        "peers": [peer.as_dict(found[peer.name], first) for peer in peers],
    }
    write_json(report, output)
    columns = {"tokens/s": "tokens_per_second", "ratio": "ratio", "ms/pass": "milliseconds_per_pass"}
    rows = [
        {"peer": entry["name"]}
        | {heading: f"{entry[name]:.2f}" for heading, name in columns.items()}
        | {"same tokens": f"{entry['same_tokens']:.0%}"}
        for entry in report["peers"]
        if "error" not in entry
    ]
    show_rows(f"{model} {dtype} on {report['device']}, torch {report['torch']}", rows, left=("peer",))
    for peer in peers:
        if peer.error is not None:
            click.echo(f"error: {peer.name}: {peer.error}", err=True)
    if any(peer.error is not None for peer in peers):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
