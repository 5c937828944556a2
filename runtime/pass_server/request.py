"""Checks requests, and makes of each the sequences to decode: token ids and options."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pass_runtime import (
    REQUEST_OPTIONS,
    Constraint,
    Detokenizer,
    GenerateOptions,
    PassError,
    Places,
    Request,
    Session,
    TooManyConstraints,
)
from pass_server import schemas
from pass_server.api_error import ApiError, as_api_error, not_supported
from pass_server.serve_options import ServeOptions
from pass_server.turns import ChatFormat, TurnFormat, chat_texts, template_messages

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat has no such limit."""
Compiling = tuple[tuple[Future[Any], str], ...]
"""For each constraint that is being compiled, a future and the field to which errors belong."""


@dataclass(frozen=True)
class Echo:
    """A prompt that the answer repeats. offsets: where in its text each of its tokens begins."""

    text: str
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class ParsedRequest:
    """A request that was checked: the sequences to decode, and what the answer makes of them.

    requests: one for each sequence, `per_prompt` for each prompt in the order of the prompts. n:
    how many sequences of each prompt the answer has, the likeliest ones. arrived:
    `time.perf_counter` when the request came. echo: each prompt, if the answer repeats it first.
    turn_format: None if there is only text. constraint_kind: for the metrics, `Constraint.kind`, or
    "tools" if only calls are constrained. places: those reserved in slots and queue."""

    requests: tuple[Request, ...]
    n: int
    arrived: float
    per_prompt: int = 1
    echo: tuple[Echo, ...] = ()
    turn_format: TurnFormat | None = None
    constraint_kind: str | None = None
    places: Places | None = None

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(len(request.prompt_ids) for request in self.requests[:: self.per_prompt])


@dataclass(frozen=True)
class TokenizedRequest:
    """A request between `RequestParser.tokenize` and `finish`. options: those of every sequence,
    without the seed and what depends on the prompt's length. parsed: without sequences."""

    request: schemas.GenerationRequest
    prompts: list[list[int]]
    options: GenerateOptions
    compiling: Compiling
    parsed: ParsedRequest


@contextmanager
def constraint_errors(param: str) -> Iterator[None]:
    """Turn the PassError of a block that compiles a constraint into an ApiError about `param`."""
    try:
        yield
    except TooManyConstraints as error:
        raise as_api_error(error) from None
    except PassError as error:
        raise ApiError(str(error), param=param) from None


class RequestParser:
    """Parses the requests of one server: first `tokenize`, and `finish` once constraints are
    compiled. Any thread may call the methods, which raise ApiError if a request is invalid."""

    def __init__(self, session: Session, serve_options: ServeOptions) -> None:
        self._session, self._serve_options = session, serve_options
        self._chat_format = ChatFormat(session, serve_options)

    def tokenize(
        self, request: schemas.GenerationRequest, arrived: float, salt: str = ""
    ) -> TokenizedRequest:
        """Check a request, tokenize its prompts, and begin to compile its constraints.

        salt: the client's, whose prompts share K/V only with prompts of the same salt. The salts
        of all clients must have one length: the request's `cache_salt` is appended, and could
        otherwise turn the salt of one client into that of another."""
        if request.stream_options is not None and not request.stream:
            problem = "stream_options are for streams: set stream to true"
            raise ApiError(problem, param="stream_options")
        try:
            turn_format = None
            end_ids: tuple[int, ...] = ()
            marker_ids: tuple[int, ...] = ()
            if isinstance(request, schemas.ChatRequest):
                prompts = [self.chat_ids(request)]
                if (turn_format := self._chat_format.turn_format(request, prompts[0])) is not None:
                    marker_ids = turn_format.marker_tokens
            else:
                assert isinstance(request, schemas.CompletionRequest)
                _check_completion(request)
                prompts = _completion_ids(self._session, request)
                if request.suffix and not request.ignore_eos:
                    end_ids = self._session.infill_end_ids
            per_prompt, limit = count_per_prompt(request), self._serve_options.max_sequences
            if len(prompts) * per_prompt > limit:
                raise ApiError(
                    f"{len(prompts)} prompts with {per_prompt} sequences each are more than "
                    f"{limit}, the limit of this server; send fewer",
                    param="n",
                )
            compiling, constraint, kind = self._constraint(turn_format, request)
            options = _options(request, constraint, salt)
            options = replace(
                options,
                stop_token_ids=(*options.stop_token_ids, *end_ids),
                shown_special_tokens=marker_ids,
                reuse_prefix=self._serve_options.reuse_prefix,
            )
        except PassError as error:
            raise ApiError(str(error)) from None
        if not self._serve_options.client_plans:
            _check_no_plan(request, options)
        parsed = ParsedRequest((), request.n or 1, arrived, per_prompt, (), turn_format, kind)
        return TokenizedRequest(request, prompts, options, compiling, parsed)

    def finish(self, tokenized: TokenizedRequest, places: Places | None = None) -> ParsedRequest:
        request, per_prompt = tokenized.request, tokenized.parsed.per_prompt
        sequences: list[Request] = []
        for ids in tokenized.prompts:
            max_tokens = self._max_new_tokens(request, len(ids))
            min_tokens = request.min_tokens or 0
            if min_tokens > max_tokens:
                problem = f"min_tokens is {min_tokens}, but must be at most {max_tokens}"
                raise ApiError(problem, param="min_tokens")
            options = replace(tokenized.options, max_new_tokens=max_tokens, min_tokens=min_tokens)
            try:
                first = self._session.request(ids, options)
            except PassError as error:
                raise ApiError(str(error)) from None
            # All sequences of a prompt have the same tuple of ids, by which they share its K/V.
            seed = first.sampling.seed or 0
            sequences += [first] + [
                replace(first, sampling=replace(first.sampling, seed=(seed + i) % (1 << 64)))
                for i in range(1, per_prompt)
            ]
        echo: tuple[Echo, ...] = ()
        if isinstance(request, schemas.CompletionRequest) and request.echo:
            echo = tuple(_echo(self._session, each) for each in prompt_list(request.prompt))
        return replace(tokenized.parsed, requests=tuple(sequences), echo=echo, places=places)

    def chat_ids(self, request: schemas.ChatRequest) -> list[int]:
        variables = self._chat_format.variables(request)
        messages = template_messages(request, calls=self._chat_format.calls is not None)
        return self._session.encode_chat(
            messages, allow_special_tokens=self._serve_options.special_tokens, variables=variables
        )

    def _constraint(
        self, turn_format: TurnFormat | None, request: schemas.GenerationRequest
    ) -> tuple[Compiling, Constraint | None, str | None]:
        """Begin to compile a request's constraints. Return (`compiling` of TokenizedRequest, the
        constraint of each sequence, `constraint_kind` of ParsedRequest).

        If a chat's turn may have reasoning or calls, its constraint differs from the requested one,
        which is then compiled too, so that an error in it names its field."""
        param, requested = _requested_constraint(request)
        constraint = requested
        if isinstance(request, schemas.ChatRequest):
            constraint = self._chat_format.constraint(request, turn_format, requested)
        if constraint is None:
            return (), None, None
        if request.ignore_eos:
            problem = f"{param} decides where the text ends: leave out ignore_eos"
            raise ApiError(problem, param="ignore_eos")
        compiling = []
        for each in dict.fromkeys((requested, constraint)):  # once if they are equal
            if each is not None:
                field = param if each is requested else "tools"
                with constraint_errors(field):
                    compiling.append((self._session.prepare(each), field))
        return tuple(compiling), constraint, "tools" if requested is None else requested.kind

    def _max_new_tokens(self, request: schemas.GenerationRequest, prompt_length: int) -> int:
        """Raises ApiError if the prompt, the text or both together may get too long."""
        context, is_chat = self._session.capacity, isinstance(request, schemas.ChatRequest)
        max_prompt = min(self._serve_options.max_prompt_tokens or context, context - 1)
        if prompt_length > max_prompt:
            raise ApiError(
                f"the prompt has {prompt_length} tokens, but may have {max_prompt} on this server; "
                "shorten it",
                param=request.path("messages") if is_chat else "prompt",
                code="context_length_exceeded",
            )
        param, wanted = "max_tokens", request.max_tokens
        if isinstance(request, schemas.ChatRequest) and request.max_completion_tokens is not None:
            if wanted not in (None, request.max_completion_tokens):
                problem = "max_tokens and max_completion_tokens differ: give one"
                raise ApiError(problem, param="max_tokens")
            param = request.path("max_completion_tokens")
            wanted = request.max_completion_tokens
        limit = min(self._serve_options.max_output_tokens or context, context)
        if wanted is None:
            default = context if is_chat else DEFAULT_COMPLETION_TOKENS
            return min(limit, context - prompt_length, default)
        if wanted > limit:
            problem = f"{param} is {wanted}, but must be at most {limit} on this server"
            raise ApiError(problem, param=param)
        if prompt_length + wanted > context:
            raise ApiError(
                f"the prompt has {prompt_length} tokens and {param} is {wanted}: together more "
                f"than the context of {context}",
                param=param,
                code="context_length_exceeded",
            )
        return wanted


def prompt_list(prompt: Any) -> list[str | list[int]]:
    """Return the prompts of the field `prompt`: text or token ids, of one prompt or of several."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def count_per_prompt(request: schemas.GenerationRequest) -> int:
    best_of = request.best_of if isinstance(request, schemas.CompletionRequest) else None
    return max(best_of or 1, request.n or 1)


def count_sequences(request: schemas.GenerationRequest) -> int:
    """Return the number of sequences of a request, even if it is invalid; at least 1."""
    prompts = (
        len(prompt_list(request.prompt)) if isinstance(request, schemas.CompletionRequest) else 1
    )
    return count_per_prompt(request) * prompts or 1


def prompt_bytes(request: schemas.GenerationRequest) -> int:
    """Return the UTF-8 bytes of the longest text prompt with its suffix."""
    if isinstance(request, schemas.ChatRequest):
        return sum(len(text.encode(errors="replace")) for text in chat_texts(request))
    assert isinstance(request, schemas.CompletionRequest)
    texts = [each for each in prompt_list(request.prompt) if isinstance(each, str)]
    sizes = [len(text.encode(errors="replace")) for text in (*texts, request.suffix or "")]
    return max(sizes[:-1], default=0) + sizes[-1]


def _check_completion(request: schemas.CompletionRequest) -> None:
    n, best_of = request.n or 1, request.best_of
    if request.suffix and request.echo and request.logprobs is not None:
        problem = "a prompt with a suffix has no log-probabilities: leave out echo or logprobs"
        raise ApiError(problem, param="echo")
    if best_of is not None and best_of < n:
        problem = f"best_of is {best_of}, and n is {n}: it must be at least n"
        raise ApiError(problem, param="best_of")
    if request.stream and best_of is not None and best_of > n:
        problem = "best_of above n cannot be streamed: leave out stream or best_of"
        raise ApiError(problem, param="best_of")
    if request.max_tokens == 0 and not request.echo:
        problem = "with max_tokens 0 there is no answer: set echo, or max_tokens to 1 or more"
        raise ApiError(problem, param="max_tokens")


def _completion_ids(session: Session, request: schemas.CompletionRequest) -> list[list[int]]:
    prompts: list[list[int]] = []
    for prompt in prompt_list(request.prompt):
        if request.suffix:
            if not session.infill_end_ids:
                why = "this model was trained to continue a text, not to fill a gap before a suffix"
                raise not_supported("suffix", request.suffix, why)
            if not isinstance(prompt, str):
                problem = "with a suffix the prompt must be text, not token ids"
                raise ApiError(problem, param="prompt")
            prompts.append(session.encode_infill(prompt, request.suffix))
        else:
            prompts.append(session.encode(prompt) if isinstance(prompt, str) else prompt)
    vocabulary = session.manifest.model.vocab_size
    if not prompts or not all(prompts):
        raise ApiError("the prompt has no tokens", param="prompt")
    if any(not 0 <= token < vocabulary for ids in prompts for token in ids):
        problem = f"a token id of the prompt is not in the vocabulary of {vocabulary}"
        raise ApiError(problem, param="prompt")
    return prompts


def _echo(session: Session, prompt: str | list[int]) -> Echo:
    if isinstance(prompt, str):
        # An empty prompt becomes the start token.
        spans = session.tokenizer.encode(prompt).offsets or [(0, 0)]
        # Tokens that the tokenizer adds are at 0, also those at the end.
        return Echo(prompt, tuple(accumulate((start for start, _ in spans), max)))
    detokenizer, starts = Detokenizer(session.vocabulary), list[int]()
    for token in prompt:
        detokenizer.push(token)
        starts.append(detokenizer.token_start)
    return Echo(session.decode(prompt, skip_special_tokens=True), tuple(starts))


def _requested_constraint(request: schemas.GenerationRequest) -> tuple[str, Constraint | None]:
    """Return (the field that constrains the text, its constraint)."""
    constraints: dict[str, dict[str, Any]] = {}
    if request.response_format is not None and request.response_format.type != "text":
        name = request.path("response_format")
        constraints[name] = _format_fields(request.response_format)
    if request.structured_outputs is not None:
        values = dict(request.structured_outputs)
        constraints["structured_outputs"] = {
            name: value for name, value in values.items() if value not in (None, False)
        }
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(request, f"guided_{name}")) is not None:
            constraints[f"guided_{name}"] = {"json_schema" if name == "json" else name: value}
    if len(constraints) > 1:
        raise ApiError(f"give only one of {' and '.join(constraints)}", param=[*constraints][-1])
    for param, fields in constraints.items():
        try:
            return param, Constraint(**fields)
        except PassError as error:
            raise ApiError(str(error), param=param) from None
    return "tools", None


def _format_fields(text_format: schemas.ResponseFormat) -> dict[str, Any]:
    if text_format.type == "json_object":
        return {"json_object": True}
    if text_format.json_schema is None or text_format.json_schema.json_schema is None:
        problem = "a response format of type json_schema needs json_schema.schema"
        raise ApiError(problem, param="response_format")
    return {"json_schema": text_format.json_schema.json_schema}


def _options(
    request: schemas.GenerationRequest, constraint: Constraint | None, salt: str
) -> GenerateOptions:
    plan = request.plan or "auto"
    if request.speculative is False:
        if request.plan not in (None, "ar"):
            problem = f"speculative false means plan ar, but plan is {plan}: leave out one"
            raise ApiError(problem, param="speculative")
        plan = "ar"
    elif request.speculative and plan == "ar":
        problem = "speculative is true, but plan ar does not speculate: leave out one"
        raise ApiError(problem, param="speculative")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if any(stop.encode(errors="replace").decode() != stop for stop in stops):  # a lone surrogate
        raise ApiError("stop is not valid Unicode text", param="stop")
    if isinstance(request, schemas.CompletionRequest):
        logprobs, prompt_logprobs = request.logprobs, request.logprobs if request.echo else None
        if logprobs is None and count_per_prompt(request) > (request.n or 1):
            logprobs = 0  # to choose the likeliest sequences
        if request.echo and request.max_tokens == 0:
            prompt_logprobs = request.logprobs or 0  # which is needed to write no token
    else:
        assert isinstance(request, schemas.ChatRequest)
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError("top_logprobs need logprobs to be true", param="top_logprobs")
        logprobs = request.top_logprobs or 0 if request.logprobs else None
        prompt_logprobs = None
    fields: dict[str, Any] = {"temperature": schemas.DEFAULT_TEMPERATURE}
    for each in REQUEST_OPTIONS.values():
        if each.http and (value := getattr(request, each.http)) is not None:
            fields[each.name] = value
    fields.pop("min_tokens", None)  # `finish` adds it, with max_new_tokens, which bounds it
    if "seed" in fields:
        fields["seed"] %= 1 << 64
    biases = fields.get("logit_bias", {})
    fields["logit_bias"] = {int(token): bias for token, bias in biases.items()}
    fields |= {"plan": plan, "cache_salt": salt + (request.cache_salt or "")}
    options = GenerateOptions(
        logprobs=logprobs, prompt_logprobs=prompt_logprobs, constraint=constraint
    )
    return options.with_fields(**fields)


def _check_no_plan(request: schemas.GenerationRequest, options: GenerateOptions) -> None:
    if options.plan == "auto" and options.lookahead != 0:
        return
    param = "lookahead"
    if request.plan or request.speculative is False:
        param = "plan" if request.plan else "speculative"
    problem = "this server decides how to decode: leave out plan, speculative, lookahead and draft"
    raise ApiError(problem, param=param, code="unsupported_parameter")
