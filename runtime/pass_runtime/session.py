"""A loaded bundle: `load(path)`, then `generate` or `chat`."""

from __future__ import annotations

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
from pass_runtime.bundle.option import whole_numbers
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.decode.engine import Engine, Usage
from pass_runtime.decode.sequence import Request, SequenceState
from pass_runtime.decode.worker import Places, Worker
from pass_runtime.errors import OfOneProcess, PassError
from pass_runtime.generation import Generation, TokenStream
from pass_runtime.options import GenerateOptions, LoadOptions
from pass_runtime.resolver import Resolver
from pass_runtime.text.constraint import Constraint
from pass_runtime.text.detokenizer import TextStream, Vocabulary, decode, encode
from pass_runtime.text.grammar import GrammarState
from pass_runtime.text.infill import Infill, find_infill
from pass_runtime.text.special import ChatEncoder
from pass_runtime.text.templates import ChatTemplate, Message, load_chat_template
from pass_runtime.tuning.auto import Auto, Tuner

T = TypeVar("T")


class Session(OfOneProcess):
    """A loaded bundle, which decodes up to `slots` sequences at a time. Any thread may use it."""

    def __init__(
        self,
        manifest: Manifest,
        backend: Backend,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        self.manifest, self.backend, self.tokenizer = manifest, backend, tokenizer
        self.chat_template = chat_template
        self.vocabulary = Vocabulary(tokenizer)
        self._resolver = Resolver(manifest, backend, tokenizer, self.vocabulary)
        options = options or LoadOptions()
        self._engine = Engine(
            backend,
            Auto(manifest.lookahead, backend.capabilities),
            options.max_queue,
            speculative_max_concurrency=options.speculative_max_concurrency,
            logprobs_mode=options.logprobs_mode,
            prefix_cache=options.prefix_cache,
        )
        self._worker = Worker(self._engine)
        self._finalizer = weakref.finalize(self, self._worker.close, backend.close)

    def close(self) -> None:
        """Cancel all requests and free the device's memory."""
        self._finalizer()
        self._resolver.grammars.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def slots(self) -> int:
        """Sequences decoded at a time; others wait in the queue."""
        return self.backend.capabilities.slots

    @property
    def capacity(self) -> int:
        """The largest KV capacity, in tokens, for prompt and text."""
        return self.backend.capabilities.max_capacity

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. add_special_tokens: a prompt without any token becomes
        the start token."""
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
        """Return the text, with special tokens unless `skip_special_tokens`."""
        return decode(self.tokenizer, token_ids, skip_special_tokens=skip_special_tokens)

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Return the prompt for what stands between two texts. Raises PassError if the tokenizer
        has no tokens for that."""
        if self._infill is None:
            name = self.manifest.model.name
            raise PassError(f"{name} has no fill-in-the-middle tokens; use plain prompts")
        return self._infill.encode(_checked_text(prefix), _checked_text(suffix))

    @property
    def infill_end_ids(self) -> tuple[int, ...]:
        """The tokens, besides the model's, that end the answer to `encode_infill`."""
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
        """Return the chat template's prompt for the assistant's turn. variables: of the
        template, such as `tools`. allow_special_tokens: such text becomes the token, as in
        Hugging Face; only for messages that no user wrote."""
        template = self.chat_template
        if template is None:
            raise PassError(f"{self.manifest.model.name} has no chat template; use plain prompts")

        def render(inputs: Sequence[Any]) -> str:
            return _checked_text(template.render(inputs[0], **inputs[1]))

        inputs = [list(messages), dict(variables or {})]
        if allow_special_tokens:
            return encode(self.tokenizer, render(inputs))
        return self._chat_encoder.encode(inputs, render)

    @cached_property
    def _chat_encoder(self) -> ChatEncoder:
        return ChatEncoder(self.tokenizer)

    def generate(
        self, prompt: str | Sequence[int], options: GenerateOptions | None = None
    ) -> Generation:
        """Continue `prompt`, a string or token ids. Raises `QueueFull` if too many requests
        wait."""
        return self.generate_all(prompt, [options or GenerateOptions()])[0]

    def generate_all(
        self, prompt: str | Sequence[int], choices: Sequence[GenerateOptions]
    ) -> list[Generation]:
        """Continue `prompt` for each of `choices`, or for none if it raises as `generate` does."""
        ids = self.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        # Sequences share the K/V of the same tuple object: copy a caller's tuple.
        ids = (*ids,)
        return self.begin([self.request(ids, options) for options in choices])

    def begin(self, requests: Sequence[Request], places: Places | None = None) -> list[Generation]:
        """Start all requests, or none if it raises. places: from `reserve`; None raises
        `QueueFull` beyond max_queue."""
        sequences = [SequenceState(r, self._text_reader(r)) for r in requests]
        generations = [Generation(sequence, self) for sequence in sequences]
        self._worker.submit(sequences, places)
        return generations

    def _text_reader(self, request: Request) -> TextStream:
        min_tokens = 0 if request.processing is None else request.processing.min_tokens
        shown = request.shown_special_tokens
        return TextStream(self.vocabulary, request.prompt_ids, request.stop, min_tokens, shown)

    def reserve(self, count: int, max_queue: int | None = None) -> Places:
        """Reserve slots or places in the queue for `count` requests, until `begin` or the end of
        a `with` block. Raises `QueueFull`. max_queue: None is the session's."""
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
        """Continue a prompt, but yield token ids alone. Raises PassError for stop strings, which
        need text."""
        options = options or GenerateOptions()
        if options.stop:
            raise PassError("stop strings need text: use generate, or stop_token_ids")
        sequence = SequenceState(self.request((*_token_ids(prompt_ids),), options))
        stream = TokenStream(sequence, self)
        self._worker.submit([sequence])
        return stream

    def resolve(self, options: GenerateOptions) -> Request:
        """Return the request for `options`, with an empty prompt. Raises PassError if the bundle
        cannot run it."""
        return self._resolver.resolve(options)

    def prepare(self, constraint: Constraint) -> Future[GrammarState]:
        """Begin to compile a constraint before `resolve` and `request` need it."""
        return self._resolver.grammars.prepare(constraint)

    def request(self, prompt_ids: Sequence[int], options: GenerateOptions) -> Request:
        """Return the request that `generate` would start."""
        return self._resolver.request(_token_ids(prompt_ids), options)

    def tuner(self, sampling: SamplingParams) -> Tuner:
        """Return the tuner of `auto` for the sampler. Raises PassError if the KV cache has no
        room."""
        tuner = self._worker.call(lambda: self._engine.tuner(sampling.sampler))
        if tuner is None:
            raise PassError(
                f"the KV capacity of {self.backend.capabilities.max_capacity} has no room to time "
                "passes in, so plan auto decodes plainly: raise the capacity, or try again when "
                "other requests have ended"
            )
        return tuner

    def warm_up(self, *samplings: SamplingParams) -> None:
        """Time the passes of `auto` for every batch size, so that the first requests need not
        wait. samplings: default greedy and sampled."""
        capabilities = self.backend.capabilities
        samplers = [
            each.sampler for each in samplings or (SamplingParams(0.0), SamplingParams(1.0))
        ]
        for sampler in samplers:
            for batch in capabilities.batch_sizes:
                self._worker.call(partial(self._engine.tuner, sampler, batch))
        if capabilities.keeps_graphs:
            for capacity, batch in product(capabilities.capacities, capabilities.batch_sizes):
                self._worker.call(partial(self._engine.capture, capacity, batch, samplers))
            self._worker.call(self.backend.save_kernels)

    def call(self, task: Callable[[Engine], T]) -> T:
        """Run `task(engine)` on the thread that decodes, between two passes; for benchmarks."""
        return self._worker.call(lambda: task(self._engine))

    @property
    def closed(self) -> bool:
        """Whether it was closed, its worker or device has failed, or a file of its bundle was
        written."""
        return self._worker.closed or self.backend.failure is not None

    def usage(self) -> Usage:
        """Return how many sequences run and wait, and how much of the KV cache they take."""
        return self._engine.usage()


def _token_ids(prompt: object) -> tuple[int, ...]:
    return whole_numbers("the prompt's token ids", prompt)


def _checked_text(text: str) -> str:
    """Raises PassError for lone surrogates, as Python makes them of arguments that are not
    UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PassError(f"the prompt is not valid UTF-8 text at character {error.start}") from None
    return text


def read_tokenizer(bundle: Path) -> Tokenizer:
    """Without truncation and padding."""
    path = bundle / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise PassError(f"cannot read {path}: {error}; export the bundle again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load(bundle: str | Path, options: LoadOptions | str | None = None, **fields: Any) -> Session:
    """Open a bundle. options: `LoadOptions`, or the device's name. fields: others, as in
    `load(path, "cpu", threads=2)`. Raises PassError."""
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
    tokenizer = read_tokenizer(path)
    template = load_chat_template(path, manifest.model.special_tokens)
    backend = open_backend(path, manifest, options)
    session = Session(manifest, backend, tokenizer, template, options)
    after = identities(path)
    if any(before.get(name) != after.get(name) for name in (FILE_NAME, *manifest.files)):
        session.close()
        raise changed("its files were replaced while it was opened")
    return session
