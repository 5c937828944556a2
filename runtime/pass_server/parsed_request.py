"""Checks requests, and makes of each the sequences to decode: token ids and options.

`RequestParser.tokenize` does all that needs no compiled constraint, `RequestParser.finish` the
rest. `Service.parse` calls both in threads, and waits for the constraints in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pass_runtime import (
    REQUEST_FIELDS,
    Constraint,
    GenerateOptions,
    PassError,
    Places,
    Request,
    SamplingParams,
    Session,
    TooManyConstraints,
)
from pass_server.api_error import ApiError, as_api_error
from pass_server.completions import (
    Echo,
    check_completion,
    completion_ids,
    echoes,
    prompt_list,
    prompt_logprobs,
)
from pass_server.fields import check_supported
from pass_server.schemas import (
    DEFAULT_TEMPERATURE,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ResponseFormat,
    StructuredOutputFields,
)
from pass_server.serve_options import ServeOptions
from pass_server.turns import ChatFormat, TurnFormat, chat_texts, template_messages

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat has no such limit."""
Compiling = tuple[tuple[Future[Any], str], ...]
"""For each constraint that is being compiled, a future and the field to which errors belong."""


@dataclass(frozen=True)
class ParsedRequest:
    """A request that was checked: the sequences to decode, and what the answer makes of them.

    requests: one for each sequence, `per_prompt` for each prompt in the order of the prompts. n:
    how many sequences of each prompt the answer has, the likeliest ones. arrived:
    `time.perf_counter` when the request came. echo: each prompt, if the answer repeats it first;
    else (). turn_format: how to read reasoning and calls; None if there is only text.
    constraint_kind: for the metrics, `Constraint.kind`, or "tools" if only calls are constrained;
    None without a constraint. places: those reserved for `requests` in slots and queue.
    """

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
        """The number of tokens of all prompts, each counted once, however many its sequences."""
        return sum(len(request.prompt_ids) for request in self.requests[:: self.per_prompt])


@dataclass(frozen=True)
class TokenizedRequest:
    """A request between `RequestParser.tokenize` and `finish`. prompts: the token ids of each.
    options: those of every sequence, without the seed and what depends on the prompt's length. The
    other fields are those of `ParsedRequest`."""

    request: GenerationRequest
    prompts: list[list[int]]
    options: GenerateOptions
    compiling: Compiling
    arrived: float
    turn_format: TurnFormat | None
    constraint_kind: str | None


@contextmanager
def constraint_errors(param: str) -> Iterator[None]:
    """Turn the PassError of a `with` block that compiles a constraint into an ApiError. param: the
    field with the constraint."""
    try:
        yield
    except TooManyConstraints as error:
        raise as_api_error(error) from None
    except PassError as error:
        raise ApiError(str(error), param=param) from None


class RequestParser:
    """Parses the requests of one server. Any thread may call its methods, which raise ApiError if a
    request is invalid or exceeds a limit."""

    def __init__(self, session: Session, serve_options: ServeOptions) -> None:
        self._session, self._serve_options = session, serve_options
        self._chat_format = ChatFormat(session, serve_options)

    def tokenize(
        self, request: GenerationRequest, arrived: float, salt: str = ""
    ) -> TokenizedRequest:
        """Check a request, tokenize its prompts, and begin to compile its constraints, which may
        take seconds.

        salt: the client's, whose prompts share K/V only with prompts of the same salt. The salts
        of all clients must have one length: the request's `cache_salt` is appended, and could
        otherwise turn the salt of one client into that of another.
        """
        self._check_fields(request)
        try:
            turn_format = None
            if isinstance(request, ChatRequest):
                prompts = [self.chat_ids(request)]
                turn_format = self._chat_format.turn_format(request, prompts[0])
            else:
                assert isinstance(request, CompletionRequest)
                prompts = completion_ids(self._session, request)
            per_prompt, limit = count_per_prompt(request), self._serve_options.max_sequences
            if len(prompts) * per_prompt > limit:
                raise ApiError(
                    f"{len(prompts)} prompts with {per_prompt} sequences each are more than "
                    f"{limit}, the limit of this server; send fewer",
                    param="n",
                )
            compiling, constraint, kind = self._constraint(turn_format, request)
            options = _options(request, constraint, salt)
            if isinstance(request, CompletionRequest) and request.suffix and not request.ignore_eos:
                ends = (*options.stop_token_ids, *self._session.infill_end_ids)
                options = replace(options, stop_token_ids=ends)
            if turn_format is not None:
                options = replace(options, shown_special_tokens=turn_format.marker_tokens)
        except PassError as error:
            raise ApiError(str(error)) from None
        if not self._serve_options.client_plans:
            _check_no_plan(request, options)
        return TokenizedRequest(request, prompts, options, compiling, arrived, turn_format, kind)

    def finish(self, tokenized: TokenizedRequest, places: Places | None = None) -> ParsedRequest:
        """Make the sequences of a request whose constraints are compiled."""
        request, per_prompt = tokenized.request, count_per_prompt(tokenized.request)
        sequences: list[Request] = []
        for ids in tokenized.prompts:
            max_tokens = self._max_new_tokens(request, len(ids))
            min_tokens = request.min_tokens or 0
            if min_tokens > max_tokens:
                problem = f"min_tokens is {min_tokens}, but must be at most {max_tokens}"
                raise ApiError(problem, param="min_tokens")
            options = replace(
                tokenized.options,
                max_new_tokens=max_tokens,
                min_tokens=min_tokens,
                reuse_prefix=self._serve_options.reuse_prefix,
            )
            try:
                first = self._session.request(ids, options)
            except PassError as error:
                raise ApiError(str(error)) from None
            # All sequences of a prompt have the same tuple of ids, by which they share its K/V.
            sequences += [
                replace(first, sampling=_with_seed(first.sampling, i)) for i in range(per_prompt)
            ]
        is_completion = isinstance(request, CompletionRequest)
        return ParsedRequest(
            tuple(sequences),
            n=_int_or_1(request.n),
            arrived=tokenized.arrived,
            per_prompt=per_prompt,
            echo=echoes(self._session, request) if is_completion else (),
            turn_format=tokenized.turn_format,
            constraint_kind=tokenized.constraint_kind,
            places=places,
        )

    def chat_ids(self, request: ChatRequest) -> list[int]:
        """Return the token ids of a chat's prompt."""
        variables = self._chat_format.variables(request)
        messages = template_messages(request, calls=self._chat_format.calls is not None)
        allowed = self._serve_options.special_tokens
        return self._session.encode_chat(
            messages, allow_special_tokens=allowed, variables=variables
        )

    def _check_fields(self, request: GenerationRequest) -> None:
        check_supported(request)
        if isinstance(request, CompletionRequest):
            check_completion(request)
        if request.stream_options is not None and not request.stream:
            problem = "stream_options are for streams: set stream to true"
            raise ApiError(problem, param="stream_options")

    def _constraint(
        self, turn_format: TurnFormat | None, request: GenerationRequest
    ) -> tuple[Compiling, Constraint | None, str | None]:
        """Begin to compile a request's constraints. Return (`compiling` of TokenizedRequest, the
        constraint of each sequence, `constraint_kind` of ParsedRequest).

        If a chat's turn may have reasoning or calls, its constraint differs from the requested one,
        which is then compiled too, so that an error in it names its field.
        """
        param, requested = _requested_constraint(request) or ("tools", None)
        constraint = requested
        if isinstance(request, ChatRequest):
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

    def _max_new_tokens(self, request: GenerationRequest, prompt_length: int) -> int:
        """Return `max_new_tokens` of the sequences of a prompt with this length in tokens. Raises
        ApiError if the prompt, the text or both together may get too long."""
        context, is_chat = self._session.capacity, isinstance(request, ChatRequest)
        max_prompt = min(self._serve_options.max_prompt_tokens or context, context - 1)
        if prompt_length > max_prompt:
            raise ApiError(
                f"the prompt has {prompt_length} tokens, but may have {max_prompt} on this server; "
                "shorten it",
                param="messages" if is_chat else "prompt",
                code="context_length_exceeded",
            )
        param, wanted = "max_tokens", request.max_tokens
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            if wanted not in (None, request.max_completion_tokens):
                problem = "max_tokens and max_completion_tokens differ: give one"
                raise ApiError(problem, param="max_tokens")
            param, wanted = "max_completion_tokens", request.max_completion_tokens
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


def count_sequences(request: GenerationRequest) -> int:
    """Return the number of sequences of a request, even if it is invalid; at least 1."""
    prompts = len(prompt_list(request.prompt)) if isinstance(request, CompletionRequest) else 1
    return count_per_prompt(request) * prompts or 1


def count_per_prompt(request: GenerationRequest) -> int:
    """Return the number of sequences to generate for each prompt."""
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    return max(_int_or_1(best_of), _int_or_1(request.n))


def _int_or_1(value: Any) -> int:
    """Return `value`, or 1 if it is no int: a `null_or` field may hold anything until checked."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 1


def prompt_bytes(request: GenerationRequest) -> int:
    """Return the UTF-8 bytes of the longest text prompt with its suffix; a chat with its tools is
    one prompt."""
    if isinstance(request, ChatRequest):
        return sum(map(_utf8_bytes, chat_texts(request)))
    assert isinstance(request, CompletionRequest)
    texts = [each for each in prompt_list(request.prompt) if isinstance(each, str)]
    return max(map(_utf8_bytes, texts), default=0) + _utf8_bytes(request.suffix or "")


def _utf8_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _requested_constraint(request: StructuredOutputFields) -> tuple[str, Constraint] | None:
    """Return (the field that constrains the text, its constraint), or None without such a field.
    Raises ApiError if there are several, or if the constraint is invalid."""
    constraints = dict(_constraint_fields(request))
    if len(constraints) > 1:
        raise ApiError(f"give only one of {' and '.join(constraints)}", param=[*constraints][-1])
    for param, fields in constraints.items():
        try:
            return param, Constraint(**fields)
        except PassError as error:
            raise ApiError(str(error), param=param) from None
    return None


def _constraint_fields(request: StructuredOutputFields) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, keyword arguments for `Constraint`) of each field that constrains the text."""
    if request.response_format is not None and request.response_format.type != "text":
        yield "response_format", _format_fields(request.response_format)
    if (outputs := request.structured_outputs) is not None:
        values = {name: getattr(outputs, name) for name in type(outputs).model_fields}
        fields = {name: value for name, value in values.items() if value not in (None, False)}
        yield "structured_outputs", fields
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(request, f"guided_{name}")) is not None:
            yield f"guided_{name}", {"json_schema" if name == "json" else name: value}


def _format_fields(text_format: ResponseFormat) -> dict[str, Any]:
    if text_format.type == "json_object":
        return {"json_object": True}
    if text_format.json_schema is None or text_format.json_schema.json_schema is None:
        problem = "a response format of type json_schema needs json_schema.schema"
        raise ApiError(problem, param="response_format")
    return {"json_schema": text_format.json_schema.json_schema}


def _options(
    request: GenerationRequest, constraint: Constraint | None, salt: str
) -> GenerateOptions:
    """Return `options` of TokenizedRequest."""
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
    values = {each.name: getattr(request, each.http) for each in REQUEST_FIELDS if each.http}
    fields = {"temperature": DEFAULT_TEMPERATURE} | {
        name: value for name, value in values.items() if value is not None
    }
    fields.pop("min_tokens", None)  # `finish` adds it, with max_new_tokens, which bounds it
    if "seed" in fields:
        fields["seed"] %= 1 << 64
    biases = fields.get("logit_bias", {})
    fields["logit_bias"] = {int(token): bias for token, bias in biases.items()}
    fields |= {"plan": plan, "cache_salt": salt + (request.cache_salt or "")}
    options = GenerateOptions(logprobs=_logprobs(request), constraint=constraint)
    if isinstance(request, CompletionRequest):
        options = replace(options, prompt_logprobs=prompt_logprobs(request))
    return options.with_fields(**fields)


def _check_no_plan(request: GenerationRequest, options: GenerateOptions) -> None:
    """Raise ApiError if the request names a plan or asks for plain decoding."""
    if options.plan == "auto" and options.lookahead != 0:
        return
    param = "lookahead"
    if request.plan or request.speculative is False:
        param = "plan" if request.plan else "speculative"
    problem = "this server decides how to decode: leave out plan, speculative, lookahead and draft"
    raise ApiError(problem, param=param, code="unsupported_parameter")


def _logprobs(request: GenerationRequest) -> int | None:
    """Return `GenerateOptions.logprobs`."""
    if isinstance(request, CompletionRequest):
        if request.logprobs is None and count_per_prompt(request) > _int_or_1(request.n):
            return 0  # to choose the likeliest sequences
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError("top_logprobs need logprobs to be true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _with_seed(sampling: SamplingParams, i: int) -> SamplingParams:
    """Return the sampling of sequence i of a prompt: seeds are consecutive numbers."""
    return sampling if i == 0 else replace(sampling, seed=((sampling.seed or 0) + i) % (1 << 64))
