"""Self-distillation data: prompts from a corpus, completions by the frozen model itself, kept on disk.

A draft is right when it is what the model would write, so the model's own writing is the text to train on.
Shards are written once under a directory that is named after everything they depend on; a run that was cut off
goes on with the next shard.
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
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pass_exporter.progress import Step
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole
from pass_trainer.corpus import Source, digest

SHARD = 64
"""Sequences that are generated together, and kept in one file; the last file has the rest."""
MAX_CHARACTERS_PER_TOKEN = 12


@dataclass(frozen=True)
class Recipe:
    """How sequences are made. temperatures: cycled through by shard, 0 is greedy.

    length: N, tokens of a sequence, prompt included. prompt: fewest and most tokens of a prompt.
    chat: the share of prompts that are put to the model as a chat message, where it has a chat template.
    """

    sequences: int = 1024
    length: int = 256
    prompt: tuple[int, int] = (16, 64)
    temperatures: tuple[float, ...] = (0.0, 0.8)
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
    """Writes and reads the shards of one (model, corpus, recipe)."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: tuple[int, ...]
    sources: Sequence[Source]
    recipe: Recipe

    @property
    def shards(self) -> int:
        return -(-self.recipe.sequences // SHARD)

    def directory(self, cache: Path, fingerprint: str) -> Path:
        """A directory of `cache` for exactly this model, corpus and recipe (but for the number of sequences)."""
        recipe = asdict(self.recipe) | {"sequences": None}
        key = json.dumps([fingerprint, digest(self.sources), recipe, SHARD])
        return cache / "distilled" / hashlib.sha256(key.encode()).hexdigest()[:16]

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
        rng = random.Random(f"{self.recipe.seed} {shard}")
        prompts = [self._prompt(rng, shard * SHARD + i) for i in range(self._size(shard))]
        temperature = self.recipe.temperatures[shard % len(self.recipe.temperatures)]
        return complete(self.model, prompts, self.recipe.length, temperature, self.eos_token_ids, rng.getrandbits(32))

    def _prompt(self, rng: random.Random, index: int) -> list[int]:
        source = self.sources[index % len(self.sources)]
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
        messages = [{"role": "user", "content": self.tokenizer.decode(ids)}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])[: self.recipe.length // 2]


@torch.no_grad()
def complete(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    length: int,
    temperature: float,
    eos_token_ids: Sequence[int],
    seed: int,
) -> dict[str, torch.Tensor]:
    """Continue `prompts` to `length` tokens: tokens [n,length] int32, prompts [n], lengths [n] (end token included)."""
    count, widest = len(prompts), max(map(len, prompts))
    ids, mask = torch.zeros(2, count, widest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, widest - len(prompt) :] = torch.tensor(prompt)
        mask[row, widest - len(prompt) :] = 1
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=length - min(map(len, prompts)),
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=eos_token_ids[0] if eos_token_ids else 0,
        cache_implementation="static",  # a growing cache is copied at every step: 1.5 times the time on a CPU
        disable_compile=True,
        # What a generation_config.json may set otherwise: it is the model's plain distribution that drafts must meet.
        repetition_penalty=1.0,
        top_k=0,
        top_p=1.0,
        **sampling,
    ).cpu()
    tokens = torch.zeros(count, length, dtype=torch.int32)
    lengths = torch.zeros(count, dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        line = out[row, widest - len(prompt) :][:length]
        ends = torch.isin(line[len(prompt) :], torch.tensor(list(eos_token_ids))).nonzero()
        valid = len(prompt) + int(ends[0]) + 1 if len(ends) else len(line)
        tokens[row, :valid] = line[:valid].int()
        lengths[row] = valid
    return {"tokens": tokens, "prompts": torch.tensor([len(p) for p in prompts], dtype=torch.int32), "lengths": lengths}
