from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from pass_runtime import GenerateOptions, Session
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.measuring.lossless import first_difference, run_tokens


def assert_same_text(
    session: Session,
    prompt: list[int],
    options: GenerateOptions,
    expected: list[int],
    written: list[int] | None = None,
) -> None:
    """`written`, or what `session` writes, is `expected` but for near-ties."""
    if written is None:
        written = run_tokens(session, prompt, options).token_ids
    difference = first_difference(session, prompt, options, expected, written)
    assert difference is None or difference.is_near_tie, f"{options}: {difference}"


def assert_plans_write_plain_text(
    session: Session,
    prompt: list[int],
    plain: GenerateOptions,
    plans: Iterable[tuple[str, int | None]],
) -> int:
    """plain: options of plain decoding, past end tokens; plans: with their look-aheads. Returns
    how many drafts were accepted."""
    text, accepted = run_tokens(session, prompt, plain).token_ids, 0
    assert len(text) == plain.max_new_tokens
    for plan, lookahead in plans:
        options = replace(plain, plan=plan, lookahead=lookahead)
        stream = run_tokens(session, prompt, options)
        accepted += stream.stats.accepted
        assert_same_text(session, prompt, options, text, stream.token_ids)
    return accepted


def greedy_text(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return what transformers writes, past end tokens."""
    import torch

    model.generation_config.eos_token_id = None
    ids, limits = torch.tensor([prompt]), {"do_sample": False, "max_new_tokens": count}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **limits)
    return out[0, len(prompt) :].tolist()


def cache_entries(backend: OrtBackend, count: int, slot: int = 0) -> np.ndarray:
    """Return a slot's first entries: [tensors,heads,count,D]."""
    cache, tensors = backend.cache, []
    _, heads, capacity, size = cache.shape(1)
    for _, address in cache.addresses(slot):
        tensors.append(np.empty((heads, capacity, size), cache.dtype))
        backend.memory.download(tensors[-1], address)
    return np.stack(tensors)[:, :, :count]
