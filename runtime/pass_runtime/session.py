"""A loaded bundle: `load(path)`, then `generate` or `chat`, for one request or for many at once."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from pass_runtime.backends.base import Backend
from pass_runtime.backends.open import open_backend
from pass_runtime.bundle.integrity import HashCache, identities, verify_files
from pass_runtime.bundle.manifest import FILE_NAME, TOKENIZER_FILE, Manifest
from pass_runtime.bundle.open_files import changed
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.bundle.values import as_whole_numbers
from pass_runtime.decode.runner import Runner
from pass_runtime.decode.scheduler import Scheduler, Usage
from pass_runtime.decode.sequence import Request, SequenceState
from pass_runtime.decode.worker import Places, Worker, capture_graphs
from pass_runtime.errors import OfOneProcess, PassError
from pass_runtime.generation import Generation, TokenStream
from pass_runtime.options import DEFAULT_MAX_QUEUE, GenerateOptions, LoadOptions
from pass_runtime.resolver import Resolver
from pass_runtime.text.chat_template import (
    ChatTemplate,
    Message,
    SpecialTokens,
    load_chat_template,
    template_tokens,
)
from pass_runtime.text.constraint import Constraint
from pass_runtime.text.detokenizer import TextStream, Vocabulary, decode, encode
from pass_runtime.text.grammar import GrammarState
from pass_runtime.text.infill import Infill, find_infill
from pass_runtime.text.special import ChatEncoder
from pass_runtime.tuning.tuner import Tuner, Tuners

T = TypeVar("T")


class Session(OfOneProcess):
    """A loaded bundle, which decodes up to `slots` sequences at a time. Any thread may use it."""

    def __init__(
        self,
        manifest: Manifest,
        backend: Backend,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        *,
        max_queue: int = DEFAULT_MAX_QUEUE,
        logprobs_mode: str = "raw",
        speculative_max_concurrency: int | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self.manifest, self.backend, self.tokenizer = manifest, backend, tokenizer
        self.chat_template = chat_template
        self.vocabulary = Vocabulary(tokenizer)
        self._resolver = Resolver(manifest, backend, tokenizer, self.vocabulary)
        processed = logprobs_mode == "processed"
        runner = Runner(backend, processed_logprobs=processed, prefix_cache=prefix_cache)
        self._tuners = Tuners(
            manifest, backend.capabilities, runner.time_masked_pass, lambda: runner.room
        )
        self._scheduler = Scheduler(runner, self._tuners, max_queue, speculative_max_concurrency)
        self._worker = Worker(self._scheduler, backend)
        self._finalizer = weakref.finalize(self, self._worker.close, backend.close)

    def close(self) -> None:
        """Cancel all requests and free the device's memory. Afterwards no call works."""
        self._finalizer()
        self._resolver.grammars.close()
        if self.chat_template is not None:
            self.chat_template.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def slots(self) -> int:
        """How many sequences can be decoded at a time; others wait in the queue."""
        return self.backend.capabilities.slots

    @property
    def capacity(self) -> int:
        """The largest KV capacity, in tokens: prompt and text of a sequence have to fit it."""
        return self.backend.capabilities.max_capacity

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. add_special_tokens: add the special tokens that the
        tokenizer adds to a prompt; a prompt without any token then becomes the start token."""
        ids = encode(self.tokenizer, _checked_text(text), add_special_tokens=add_special_tokens)
        if ids or not add_special_tokens:
            return ids
        model = self.manifest.model
        start = model.bos_token_id
        if start is None:  # In some models an end token alone separates texts.
            start = next(iter(model.eos_token_ids), None)
        if start is None:
            raise PassError(
                "the prompt is empty and the model has no start token; give it some text"
            )
        return [start]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, with special tokens unless `skip_special_tokens`."""
        return decode(self.tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Return the token ids of the prompt for what stands between two texts. What the model
        writes ends with one of `infill_end_ids`, too. Raises PassError if the tokenizer has no
        tokens for such prompts."""
        if self._infill is None:
            name = self.manifest.model.name
            raise PassError(f"{name} has no fill-in-the-middle tokens; use plain prompts")
        return self._infill.encode(_checked_text(prefix), _checked_text(suffix))

    @property
    def infill_end_ids(self) -> tuple[int, ...]:
        """The tokens, besides the model's end tokens, that end the answer to `encode_infill`; () if
        the tokenizer has no tokens for such prompts."""
        return () if self._infill is None else self._infill.end_token_ids

    @cached_property
    def _infill(self) -> Infill | None:
        return find_infill(self.tokenizer)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        allow_special_tokens: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of the chat template's prompt for the assistant's next turn.
        variables: other variables of the template, such as `tools`.

        Messages are plain text, even if they spell a special token such as `<|im_end|>`.
        allow_special_tokens: such text becomes the token, as in Hugging Face; use it only for
        messages that no user wrote.
        """
        template = self.chat_template
        if template is None:
            raise PassError(f"{self.manifest.model.name} has no chat template; use plain prompts")
        if not messages:
            raise PassError("a conversation needs at least one message")
        inputs = [list(messages), dict(variables or {})]
        time_shown = time.time()  # the same if the encoder renders more than once

        def render(template_inputs: Sequence[Any]) -> str:
            return _checked_text(template.render_at(time_shown, *template_inputs))

        prompt = render(inputs)
        if allow_special_tokens or not self._special_tokens.may_be_in(inputs):
            return encode(self.tokenizer, prompt)
        return self._chat_encoder.encode(inputs, prompt, render)

    @cached_property
    def _special_tokens(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer)

    @cached_property
    def _chat_encoder(self) -> ChatEncoder:
        return ChatEncoder(self.tokenizer, self._special_tokens)

    def generate(
        self, prompt: str | Sequence[int], options: GenerateOptions | None = None
    ) -> Generation:
        """Continue `prompt`, a string or token ids. Return the stream of the request at once, while
        the request decodes or waits for a free slot.

        Raises `QueueFull` if too many requests wait. The text does not depend on other requests.
        """
        return self.generate_all(prompt, [options or GenerateOptions()])[0]

    def generate_all(
        self, prompt: str | Sequence[int], choices: Sequence[GenerateOptions]
    ) -> list[Generation]:
        """Start a continuation of `prompt` for each of `choices`. The prompt is prefilled once, and
        its K/V are copied for the other continuations.

        Raises what `generate` raises, and then starts no continuation.
        """
        ids = self.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        # Sequences share the K/V of a prompt if it is the same tuple object: copy a caller's tuple.
        ids = (*ids,)
        return self.begin([self.request(ids, options) for options in choices])

    def begin(self, requests: Sequence[Request], places: Places | None = None) -> list[Generation]:
        """Start all requests, or none if it raises. places: what `reserve` returned for them; if
        None, raises `QueueFull` if more requests than the session's max_queue would wait."""
        sequences = [SequenceState(r, self._text_reader(r)) for r in requests]
        generations = [Generation(sequence, self) for sequence in sequences]
        self._worker.submit(sequences, places)
        return generations

    def _text_reader(self, request: Request) -> TextStream:
        min_tokens = 0 if request.processing is None else request.processing.min_tokens
        shown = request.shown_special_tokens
        return TextStream(self.vocabulary, request.prompt_ids, request.stop, min_tokens, shown)

    def reserve(self, count: int, max_queue: int | None = None) -> Places:
        """Reserve places for `count` requests, in slots or the queue, while their prompts are
        tokenized: until `begin` takes the places, or their `with` block ends. Raises `QueueFull` if
        there are fewer. max_queue: how many requests may wait (None: the session's max_queue)."""
        return self._worker.reserve(count, max_queue)

    def chat(
        self,
        messages: Sequence[Message],
        options: GenerateOptions | None = None,
        *,
        allow_special_tokens: bool = False,
    ) -> Generation:
        """Generate the assistant's next turn. allow_special_tokens: as for `encode_chat`."""
        return self.generate(
            self.encode_chat(messages, allow_special_tokens=allow_special_tokens), options
        )

    def generate_ids(
        self, prompt_ids: Sequence[int], options: GenerateOptions | None = None
    ) -> TokenStream:
        """Continue a prompt as `generate` does, but yield token ids alone. Raises PassError if
        `options` have stop strings, which need text."""
        options = options or GenerateOptions()
        if options.stop_strings:
            raise PassError("stop strings need text: use generate, or stop_token_ids")
        sequence = SequenceState(self.request((*_token_ids(prompt_ids),), options))
        stream = TokenStream(sequence, self)
        self._worker.submit([sequence])
        return stream

    def resolve(self, options: GenerateOptions) -> Request:
        """Return the request for `options`, with an empty prompt. Raises PassError if the bundle's
        graphs or engines cannot run it."""
        return self._resolver.resolve(options)

    def prepare(self, constraint: Constraint) -> Future[GrammarState]:
        """Begin to compile a constraint before `resolve` and `request` need it; see
        `Grammars.prepare`. Raises PassError if the bundle has no logits processors."""
        _ = self.backend.processors
        return self._resolver.grammars.prepare(constraint)

    def request(self, prompt_ids: Sequence[int], options: GenerateOptions) -> Request:
        """Return the request that `generate` would start. Requests whose `prompt_ids` are the same
        tuple object share the prompt's K/V."""
        return self._resolver.request(_token_ids(prompt_ids), options)

    def tuner(self, sampling: SamplingParams) -> Tuner:
        """Return the tuner that `auto` uses for the sampler of `sampling`. The first call for a
        sampler times passes, for about a second. Raises PassError if the KV cache has no room."""
        tuner = self._worker.call(lambda: self._tuners.get(sampling.sampler))
        if tuner is None:
            raise PassError(
                f"the KV capacity of {self.backend.capabilities.max_capacity} has no room to time "
                "passes in, so plan auto decodes plainly: raise the capacity, or try again when "
                "other requests have ended"
            )
        return tuner

    def warm_up(self, *samplings: SamplingParams) -> None:
        """Time the passes that `auto` needs, for every batch size and the samplers of `samplings`
        (default: greedy and sampled), so that the first requests need not wait for that. Passes are
        timed later if running requests fill the KV cache. On engines whose captured CUDA graphs
        stay valid (`Capabilities.keeps_graphs`), also capture passes for every batch size and KV
        capacity, unless requests are running."""
        capabilities = self.backend.capabilities
        samplers = [
            each.sampler for each in samplings or (SamplingParams(0.0), SamplingParams(1.0))
        ]
        for sampler in samplers:
            for batch in capabilities.batch_sizes:
                self._worker.call(partial(self._tuners.get, sampler, batch))
        if capabilities.keeps_graphs:
            for capacity, batch in product(capabilities.capacities, capabilities.batch_sizes):
                self._worker.call(
                    partial(capture_graphs, self._scheduler.runner, capacity, batch, samplers)
                )
            self._worker.call(self.backend.save_kernels)

    def call(self, task: Callable[[Runner], T]) -> T:
        """Run `task(runner)` on the runner's thread, between two passes; for benchmarks."""
        return self._worker.call(lambda: task(self._scheduler.runner))

    @property
    def closed(self) -> bool:
        """Whether the session was closed, or has ended: its worker or its device has failed, or a
        file of its bundle was written."""
        return self._worker.closed or self.backend.failure is not None

    def usage(self) -> Usage:
        """Return how many sequences run and wait now, and how much of the KV cache they take."""
        return self._scheduler.usage()


def _token_ids(prompt: object) -> tuple[int, ...]:
    """Return the token ids `prompt` as a tuple of ints; a tuple of ints is returned as it is.
    Raises PassError for anything else."""
    return as_whole_numbers("the prompt's token ids", prompt)


def _checked_text(text: str) -> str:
    """Return `text`. Raises PassError if it has lone surrogates, as Python makes them of arguments
    that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PassError(f"the prompt is not valid UTF-8 text at character {error.start}") from None
    return text


def read_tokenizer(bundle: Path) -> Tokenizer:
    """Return the tokenizer of a bundle, without the truncation and padding of older exports."""
    path = bundle / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise PassError(f"cannot read {path}: {error}; export the bundle again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load(bundle: str | Path, options: LoadOptions | str | None = None, **fields: Any) -> Session:
    """Open a bundle. options: `LoadOptions`, or only the device's name. fields: more fields of
    `LoadOptions`, as in `load(path, "cpu", threads=2)`. Raises PassError if that fails."""
    if isinstance(options, LoadOptions):
        options = replace(options, **fields)
    else:
        options = LoadOptions(**(fields if options is None else {"device": options, **fields}))
    path = Path(bundle)
    before = identities(path)
    manifest = read_manifest(path)
    hash_cache = HashCache()
    verify_files(path, manifest, hashes=options.verify, hash_cache=hash_cache)
    hash_cache.save()
    session = load_verified(path, manifest, options)
    after = identities(path)
    if any(before.get(name) != after.get(name) for name in (FILE_NAME, *manifest.files)):
        session.close()
        raise changed("its files were replaced while it was opened")
    return session


def load_verified(
    path: Path, manifest: Manifest, options: LoadOptions, *, backend: Backend | None = None
) -> Session:
    """Open a bundle, as `load` does after it has read the manifest and verified the files. backend:
    an open backend to use; None opens one."""
    tokenizer = read_tokenizer(path)
    template = load_chat_template(path, template_tokens(manifest.model, tokenizer))
    backend = backend or open_backend(
        path,
        manifest,
        options.device,
        threads=options.threads,
        max_batch_size=options.max_batch_size,
        capacity=options.capacity,
        verify=options.verify,
    )
    return Session(
        manifest,
        backend,
        tokenizer,
        template,
        max_queue=options.max_queue,
        logprobs_mode=options.logprobs_mode,
        speculative_max_concurrency=options.speculative_max_concurrency,
        prefix_cache=options.prefix_cache,
    )
