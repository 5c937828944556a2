"""Prompts that the model writes itself: what it expects to be asked.

A chat model continues its chat template's opening, up to the user's turn, and ends that turn by itself (Magpie,
Xu et al. 2024, arXiv 2406.08464). A base model starts from its start token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from pass_runtime.errors import PassError
from pass_trainer.continuing import chat_prompt, plain_ids
from pass_trainer.writer import Writer

TEMPERATURE, TOP_P = 1.0, 0.95
FEWEST, MOST = 4, 96
"""Tokens of a user's turn; turns that do not end by then are thrown away (SmolLM2-135M: a third)."""
ROUNDS = 12
"""Tries; a model that ends too few turns in so many is none that writes prompts."""
MARK = "pass-marks-the-users-turn"


@dataclass(frozen=True)
class SelfPrompts:
    """`count` prompts at a time, as at most `longest` token ids that end where the answer begins."""

    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: tuple[int, ...]
    writer: Writer
    longest: int

    def write(self, count: int, rng: random.Random) -> list[list[int]]:
        """Distinct prompts; PassError where the model ends too few of its user turns."""
        if not self.tokenizer.chat_template:
            return [[self._start()]] * count
        opening, prompts = self._opening(), dict[tuple[int, ...], None]()
        for _ in range(ROUNDS):
            lines = self.writer.write([opening] * count, len(opening) + MOST, TEMPERATURE, TOP_P, rng.getrandbits(31))
            turns = [text for line in lines if (text := self._turn(line[len(opening) :]))]
            found = (tuple(plain_ids(self.tokenizer, chat_prompt(self.tokenizer, text))) for text in turns)
            prompts |= dict.fromkeys(ids for ids in found if len(ids) <= self.longest)
            if len(prompts) >= count:
                return [list(ids) for ids in list(prompts)[:count]]
        raise PassError("the model hardly ends the user's turns that it writes; give text to take prompts from: --data")

    def _opening(self) -> list[int]:
        """The chat template up to where the user's words stand."""
        text = chat_prompt(self.tokenizer, MARK)
        if MARK not in text:
            raise PassError("the chat template does not show the user's words; give text to take prompts from: --data")
        return plain_ids(self.tokenizer, text.split(MARK)[0])

    def _turn(self, written: Sequence[int]) -> str | None:
        """The user's words, where the turn came to an end."""
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
