"""What a finished generation is reported as: to programs, and in one line to people."""

from __future__ import annotations

from typing import Any

from pass_runtime.session import GenerateOptions
from pass_runtime.text.stream import Generation


def result(generation: Generation, options: GenerateOptions) -> dict[str, Any]:
    """The JSON object of `generate --json`, and of a line of `batch`."""
    return {
        "prompt_ids": generation.prompt_ids,
        "token_ids": generation.token_ids,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "stop_reason": generation.stop_reason,
        "seed": options.sampling.seed,
        "stats": generation.stats.as_dict(),
    }


def summary(generation: Generation) -> str:
    """One line about a generation, for people."""
    stats = generation.stats
    parts = [
        f"{stats.generated_tokens} tokens",
        f"{stats.decode_tokens_per_second:.1f} tokens/s",
        f"plan {stats.plan}",
        f"tau {stats.tau:.2f}",
        f"prefill {stats.prefill_seconds * 1e3:.0f} ms of {stats.prompt_tokens - stats.cached_tokens} tokens",
        f"finished by {generation.finish_reason}",
    ]
    return "[" + ", ".join(parts) + "]"
