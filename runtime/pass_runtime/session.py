"""A loaded bundle: `load(path)`, then `generate`, `chat`, or `submit` for many requests at once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from pass_runtime.backends.base import Backend
from pass_runtime.backends.open import open_backend
from pass_runtime.bundle.integrity import verify_files
from pass_runtime.bundle.manifest import TOKENIZER_FILE, Manifest, read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.decode.draft_policy import Mode, make_mode
from pass_runtime.decode.runner import Runner
from pass_runtime.decode.scheduler import Scheduler, Usage
from pass_runtime.decode.sequence import Request
from pass_runtime.decode.sequence import Sequence as Decoding
from pass_runtime.decode.worker import Worker
from pass_runtime.errors import PassError
from pass_runtime.generation import Generation, TokenStream
from pass_runtime.options import MAX_QUEUE, GenerateOptions, LoadOptions
from pass_runtime.text.chat import ChatTemplate, Message, load_chat_template
from pass_runtime.text.stream import TextStream
from pass_runtime.tuning.tuner import PlanTuner
from pass_runtime.tuning.tuners import Tuners


class Session:
    """One model, and as many sequences at a time as its backend has slots. Any thread may call its methods."""

    def __init__(
        self,
        manifest: Manifest,
        backend: Backend,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        *,
        max_queue: int = MAX_QUEUE,
    ) -> None:
        self.manifest, self.backend, self.tokenizer = manifest, backend, tokenizer
        self.chat_template = chat_template
        runner = Runner(backend)
        self._tuners = Tuners(manifest, backend.capabilities, runner.idle_pass, lambda: runner.room)
        self._scheduler = Scheduler(runner, self._tuners, max_queue)
        self._worker = Worker(self._scheduler)
        self._finalizer = weakref.finalize(self, _close, self._worker, backend)

    def close(self) -> None:
        """Cancel what is under way and give the device's memory back; the session cannot be used afterwards."""
        self._finalizer()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, text: str) -> list[int]:
        """Token ids with the tokenizer's own special tokens; an empty text becomes the model's start token."""
        ids = list(self.tokenizer.encode(_valid(text)).ids)
        if ids:
            return ids
        model = self.manifest.model
        start = model.bos_token_id if model.bos_token_id is not None else next(iter(model.eos_token_ids), None)
        if start is None:
            raise PassError("the prompt is empty and the model has no start token; give it some text")
        return [start]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The chat template's prompt for the assistant's next turn."""
        if self.chat_template is None:
            raise PassError(f"{self.manifest.model.name} has no chat template; use plain prompts")
        if not messages:
            raise PassError("a conversation needs at least one message")
        return list(self.tokenizer.encode(_valid(self.chat_template.render(messages)), add_special_tokens=False).ids)

    def submit(self, prompt: str | Sequence[int], options: GenerateOptions | None = None) -> Generation:
        """Begin to write behind `prompt` (a string, or token ids), or wait in the queue for a free slot.

        Raises `QueueFull` where too many are waiting. The text is the same whatever else is under way.
        """
        return self.submit_all(prompt, [options or GenerateOptions()])[0]

    def submit_all(self, prompt: str | Sequence[int], asked: Sequence[GenerateOptions]) -> list[Generation]:
        """Several texts behind one prompt, which is read once: the others begin from a copy of its K/V.

        Raises as `submit` does; what had begun by then is cancelled.
        """
        ids = (*(self.encode(prompt) if isinstance(prompt, str) else prompt),)  # a new one: see Request
        begun: list[Generation] = []
        try:
            for options in asked:
                reader = TextStream(self.tokenizer, ids, options.stop_strings)
                begun.append(Generation(self._submit(ids, options, reader), self))
        except BaseException:
            for generation in begun:
                generation.cancel()
            raise
        return begun

    def generate(self, prompt: str | Sequence[int], options: GenerateOptions | None = None) -> Generation:
        """Text for `prompt`: `submit` under the name that people look for."""
        return self.submit(prompt, options)

    def chat(self, messages: Sequence[Message], options: GenerateOptions | None = None) -> Generation:
        """The assistant's next turn."""
        return self.submit(self.encode_chat(messages), options)

    def generate_ids(self, prompt_ids: Sequence[int], options: GenerateOptions | None = None) -> TokenStream:
        """Tokens without text. Stop strings need `generate`."""
        options = options or GenerateOptions()
        if options.stop_strings:
            raise PassError("stop strings need text: use generate, or stop_token_ids")
        return TokenStream(self._submit(list(prompt_ids), options, None), self)

    def mode(self, options: GenerateOptions) -> Mode:
        """How `options` are decoded on this bundle."""
        available = self.manifest.lookahead.length
        lookahead = available if options.lookahead is None else options.lookahead
        if not 0 <= lookahead <= available:
            raise PassError(
                f"look-ahead {lookahead} is not 0 to {available}, which is what the bundle was exported with"
            )
        exactly = self.backend.capabilities.lookahead
        if exactly is not None and (options.plan.startswith("fused:") or lookahead not in (0, exactly)):
            raise PassError(
                f"the engines are for look-ahead {exactly} with full groups: use --plan fused, and "
                f"--lookahead {exactly} or 0"
            )
        mode = make_mode(options.plan, lookahead, options.draft)
        if max(mode.lookahead, mode.text_drafts) > available:
            raise PassError(f"{options.plan} has more drafts than the {available} the bundle was exported with")
        return mode

    def request(self, prompt_ids: Sequence[int], options: GenerateOptions) -> Request:
        """What `options` ask of the scheduler behind `prompt_ids`, for those that drive one themselves."""
        model, capacity = self.manifest.model, self.backend.capabilities.max_capacity
        if not prompt_ids:
            raise PassError("the prompt has no tokens")
        for token in (*prompt_ids, *options.stop_token_ids):
            if not 0 <= token < model.vocab_size:
                raise PassError(f"token id {token} is not in the vocabulary of {model.vocab_size}")
        if len(prompt_ids) > capacity:
            raise PassError(
                f"the prompt has {len(prompt_ids)} tokens, more than the KV capacity of {capacity}; shorten it"
            )
        mode = self.mode(options)
        return Request(
            prompt_ids=tuple(prompt_ids),
            sampling=options.sampling.seeded(),
            max_new_tokens=options.max_new_tokens,
            cycle=mode.cycle,
            lookahead=mode.lookahead,
            text_drafts=mode.text_drafts,
            stop_token_ids=frozenset(options.stop_token_ids)
            | (frozenset() if options.ignore_eos else frozenset(model.eos_token_ids)),
            reuse_prefix=options.reuse_prefix,
            logprobs=options.logprobs,
            name=mode.name,
        )

    def tuner(self, sampling: SamplingParams) -> PlanTuner:
        """What `auto` knows of requests like this. The first of a kind (greedy, sampled, truncated) times passes for a
        second."""
        return self._worker.call(lambda: self._tuners.get(sampling.sampler))

    def warm_up(self, *samplings: SamplingParams) -> None:
        """Time what `auto` wants to know of such requests (of greedy and sampled ones where none are given) and of
        every batch size, rather than while the first ones wait."""
        for sampling in samplings or (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)):
            for batch in self.backend.capabilities.batch_sizes:
                self._worker.call(partial(self._tuners.get, sampling.sampler, batch))

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests: it was closed, or its worker failed."""
        return self._worker.closed

    def usage(self) -> Usage:
        """How many are running and waiting right now, and how much of the KV cache they take."""
        return self._scheduler.usage()

    def _submit(self, ids: Sequence[int], options: GenerateOptions, reader: TextStream | None) -> Decoding:
        sequence = Decoding(self.request(ids, options), reader)
        self._worker.submit(sequence)
        return sequence


def _close(worker: Worker, backend: Backend) -> None:
    worker.close(backend.close)


def _valid(text: str) -> str:
    """Python strings can hold halves of characters, for instance from an argument that was not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PassError(f"the prompt is not valid UTF-8 text at character {error.start}") from None
    return text


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise PassError(f"cannot read {path}: {error}; export the bundle again") from None


def load(
    bundle: str | Path,
    device: str = "auto",
    *,
    threads: int = 0,
    verify: bool = True,
    max_batch_size: int | None = 1,
    max_queue: int = MAX_QUEUE,
    capacity: int | None = None,
) -> Session:
    """Open a bundle; see `LoadOptions`. verify: check the hashes of its files."""
    options = LoadOptions(device, threads, max_batch_size, max_queue, capacity)
    path = Path(bundle)
    manifest = read_manifest(path)
    verify_files(path, manifest, hashes=verify)
    return open_session_of(path, manifest, options, verify=verify)


def open_session_of(
    path: Path, manifest: Manifest, options: LoadOptions, *, verify: bool = False, backend: Backend | None = None
) -> Session:
    """`load` with a manifest that was read, and its bundle's files verified, before. verify: engines' hashes. backend:
    one that is there already."""
    tokenizer = _load_tokenizer(path / TOKENIZER_FILE)
    bos, eos = manifest.model.bos_token_id, manifest.model.eos_token_ids
    template = load_chat_template(
        path,
        bos_token=tokenizer.id_to_token(bos) or "" if bos is not None else "",
        eos_token=tokenizer.id_to_token(eos[0]) or "" if eos else "",
    )
    backend = backend or open_backend(
        path,
        manifest,
        options.device,
        threads=options.threads,
        max_batch_size=options.max_batch_size,
        capacity=options.capacity,
        verify=verify,
    )
    return Session(manifest, backend, tokenizer, template, max_queue=options.max_queue)
