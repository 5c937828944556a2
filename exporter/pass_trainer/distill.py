"""Makes training text: the model continues prompts, its own or excerpts of a corpus, into files of
many sequences each, the shards.

A draft is accepted if the model would have written it, so the model's own text is the right text
for training. The name of the shards' directory is a hash of everything that they depend on but the
number of sequences. An interrupted run continues with the first missing shard, and a run with more
sequences reuses existing shards.
"""

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

from pass_exporter.progress import Step
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole
from pass_trainer.config import Recipe
from pass_trainer.corpus import TextSource, digest
from pass_trainer.loops import loop_starts
from pass_trainer.self_prompts import SelfPrompts
from pass_trainer.text_writer import TextWriter
from pass_trainer.torch_generate import chat_prompt, plain_ids

SHARD_SEQUENCES = 64
"""The sequences of a shard if a CPU writes them. The last shard may have fewer."""
MAX_CHARACTERS_PER_TOKEN = 12
"""Characters of a corpus that are tokenized for each token of a prompt."""
MAX_DRAWS = 200
"""If so many random draws from a source give no valid prompt, the source is rejected."""


@dataclass(frozen=True)
class Sequences:
    """Sequences of token ids.

    tokens [n,N], prompt_lengths [n], lengths [n], all int64: row i has lengths[i] tokens, of which
    the first prompt_lengths[i] are the prompt, and then padding.
    """

    tokens: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, rows: slice) -> Sequences:
        return Sequences(self.tokens[rows], self.prompt_lengths[rows], self.lengths[rows])


@dataclass(frozen=True)
class Distiller:
    """Writes and reads the shards for one text writer, list of sources and recipe.

    sources: where prompts come from; None stands for the model itself.
    shard_size: how many sequences a shard has.
    """

    writer: TextWriter
    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: tuple[int, ...]
    sources: Sequence[TextSource | None]
    recipe: Recipe
    shard_size: int = SHARD_SEQUENCES

    @property
    def shard_count(self) -> int | None:
        """The number of all shards; None if the recipe sets no number of sequences."""
        sequences = self.recipe.sequences
        return None if sequences is None else -(-sequences // self.shard_size)

    @property
    def directory_name(self) -> str:
        """The name of the shards' directory."""
        recipe = asdict(self.recipe) | {"sequences": None}
        key = json.dumps([self.writer.name, digest(self.sources), recipe, self.shard_size])
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    def check(self) -> None:
        """Raise PassError if a source has no valid prompt. No text is written."""
        for source in self.sources:
            if source is not None:
                self._prompt(random.Random(self.recipe.seed), source)

    def write_missing(self, directory: Path, shards: Sequence[int], progress: Step) -> None:
        """Write those of `shards` that do not exist. progress: called with the numbers of sequences
        that are done, and of all."""
        directory.mkdir(parents=True, exist_ok=True)
        done, total = 0, sum(self._size(shard) for shard in shards)
        for shard in shards:
            path = self._path(directory, shard)
            if not path.is_file():
                write_whole(path, save(self._make_shard(shard)))
            done += self._size(shard)
            progress(done, total)

    def exists(self, directory: Path, shard: int) -> bool:
        return self._path(directory, shard).is_file()

    def read(self, directory: Path, shards: Iterable[int]) -> Sequences:
        """Return the sequences of `shards`, which must exist."""
        try:
            files = [load_file(self._path(directory, i)) for i in shards]
        except (OSError, SafetensorError) as error:
            raise PassError(
                f"{directory} is damaged ({error}); delete it, and it will be made again"
            ) from None
        tensors = {name: torch.cat([file[name] for file in files]) for name in files[0]}
        return Sequences(
            tensors["tokens"].long(), tensors["prompts"].long(), tensors["lengths"].long()
        )

    def _size(self, shard: int) -> int:
        """Return how many sequences a shard has."""
        sequences, size = self.recipe.sequences, self.shard_size
        return size if sequences is None else min(size, sequences - shard * size)

    def _path(self, directory: Path, shard: int) -> Path:
        """Return the path of a shard. A last shard with fewer sequences has another name than the
        whole shard, which a run with more sequences writes."""
        size = self._size(shard)
        part = "" if size == self.shard_size else f"-first-{size}"
        return directory / f"shard-{shard:05d}{part}.safetensors"

    def _make_shard(self, shard: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a shard's file, all int32: `tokens` [n,N], and the lengths of the
        prompts, `prompts` [n], and of the sequences, `lengths` [n].

        An end token is a part of the text. A text that begins to repeat itself is cut there.
        """
        rng, recipe = random.Random(f"{self.recipe.seed} {shard}"), self.recipe
        prompts = self._prompts(rng, shard * self.shard_size, self._size(shard))
        temperature, top_p = recipe.temperatures[shard % len(recipe.temperatures)], 1.0
        texts = self.writer.write(prompts, recipe.length, temperature, top_p, rng.getrandbits(31))
        tokens = torch.zeros(len(texts), recipe.length, dtype=torch.int32)
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
            "prompts": torch.tensor([*map(len, prompts)], dtype=torch.int32),
            "lengths": lengths,
        }

    def _prompts(self, rng: random.Random, first: int, count: int) -> list[list[int]]:
        """Return the prompts of `count` sequences from number `first` on. Sources take turns."""
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
        """Return a user's message as a prompt. Messages over half a sequence are skipped."""
        for _ in range(MAX_DRAWS):
            text = rng.choice(source.documents)
            if self.tokenizer.chat_template:
                ids = plain_ids(self.tokenizer, chat_prompt(self.tokenizer, text))
            else:
                ids = list(self.tokenizer(text)["input_ids"])
            if len(ids) <= self.recipe.max_message_tokens:
                return ids
        raise PassError(f"{source.name}: its messages are too long; use a larger --sequence-length")

    def _excerpt(self, rng: random.Random, source: TextSource) -> list[int]:
        as_chat = bool(self.tokenizer.chat_template) and rng.random() < self.recipe.chat
        size = rng.randint(*self.recipe.prompt)
        for _ in range(MAX_DRAWS):
            text = source.excerpt(rng, size * MAX_CHARACTERS_PER_TOKEN)
            ids = list(self.tokenizer(text, add_special_tokens=not as_chat)["input_ids"])[:size]
            if len(ids) >= self.recipe.prompt[0]:
                break
        else:
            raise PassError(
                f"{source.name}: no text is long enough for a prompt of {self.recipe.prompt[0]} "
                "tokens (--prompt-tokens)"
            )
        return self._as_chat(ids) if as_chat else ids

    def _as_chat(self, ids: list[int]) -> list[int]:
        text = chat_prompt(self.tokenizer, self.tokenizer.decode(ids))
        return plain_ids(self.tokenizer, text)[: self.recipe.max_message_tokens]
