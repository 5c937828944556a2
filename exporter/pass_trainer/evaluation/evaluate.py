"""`pass-train evaluate`: lets the model answer prompts, and counts right drafts in the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pass_exporter.model.load import LoadedModel, load_model
from pass_exporter.model.registry import resolve
from pass_exporter.progress import Step
from pass_runtime.bundle.integrity import cache_directory
from pass_runtime.bundle.plan import MAX_LOOKAHEAD
from pass_runtime.bundle.reference import sample
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError
from pass_runtime.measuring.real_use import EXTRA_TOKENS, KINDS, Prompt, read_prompt_set
from pass_trainer.config import TrainDtype
from pass_trainer.drafter import Drafter
from pass_trainer.evaluation.answers import Answer, AnswerWriter, SeededPrompt, encode
from pass_trainer.evaluation.counts import Report, SplitCounts, by_kind, count_drafts
from pass_trainer.evaluation.drafts import drafts_of
from pass_trainer.initial_drafter import read_or_baseline
from pass_trainer.run import TrainProgress, make_accelerator
from pass_trainer.text_supply import model_cache_key

PROMPTS = Path(__file__).parents[1] / "prompts" / "evaluation.jsonl"
"""The default prompts, of every kind in `real_use.KINDS`, most of them users' messages."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Options of an evaluation. Raises PassError if one is out of range.

    model, revision: what pass-export takes.
    weights: a file that pass-train wrote; None for the untrained baseline.
    prompts, kinds, each: see `real_use.read_prompt_set`.
    tokens: how many tokens of an answer are measured.
    temperatures: all prompts are answered at each of these.
    top_k: the top-k of answers that are sampled.
    lookahead: how many drafts are made after a token; at most the embeddings that `weights` has.
    """

    model: str
    weights: Path | None = None
    prompts: Path = PROMPTS
    tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    top_k: int = 0
    lookahead: int = 4
    kinds: tuple[str, ...] = KINDS
    each: int | None = None
    dtype: TrainDtype = "fp32"
    device: str = "auto"
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise PassError(f"--tokens must be at least 2, not {self.tokens}")
        if not 1 <= self.lookahead <= MAX_LOOKAHEAD:
            raise PassError(f"--lookahead must be 1 to {MAX_LOOKAHEAD}, not {self.lookahead}")
        for temperature in self.temperatures:
            SamplingParams(temperature, self.top_k)

    def as_json(self) -> dict[str, Any]:
        """Return the settings that the report states."""
        return {
            "model": self.model,
            "weights": None if self.weights is None else str(self.weights),
            "prompts": len(read_prompt_set(self.prompts, self.kinds, self.each)),
            "tokens": self.tokens,
            "top_k": self.top_k,
            "lookahead": self.lookahead,
            "dtype": self.dtype,
        }


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt, its answer, and how the answer was sampled."""

    prompt: Prompt
    answer: Answer
    sampling: SamplingParams

    def anchors(self, tokens: int) -> range:
        """Return the anchors whose drafts are for the answer's first `tokens` tokens, as indices
        into the tokens of prompt and answer together.

        The first anchor is the prompt's last token. See `drafts_of`.
        """
        first = len(self.answer.prompt) - 1
        return range(first, first + min(tokens, len(self.answer.tokens)) - 1)


def evaluate(config: EvaluateConfig, progress: TrainProgress) -> Report:
    """Return the counts by temperature and kind of prompt. Raises PassError for a user's errors."""
    drafter, texts_by_temperature = answer_all(config, progress)
    report = {}
    for temperature, texts in texts_by_temperature.items():
        step, counts = progress.phase(f"drafting at temperature {temperature:g}"), []
        for text in texts:
            counts.append(_measure(config, drafter, text))
            step(len(counts), len(texts))
        report[f"{temperature:g}"] = by_kind(
            [text.prompt.kind for text in texts], counts, config.lookahead
        )
    return report


def answer_all(
    config: EvaluateConfig, progress: TrainProgress
) -> tuple[Drafter, dict[float, list[AnsweredPrompt]]]:
    """Load the model. Return the drafter, and the answered prompts by temperature."""
    prompts = read_prompt_set(config.prompts, config.kinds, config.each)
    accelerator = make_accelerator(config.device)
    source = resolve(config.model, config.revision)
    progress.phase(f"loading {source.name}")
    loaded = load_model(source, config.dtype)
    encoded = [encode(loaded.tokenizer, prompt) for prompt in prompts]
    _check_lengths(config, loaded, prompts, encoded)
    loaded.model.to(accelerator.device)
    lookahead_weights = read_or_baseline(config.weights, config.lookahead, loaded.model)
    drafter = Drafter(
        loaded.model,
        lookahead_weights.embeddings,
        lookahead_weights.adapter,
        lookahead_weights.head,
    ).to(accelerator.device)
    writer = AnswerWriter(
        loaded.model,
        loaded.eos_token_ids,
        config.tokens + EXTRA_TOKENS,  # The last measured pass may write more tokens.
        f"{model_cache_key(loaded.model)} {config.dtype}",
    )
    texts = {}
    for temperature in config.temperatures:
        sampling = [
            SamplingParams(temperature, config.top_k, seed=prompt.seed) for prompt in prompts
        ]
        step = progress.phase(f"writing at temperature {temperature:g}")
        seeded = [SeededPrompt(*each) for each in zip(encoded, sampling, strict=True)]
        answers = _answer_by_kind(writer, prompts, seeded, step)
        texts[temperature] = [
            AnsweredPrompt(*each) for each in zip(prompts, answers, sampling, strict=True)
        ]
    return drafter, texts


def _answer_by_kind(
    writer: AnswerWriter, prompts: Sequence[Prompt], seeded: Sequence[SeededPrompt], progress: Step
) -> list[Answer]:
    """Answer the prompts kind by kind, so that the answers to each kind have a cached file."""
    answers: dict[int, Answer] = {}
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        chosen = [i for i, prompt in enumerate(prompts) if prompt.kind == kind]

        def report(done: int, _of_kind: int, of_other_kinds: int = len(answers)) -> None:
            progress(of_other_kinds + done, len(prompts))

        new = writer.answers(cache_directory(), [seeded[i] for i in chosen], report)
        answers |= zip(chosen, new, strict=True)
    return [answers[i] for i in range(len(prompts))]


def _measure(config: EvaluateConfig, drafter: Drafter, text: AnsweredPrompt) -> SplitCounts:
    drafts = drafts_of(
        drafter,
        text.answer.prompt + text.answer.tokens,
        text.anchors(config.tokens),
        config.lookahead,
        lambda logits, positions: sample(logits, positions, text.sampling),
        stop_at_wrong=True,
    )
    return count_drafts(drafts, text.answer.tokens, config.tokens)


def _check_lengths(
    config: EvaluateConfig,
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int]],
) -> None:
    """Raise PassError if a prompt is empty, or too long for an answer to follow."""
    max_length = max(loaded.geometry.max_capacity - EXTRA_TOKENS - config.tokens, 0)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise PassError(f"the prompt {prompt.id} has no tokens")
        if len(ids) > max_length:
            raise PassError(
                f"the prompt {prompt.id} has {len(ids)} tokens, and at most {max_length} leave "
                f"room for {config.tokens} tokens of an answer; shorten it, or give fewer --tokens"
            )
