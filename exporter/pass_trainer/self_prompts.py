"""Prompts that the model writes itself.

A chat model is given the beginning of its chat template, up to the user's message: it writes such a message and ends it
(Magpie, Xu et al. 2024, arXiv 2406.08464). A base model begins with its start token.
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
FEWEST, MOST = 4, 96
"""The fewest and most tokens of a user's message; a third of SmolLM2-135M's do not end by then, and are discarded."""
ATTEMPTS = 12
"""Batches that are written before the model is taken for one that cannot write prompts."""
MARK = "pass-marks-the-users-turn"


@dataclass(frozen=True)
class SelfPrompts:
    """Writes prompts: at most `longest` token ids each, which end where the answer begins."""

    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: tuple[int, ...]
    writer: TextWriter
    longest: int

    def write(self, count: int, rng: random.Random) -> list[list[int]]:
        """Return `count` distinct prompts; PassError if the model ends too few of the messages that it writes."""
        if not self.tokenizer.chat_template:
            return [[self._start()]] * count
        opening, prompts = self._opening(), dict[tuple[int, ...], None]()
        for _ in range(ATTEMPTS):
            lines = self.writer.write([opening] * count, len(opening) + MOST, TEMPERATURE, TOP_P, rng.getrandbits(31))
            turns = [text for line in lines if (text := self._turn(line[len(opening) :]))]
            found = (tuple(plain_ids(self.tokenizer, chat_prompt(self.tokenizer, text))) for text in turns)
            prompts |= dict.fromkeys(ids for ids in found if len(ids) <= self.longest)
            if len(prompts) >= count:
                return [list(ids) for ids in list(prompts)[:count]]
        raise PassError("the model hardly ends the user's turns that it writes; give text to take prompts from: --data")

    def _opening(self) -> list[int]:
        """Return the chat template up to the user's message."""
        text = chat_prompt(self.tokenizer, MARK)
        if MARK not in text:
            raise PassError("the chat template does not show the user's words; give text to take prompts from: --data")
        return plain_ids(self.tokenizer, text.split(MARK)[0])

    def _turn(self, written: Sequence[int]) -> str | None:
        """Return the user's message, or None if it is too short or did not end."""
        if len(written) <= FEWEST or written[-1] not in self.eos_token_ids:
            return None
        return self.tokenizer.decode(written[:-1]).strip() or None

    def _start(self) -> int:
        start = self.tokenizer.bos_token_id
        if start is None:
            start = next(iter(self.eos_token_ids), None)
        if start is None:
            raise PassError("the model has no start token to write from; give text to take prompts from: --data")
        return int(start)
