"""A loaded bundle: `load(path)`, then `generate`, `generate_ids` or `chat`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from pass_runtime.backends.base import Backend
from pass_runtime.backends.open import open_backend
from pass_runtime.bundle.manifest import TOKENIZER_FILE, Manifest, read_manifest, verify_files
from pass_runtime.bundle.plan import MODES, make_cycle
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.decode.draft_policy import DRAFTS, Steering, make_steering
from pass_runtime.decode.loop import Request, TokenStream
from pass_runtime.errors import PassError
from pass_runtime.text.chat import ChatTemplate, Message, load_chat_template
from pass_runtime.text.stream import Generation
from pass_runtime.tuning.pass_times import measure, probe_plans
from pass_runtime.tuning.tuner import SAMPLED, AutoSteering, Chooser

PLANS = (*MODES, "fused:G0,G1,...", "auto")
"""What `plan` may be; the sizes G0, G1, ... are those of a fused plan's look-ahead groups."""


@dataclass(frozen=True)
class GenerateOptions:
    """Everything a request may ask for.

    plan: "ar", "two-pass", "fused", "fused:4,3,2,2,1" (sizes of its groups), or "auto": whatever is fastest here.
    lookahead: drafts per round, at most the bundle's L (None: all of them; 0: plain decoding).
    draft: where drafts come from, one of `decode.draft_policy.DRAFTS` (None: "both" for auto, else "lookahead").
    stop: strings that end the text and are not part of it. ignore_eos: go on after an end-of-sequence token.
    reuse_prefix: keep the K/V that the last request on this session has in common with this one.
    """

    max_new_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    plan: str = "auto"
    lookahead: int | None = None
    draft: str | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    reuse_prefix: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise PassError(f"max-new-tokens must be at least 1, not {self.max_new_tokens}")
        if self.plan != "auto":
            make_cycle(self.plan, 1)  # refuses what is no plan
        if self.draft not in (None, *DRAFTS):
            raise PassError(f"unknown draft source {self.draft!r}: choose one of {', '.join(DRAFTS)}")


class Session:
    """One model and one sequence at a time: a new request ends the one before it."""

    def __init__(
        self, manifest: Manifest, backend: Backend, tokenizer: Tokenizer, chat_template: ChatTemplate | None = None
    ) -> None:
        self.manifest, self.backend, self.tokenizer = manifest, backend, tokenizer
        self.chat_template = chat_template
        self._choosers: dict[str, Chooser] = {}  # by sampler

    def close(self) -> None:
        """Give the device's memory back; the session cannot be used afterwards."""
        self.backend.close()

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
        return list(self.tokenizer.encode(_valid(self.chat_template.render(messages)), add_special_tokens=False).ids)

    def generate(self, prompt: str | Sequence[int], options: GenerateOptions | None = None) -> Generation:
        """Text for `prompt` (a string, or token ids). Iterate over the result for pieces as they come."""
        options = options or GenerateOptions()
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return Generation(self._start(ids, options), ids, self.tokenizer, options.stop)

    def chat(self, messages: Sequence[Message], options: GenerateOptions | None = None) -> Generation:
        """The assistant's next turn."""
        return self.generate(self.encode_chat(messages), options)

    def generate_ids(self, prompt_ids: Sequence[int], options: GenerateOptions | None = None) -> TokenStream:
        """Tokens without text: iterate for the tokens of each pass. Stop strings need `generate`."""
        options = options or GenerateOptions()
        if options.stop:
            raise PassError("stop strings need text: use generate, or stop token ids")
        return self._start(list(prompt_ids), options)

    def steering(self, options: GenerateOptions) -> Steering:
        """The passes that `options` ask for on this bundle."""
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
        if options.plan == "auto" and lookahead:
            draft = options.draft or "both"
            return AutoSteering(
                self.chooser(options.sampling), lookahead, rows=draft != "ngram", text=draft != "lookahead"
            )
        steering = make_steering("ar" if options.plan == "auto" else options.plan, lookahead, options.draft)
        if steering.lookahead > available:
            raise PassError(f"{options.plan} has more drafts than the {available} the bundle was exported with")
        return steering

    def chooser(self, sampling: SamplingParams) -> Chooser:
        """What `auto` knows. The first request of a kind (greedy, sampled, truncated) times passes for a second."""
        kind, lookahead = sampling.sampler, self.manifest.lookahead
        if kind not in self._choosers:
            probes = [plan for plan in probe_plans(lookahead.length) if self.backend.capabilities.allows([plan])]
            times = measure(self.backend, sampling, probes)
            discount = 1.0 if kind == "greedy" else SAMPLED
            self._choosers[kind] = Chooser(
                times,
                lookahead.length,
                lookahead.acceptance_per_position,
                discount,
                exactly=self.backend.capabilities.lookahead,
                follow=True,
            )
        return self._choosers[kind]

    def _start(self, prompt_ids: list[int], options: GenerateOptions) -> TokenStream:
        model = self.manifest.model
        if not prompt_ids:
            raise PassError("the prompt has no tokens")
        if bad := [token for token in prompt_ids if not 0 <= token < model.vocab_size]:
            raise PassError(f"token id {bad[0]} is not in the vocabulary of {model.vocab_size}")
        request = Request(
            prompt_ids=tuple(prompt_ids),
            steering=self.steering(options),
            sampling=options.sampling,
            max_new_tokens=options.max_new_tokens,
            stop_token_ids=frozenset() if options.ignore_eos else frozenset(model.eos_token_ids),
            reuse_prefix=options.reuse_prefix,
        )
        return TokenStream(self.backend, request)


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


def load(bundle: str | Path, device: str = "auto", *, threads: int = 0, verify: bool = True) -> Session:
    """Open a bundle. `threads`: 0 lets ONNX Runtime choose; `verify`: check file hashes.

    device: cpu or cuda (ONNX Runtime), tensorrt or tensorrt-rtx (the bundle's engines), or auto: the bundle's engines
    where some fit this machine, else CUDA, else the CPU.
    Raises PassError where the bundle is not whole, not ours, or of another version.
    """
    path = Path(bundle)
    manifest = read_manifest(path)
    verify_files(path, manifest, hashes=verify)
    return open_session_of(path, manifest, device, threads=threads, verify=verify)


def open_session_of(
    path: Path, manifest: Manifest, device: str = "auto", *, threads: int = 0, verify: bool = False
) -> Session:
    """`load` with a manifest that was read, and its bundle's files verified, before. verify: engines' hashes."""
    tokenizer = _load_tokenizer(path / TOKENIZER_FILE)
    bos, eos = manifest.model.bos_token_id, manifest.model.eos_token_ids
    template = load_chat_template(
        path,
        bos_token=tokenizer.id_to_token(bos) or "" if bos is not None else "",
        eos_token=tokenizer.id_to_token(eos[0]) or "" if eos else "",
    )
    return Session(manifest, open_backend(path, manifest, device, threads, verify=verify), tokenizer, template)
