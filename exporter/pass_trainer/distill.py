"""Self-distillation data: prompts by the model or from a corpus, completions by the model, kept on disk.

A draft is right when it is what the model would write, so the model's own writing is the text to train on.
Shards are written once under a directory that is named after everything they depend on; a run that was cut off
goes on with the next shard, and one with more sequences takes those that are there.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from transformers import PreTrainedTokenizerFast

from pass_exporter.progress import Step
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole
from pass_runtime.testing.loops import loop_start
from pass_trainer.continuing import chat_prompt, plain_ids
from pass_trainer.corpus import Source, digest
from pass_trainer.self_prompts import SelfPrompts
from pass_trainer.writer import Writer

SHARD = 64
"""Sequences that are generated together, and kept in one file; the last file has the rest."""
MAX_CHARACTERS_PER_TOKEN = 12


@dataclass(frozen=True)
class Recipe:
    """How sequences are made. temperatures: cycled through by shard, 0 is greedy.

    length: N, tokens of a sequence, prompt included. prompt: fewest and most tokens of a prompt from a corpus.
    chat: the share of those prompts that are put to the model as a chat message, where it has a chat template.
    """

    sequences: int = 1024
    length: int = 256
    prompt: tuple[int, int] = (16, 64)
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    chat: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        fewest, most = self.prompt
        if not 1 <= fewest <= most < self.length:
            raise PassError(
                f"--prompt-tokens {fewest} {most}: the fewest, then the most, below the sequence's {self.length}"
            )
        if not 0 <= self.chat <= 1:
            raise PassError(f"--chat-share must be 0 to 1, not {self.chat}")
        if self.sequences < 2:
            raise PassError(f"--sequences must be at least 2, not {self.sequences}")


@dataclass(frozen=True)
class Sequences:
    """tokens [n,N] int64; rows are valid up to `lengths` [n]; the model's own writing starts at `prompts` [n]."""

    tokens: torch.Tensor
    prompts: torch.Tensor
    lengths: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, rows: slice) -> Sequences:
        return Sequences(self.tokens[rows], self.prompts[rows], self.lengths[rows])


@dataclass(frozen=True)
class Distiller:
    """Writes and reads the shards of one (model, sources, recipe). sources: None is the model itself."""

    writer: Writer
    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: tuple[int, ...]
    sources: Sequence[Source | None]
    recipe: Recipe

    @property
    def shards(self) -> int:
        return -(-self.recipe.sequences // SHARD)

    @property
    def name(self) -> str:
        """Of the directory for exactly this writer, these sources and this recipe (but for the number of sequences)."""
        recipe = asdict(self.recipe) | {"sequences": None}
        key = json.dumps([self.writer.name, digest(self.sources), recipe, SHARD])
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    def generate(self, directory: Path, shards: Sequence[int], progress: Step) -> None:
        """Write those of `shards` that are not there yet; `progress(sequences done, of all)` after each."""
        directory.mkdir(parents=True, exist_ok=True)
        done, total = 0, sum(self._size(shard) for shard in shards)
        for shard in shards:
            path = self._path(directory, shard)
            if not path.is_file():
                write_whole(path, save(self._complete(shard)))
            done += self._size(shard)
            progress(done, total)

    def read(self, directory: Path) -> Sequences:
        """All sequences of the recipe, which must have been generated."""
        try:
            shards = [load_file(self._path(directory, i)) for i in range(self.shards)]
        except (OSError, SafetensorError) as error:
            raise PassError(f"{directory} is damaged ({error}); delete it, it will be made again") from None
        tensors = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
        return Sequences(tensors["tokens"].long(), tensors["prompts"].long(), tensors["lengths"].long())

    def _size(self, shard: int) -> int:
        return min(SHARD, self.recipe.sequences - shard * SHARD)

    def _path(self, directory: Path, shard: int) -> Path:
        """A part of a shard is a file of its own, so that what is read does not depend on earlier runs."""
        part = "" if self._size(shard) == SHARD else f"-first-{self._size(shard)}"
        return directory / f"shard-{shard:05d}{part}.safetensors"

    def _complete(self, shard: int) -> dict[str, torch.Tensor]:
        """tokens [n,N] int32, prompts [n], lengths [n] (an end token included); a text ends where it begins to loop."""
        rng, recipe = random.Random(f"{self.recipe.seed} {shard}"), self.recipe
        prompts = self._prompts(rng, shard * SHARD, self._size(shard))
        temperature = recipe.temperatures[shard % len(recipe.temperatures)]
        lines = self.writer.write(prompts, recipe.length, temperature, 1.0, rng.getrandbits(31))
        tokens = torch.zeros(len(lines), recipe.length, dtype=torch.int32)
        lengths = torch.zeros(len(lines), dtype=torch.int32)
        for row, (line, prompt) in enumerate(zip(lines, prompts, strict=True)):
            loop = loop_start(line[len(prompt) :])
            kept = line if loop is None else line[: len(prompt) + loop]
            tokens[row, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
            lengths[row] = len(kept)
        return {"tokens": tokens, "prompts": torch.tensor([*map(len, prompts)], dtype=torch.int32), "lengths": lengths}

    def _prompts(self, rng: random.Random, first: int, count: int) -> list[list[int]]:
        """Those of the sequences `first`.. of the run: the sources take turns."""
        sources = [self.sources[index % len(self.sources)] for index in range(first, first + count)]
        wanted = sum(source is None for source in sources)
        by_model = SelfPrompts(self.tokenizer, self.eos_token_ids, self.writer, self.recipe.length // 2)
        own = iter(by_model.write(wanted, rng) if wanted else ())
        return [next(own) if source is None else self._excerpt(rng, source) for source in sources]

    def _excerpt(self, rng: random.Random, source: Source) -> list[int]:
        as_chat = bool(self.tokenizer.chat_template) and rng.random() < self.recipe.chat
        size = rng.randint(*self.recipe.prompt)
        for _ in range(200):
            text = source.excerpt(rng, size * MAX_CHARACTERS_PER_TOKEN)
            ids = list(self.tokenizer(text, add_special_tokens=not as_chat)["input_ids"])[:size]
            if len(ids) >= self.recipe.prompt[0]:
                break
        else:
            raise PassError(
                f"{source.name}: no text is long enough for a prompt of {self.recipe.prompt[0]} tokens "
                "(--prompt-tokens)"
            )
        return self._as_chat(ids) if as_chat else ids

    def _as_chat(self, ids: list[int]) -> list[int]:
        text = chat_prompt(self.tokenizer, self.tokenizer.decode(ids))
        return plain_ids(self.tokenizer, text)[: self.recipe.length // 2]
