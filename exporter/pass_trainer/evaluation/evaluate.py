"""`pass-train evaluate`: lets the model answer prompts, and counts right drafts in the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from pass_exporter.model.load import LoadedModel, load_model
from pass_exporter.model.registry import resolve
from pass_exporter.progress import Progress, Step
from pass_runtime.bundle.integrity import cache_directory
from pass_runtime.bundle.reference import sample
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError
from pass_runtime.measuring.real_use import EXTRA_TOKENS, Prompt, read_prompt_set
from pass_trainer.config import EvaluateConfig
from pass_trainer.drafter import Drafter
from pass_trainer.evaluation.answers import AnswerWriter, SeededPrompt, encode
from pass_trainer.evaluation.counts import Ids, Report, SplitCounts, by_kind, count_drafts
from pass_trainer.initial import read_or_baseline
from pass_trainer.run import make_accelerator, model_cache_key
from pass_trainer.windows import full_groups, make_windows

Sample = Callable[[npt.NDArray[np.float32], Ids], Ids]
"""(logits [N,V], positions [N] of the sampled tokens) -> tokens [N]."""
SKIPPED_DRAFT, PADDING_TOKEN = -1, -2
"""A draft that was not computed, and tokens after the text's end."""


def evaluate(config: EvaluateConfig, progress: Progress) -> Report:
    """Return the counts by temperature and kind of prompt. Raises PassError for a user's errors."""
    prompts = read_prompt_set(config.prompts, config.kinds, config.each)
    accelerator = make_accelerator(config.device)
    source = resolve(config.model, config.revision)
    progress.phase(f"loading {source.name}")
    loaded = load_model(source, config.dtype)
    encoded = [encode(loaded.tokenizer, prompt) for prompt in prompts]
    _check_lengths(config, loaded, prompts, encoded)
    loaded.model.to(accelerator.device)
    drafts = read_or_baseline(config.weights, config.lookahead, loaded.model)
    drafter = Drafter(loaded.model, drafts.embeddings, drafts.adapter, drafts.head)
    drafter.to(accelerator.device)
    writer = AnswerWriter(
        loaded.model,
        loaded.eos_token_ids,
        config.tokens + EXTRA_TOKENS,  # The last measured pass may write more tokens.
        f"{model_cache_key(loaded.model)} {config.dtype}",
    )
    report = {}
    for temperature in config.temperatures:
        step = progress.phase(f"writing at temperature {temperature:g}")
        seeded = [
            SeededPrompt(ids, SamplingParams(temperature, config.top_k, seed=prompt.seed))
            for ids, prompt in zip(encoded, prompts, strict=True)
        ]
        answers = _answer_by_kind(writer, prompts, seeded, step)
        step, counts = progress.phase(f"drafting at temperature {temperature:g}"), []
        for prompt, answer in zip(seeded, answers, strict=True):
            counts.append(_measure(config, drafter, prompt, answer))
            step(len(counts), len(seeded))
        kinds = [prompt.kind for prompt in prompts]
        report[f"{temperature:g}"] = by_kind(kinds, counts)
    return report


def _answer_by_kind(
    writer: AnswerWriter, prompts: Sequence[Prompt], seeded: Sequence[SeededPrompt], progress: Step
) -> list[list[int]]:
    """Answer kind by kind: each has a cached file."""
    answers: dict[int, list[int]] = {}
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        chosen = [i for i, prompt in enumerate(prompts) if prompt.kind == kind]

        def report(done: int, _of_kind: int, of_other_kinds: int = len(answers)) -> None:
            progress(of_other_kinds + done, len(prompts))

        new = writer.answers(cache_directory(), [seeded[i] for i in chosen], report)
        answers |= zip(chosen, new, strict=True)
    return [answers[i] for i in range(len(prompts))]


def _measure(
    config: EvaluateConfig, drafter: Drafter, prompt: SeededPrompt, answer: list[int]
) -> SplitCounts:
    first = len(prompt.ids) - 1  # the prompt's last token
    drafts = drafts_of(
        drafter,
        prompt.ids + answer,
        range(first, first + min(config.tokens, len(answer)) - 1),
        config.lookahead,
        lambda logits, positions: sample(logits, positions, prompt.sampling),
        stop_at_wrong=True,
    )
    return count_drafts(drafts, answer, config.tokens)


def _check_lengths(
    config: EvaluateConfig,
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int]],
) -> None:
    max_length = max(loaded.geometry.max_capacity - EXTRA_TOKENS - config.tokens, 0)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise PassError(f"the prompt {prompt.id} has no tokens")
        if len(ids) > max_length:
            raise PassError(
                f"the prompt {prompt.id} has {len(ids)} tokens, and at most {max_length} leave "
                f"room for {config.tokens} tokens of an answer; shorten it, or give fewer --tokens"
            )


@torch.no_grad()
def drafts_of(
    drafter: Drafter,
    tokens: list[int],
    anchors: range,
    lookahead: int,
    sample: Sample,
    *,
    stop_at_wrong: bool = False,
) -> Ids:
    """Return the drafts [anchors,lookahead] in a text, sampled as the runtime samples them.

    The drafts of anchor a are for tokens a + 2, a + 3, ...: the pass with root a writes token a + 1
    itself. stop_at_wrong: whether drafts after a wrong one, which are never accepted, are
    SKIPPED_DRAFT. Most follow a wrong one, so this saves time.
    """
    if not anchors:
        return np.zeros((0, lookahead), np.int64)
    hidden, positions = group_states(drafter, tokens, anchors, lookahead)
    drafts = np.full((len(anchors), lookahead), SKIPPED_DRAFT, np.int64)
    text = np.array([*tokens, *[PADDING_TOKEN] * (lookahead + 1)])
    active = np.arange(len(anchors))  # the rows of `drafts` that get another draft
    for j in range(lookahead):
        before = np.concatenate([text[positions[active, :1] - 1], drafts[active, :j]], 1)
        logits = last_logits(drafter, hidden[active, : j + 1], torch.from_numpy(before))
        drafts[active, j] = sample(logits.cpu().numpy(), positions[active, j])
        if stop_at_wrong:
            active = active[drafts[active, j] == text[positions[active, j]]]
        if not len(active):
            break
    return drafts


def group_states(
    drafter: Drafter, tokens: list[int], anchors: range, lookahead: int
) -> tuple[torch.Tensor, Ids]:
    """Return the rows' hidden states [anchors,L,H], and the drafts' positions [anchors,L]."""
    used = torch.tensor(tokens[: anchors[-1] + 1])
    # Rows see the tokens up to their anchor, not this padding, which is room for all drafts.
    padded = torch.nn.functional.pad(used, (0, lookahead))
    groups = full_groups(anchors[0] + 1, len(padded), 1, lookahead)
    device = drafter.embeddings.device
    windows = make_windows([groups], len(padded), device)
    hidden, _ = drafter.hidden_states(padded[None].to(device), windows)
    shape = (len(anchors), lookahead)
    return hidden.view(*shape, -1), windows.position.view(shape).cpu().numpy() + 1


def last_logits(drafter: Drafter, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the logits [P,V] float32 of draft j (from 1) in P groups; -inf for tokens that a head
    cannot draft. hidden [P,j,H]: of the groups' first j rows. before [P,j] int64: the token before
    the draft of each row."""
    if drafter.head is None:
        return drafter.logits(hidden[:, -1]).float()
    logits, before = drafter.logits(hidden), before.to(hidden.device)
    index = torch.arange(before.shape[1], device=before.device).expand_as(before)
    ids, adjusted = drafter.head(hidden, logits, before, index)
    chosen = torch.full_like(logits[:, -1], -torch.inf, dtype=torch.float32)
    return chosen.scatter(-1, ids[:, -1], adjusted[:, -1])
