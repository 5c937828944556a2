"""Lets the model write the prompts that training text begins with, for `--data self`.

A chat model gets the beginning of its chat template, up to the user's message, and continues with a
message and an end token (Magpie, Xu et al. 2024, arXiv 2406.08464). A base model gets no message:
its prompt is its start token alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from pass_runtime.errors import PassError
from pass_trainer.text_writer import TextWriter
from pass_trainer.torch_generate import chat_prompt, plain_ids

TEMPERATURE, TOP_P = 1.0, 0.95
MIN_MESSAGE_TOKENS, MAX_MESSAGE_TOKENS = 4, 96
"""The fewest and the most tokens of a user's message. Shorter and longer ones (a third of
SmolLM2's) are discarded."""
MAX_BATCHES = 12
"""The model writes at most so many batches of messages to get enough prompts."""
MESSAGE_PLACEHOLDER = "pass-marks-the-users-turn"
"""A message that is put into the chat template to find where the user's message begins."""


@dataclass(frozen=True)
class SelfPrompts:
    """Writes prompts of at most `max_tokens` token ids, after which the model's answer follows."""

    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: tuple[int, ...]
    writer: TextWriter
    max_tokens: int

    def write(self, count: int, rng: random.Random) -> list[list[int]]:
        """Return `count` prompts, which are distinct if the model has a chat template.

        Raises PassError if the model writes too few distinct messages that have an allowed length
        and an end token.
        """
        if not self.tokenizer.chat_template:
            return [[self._start()]] * count
        opening, prompts = self._opening(), dict[tuple[int, ...], None]()
        for _ in range(MAX_BATCHES):
            texts = self.writer.write(
                [opening] * count,
                len(opening) + MAX_MESSAGE_TOKENS,
                TEMPERATURE,
                TOP_P,
                rng.getrandbits(31),
            )
            for text in texts:
                if message := self._message(text[len(opening) :]):
                    ids = plain_ids(self.tokenizer, chat_prompt(self.tokenizer, message))
                    if len(ids) <= self.max_tokens:
                        prompts[tuple(ids)] = None
            if len(prompts) >= count:
                return [list(ids) for ids in list(prompts)[:count]]
        raise PassError(
            "the model writes too few user messages that end; give text to take prompts from: "
            "--data"
        )

    def _opening(self) -> list[int]:
        """Return the chat template up to the user's message."""
        text = chat_prompt(self.tokenizer, MESSAGE_PLACEHOLDER)
        if MESSAGE_PLACEHOLDER not in text:
            raise PassError(
                "the chat template omits the user's message; give text to take prompts from: --data"
            )
        return plain_ids(self.tokenizer, text.split(MESSAGE_PLACEHOLDER)[0])

    def _message(self, written: Sequence[int]) -> str | None:
        """Return the message in `written`; None if it is too short, or no end token follows it."""
        if len(written) <= MIN_MESSAGE_TOKENS or written[-1] not in self.eos_token_ids:
            return None
        return self.tokenizer.decode(written[:-1]).strip() or None

    def _start(self) -> int:
        """Return the model's start token, or else an end token."""
        start = self.tokenizer.bos_token_id
        if start is None:
            start = next(iter(self.eos_token_ids), None)
        if start is None:
            raise PassError(
                "the model has no start token to begin with; give text to take prompts from: --data"
            )
        return int(start)
