"""Makes training text: the model continues prompts, its own or excerpts of a corpus, into files of
many sequences each, the shards, which later runs with the same settings reuse."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from transformers import PreTrainedTokenizerFast

from pass_runtime.errors import PassError
from pass_runtime.files import write_whole
from pass_trainer.config import Recipe
from pass_trainer.corpus import TextSource, digest
from pass_trainer.loops import loop_starts
from pass_trainer.writers import TextWriter, chat_prompt, message_ids, plain_ids

SHARD_SEQUENCES = 64
"""The sequences of a shard if a CPU writes them."""
MAX_CHARACTERS_PER_TOKEN = 12
"""Of a corpus, tokenized for a prompt."""
MAX_DRAWS = 200
"""After so many, a source without a valid prompt is rejected."""
TEMPERATURE, TOP_P = 1.0, 0.95
"""Of messages that the model writes."""
MIN_MESSAGE_TOKENS, MAX_MESSAGE_TOKENS, MAX_BATCHES = 4, 96, 12
"""Shorter and longer messages are discarded (a third of SmolLM2's); so many batches are written to
get enough."""
MESSAGE_PLACEHOLDER = "pass-marks-the-users-turn"


@dataclass(frozen=True)
class Sequences:
    """tokens [n,N], prompt_lengths [n], lengths [n], all int64: row i has lengths[i] tokens, of
    which the first prompt_lengths[i] are the prompt, and then padding."""

    tokens: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, rows: slice) -> Sequences:
        return Sequences(self.tokens[rows], self.prompt_lengths[rows], self.lengths[rows])


@dataclass(frozen=True)
class Distiller:
    """Writes and reads shards of `shard_size` sequences (the last may have fewer). sources: of
    prompts; None is the model itself."""

    writer: TextWriter
    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: tuple[int, ...]
    sources: Sequence[TextSource | None]
    recipe: Recipe
    shard_size: int = SHARD_SEQUENCES

    @property
    def shard_count(self) -> int | None:
        """None if the recipe sets no number of sequences."""
        sequences = self.recipe.sequences
        return None if sequences is None else -(-sequences // self.shard_size)

    @property
    def directory_name(self) -> str:
        recipe = asdict(self.recipe) | {"sequences": None}
        key = json.dumps([self.writer.name, digest(self.sources), recipe, self.shard_size])
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    def check(self) -> None:
        """Raise PassError if a source has no valid prompt."""
        for source in self.sources:
            if source is not None:
                self._prompt(random.Random(self.recipe.seed), source)

    def write_missing(self, directory: Path, shards: Iterable[int]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for shard in shards:
            path = self._path(directory, shard)
            if not path.is_file():
                write_whole(path, save(self._make_shard(shard)))

    def read(self, directory: Path, shards: Iterable[int]) -> Sequences:
        try:
            files = [load_file(self._path(directory, i)) for i in shards]
        except (OSError, SafetensorError) as error:
            raise PassError(
                f"{directory} is damaged ({error}); delete it, and it will be made again"
            ) from None
        return Sequences(
            **{name: torch.cat([file[name] for file in files]).long() for name in files[0]}
        )

    def _size(self, shard: int) -> int:
        sequences, size = self.recipe.sequences, self.shard_size
        return size if sequences is None else min(size, sequences - shard * size)

    def _path(self, directory: Path, shard: int) -> Path:
        size = self._size(shard)  # A run with more sequences writes the whole shard beside it.
        part = "" if size == self.shard_size else f"-first-{size}"
        return directory / f"shard-{shard:05d}{part}.safetensors"

    def _make_shard(self, shard: int) -> dict[str, torch.Tensor]:
        """Return the tensors of `Sequences` in int32. A text that begins to repeat itself is cut
        there."""
        rng, recipe = random.Random(f"{self.recipe.seed} {shard}"), self.recipe
        prompts = self._prompts(rng, shard * self.shard_size, self._size(shard))
        length = recipe.sequence_length
        temperature = recipe.temperatures[shard % len(recipe.temperatures)]
        texts = self.writer.write(prompts, length, temperature, 1.0, rng.getrandbits(31))
        tokens = torch.zeros(len(texts), length, dtype=torch.int32)
        lengths = torch.zeros(len(texts), dtype=torch.int32)
        loops = loop_starts(
            [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
        )
        for row, (text, prompt, loop) in enumerate(zip(texts, prompts, loops, strict=True)):
            kept = text if loop is None else text[: len(prompt) + loop]
            tokens[row, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
            lengths[row] = len(kept)
        return {
            "tokens": tokens,
            "prompt_lengths": torch.tensor([*map(len, prompts)], dtype=torch.int32),
            "lengths": lengths,
        }

    def _prompts(self, rng: random.Random, first: int, count: int) -> list[list[int]]:
        sources = [self.sources[index % len(self.sources)] for index in range(first, first + count)]
        prompt_writer = SelfPrompts(
            self.tokenizer, self.eos_token_ids, self.writer, self.recipe.max_message_tokens
        )
        self_count = sources.count(None)
        self_prompts = iter(prompt_writer.write(self_count, rng) if self_count else ())
        return [
            next(self_prompts) if source is None else self._prompt(rng, source)
            for source in sources
        ]

    def _prompt(self, rng: random.Random, source: TextSource) -> list[int]:
        return self._message(rng, source) if source.messages else self._excerpt(rng, source)

    def _message(self, rng: random.Random, source: TextSource) -> list[int]:
        for _ in range(MAX_DRAWS):
            ids = message_ids(self.tokenizer, rng.choice(source.documents))
            if len(ids) <= self.recipe.max_message_tokens:
                return ids
        raise PassError(f"{source.name}: its messages are too long; use a larger --sequence-length")

    def _excerpt(self, rng: random.Random, source: TextSource) -> list[int]:
        as_chat = bool(self.tokenizer.chat_template) and rng.random() < self.recipe.chat_share
        fewest, most = self.recipe.prompt_tokens
        size = rng.randint(fewest, most)
        for _ in range(MAX_DRAWS):
            text = source.excerpt(rng, size * MAX_CHARACTERS_PER_TOKEN)
            ids = list(self.tokenizer(text, add_special_tokens=not as_chat)["input_ids"])[:size]
            if len(ids) >= fewest:
                break
        else:
            raise PassError(
                f"{source.name}: no text is long enough for a prompt of {fewest} tokens "
                "(--prompt-tokens)"
            )
        if not as_chat:
            return ids
        message = self.tokenizer.decode(ids)
        return message_ids(self.tokenizer, message)[: self.recipe.max_message_tokens]


@dataclass(frozen=True)
class SelfPrompts:
    """Lets the model write prompts of at most `max_tokens` tokens.

    A chat model gets the beginning of its chat template, up to the user's message, and continues
    with a message and an end token (Magpie, Xu et al. 2024, arXiv 2406.08464). A base model's
    prompt is its start token alone.
    """

    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: tuple[int, ...]
    writer: TextWriter
    max_tokens: int

    def write(self, count: int, rng: random.Random) -> list[list[int]]:
        """Return `count` prompts, which are distinct if the model has a chat template. Raises
        PassError if it writes too few messages that end and have an allowed length."""
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
                    ids = message_ids(self.tokenizer, message)
                    if len(ids) <= self.max_tokens:
                        prompts[tuple(ids)] = None
            if len(prompts) >= count:
                return [list(ids) for ids in list(prompts)[:count]]
        raise PassError(
            "the model writes too few user messages that end; give text to take prompts from: "
            "--data"
        )

    def _opening(self) -> list[int]:
        text = chat_prompt(self.tokenizer, MESSAGE_PLACEHOLDER)
        if MESSAGE_PLACEHOLDER not in text:
            raise PassError(
                "the chat template omits the user's message; give text to take prompts from: --data"
            )
        return plain_ids(self.tokenizer, text.split(MESSAGE_PLACEHOLDER)[0])

    def _message(self, written: Sequence[int]) -> str | None:
        if len(written) <= MIN_MESSAGE_TOKENS or written[-1] not in self.eos_token_ids:
            return None
        return self.tokenizer.decode(written[:-1]).strip() or None

    def _start(self) -> int:
        start = self.tokenizer.bos_token_id
        if start is None:
            start = next(iter(self.eos_token_ids), None)
        if start is None:
            raise PassError(
                "the model has no start token to begin with; give text to take prompts from: --data"
            )
        return int(start)
