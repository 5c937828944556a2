"""Checks and parses requests of the API: prompts become token ids, fields the options of each sequence."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pass_runtime import (
    REQUEST_FIELDS,
    Constraint,
    GenerateOptions,
    PassError,
    Request,
    SamplingParams,
    Session,
    TooManyConstraints,
)
from pass_server.api_error import ApiError, as_api_error, not_supported
from pass_server.fields import unsupported_field
from pass_server.schemas import ChatRequest, CompletionRequest, GenerationRequest, constraint_of
from pass_server.serve_options import ServeOptions
from pass_server.turns import ChatFormat, TurnFormat, content_texts, other_prompt_texts, template_messages

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat has no such limit."""


@dataclass(frozen=True)
class ParsedRequest:
    """requests: `per_prompt` for each prompt, in the order of the prompts. The likeliest `n` of each prompt are the
    choices of the answer.

    arrived: `time.perf_counter` when the request came, before its prompts were tokenized. echo: the text of each
    prompt, if its choices begin with it; () if not. turn_format: how to read reasoning and calls; None if there is only
    text. constraint_kind: `Constraint.kind`, "tools" if only tool calls are constrained; None without a constraint.
    """

    requests: tuple[Request, ...]
    n: int
    arrived: float
    per_prompt: int = 1
    echo: tuple[str, ...] = ()
    turn_format: TurnFormat | None = None
    constraint_kind: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """The sum over all prompts. A prompt counts once, however many sequences it has."""
        return sum(len(request.prompt_ids) for request in self.requests[:: self.per_prompt])


@dataclass(frozen=True)
class TokenizedRequest:
    """A request whose constraints are being compiled. compiling: for each constraint, a future and the field that it
    comes from. finish: returns the parsed request; to be called after all these futures are done."""

    compiling: tuple[tuple[Future[Any], str], ...]
    finish: Callable[[], ParsedRequest]


@contextmanager
def constraint_errors(param: str) -> Iterator[None]:
    """Turns the errors of the block, which compiles the constraint of the field `param`, into ApiErrors."""
    try:
        yield
    except TooManyConstraints as error:
        raise as_api_error(error) from None
    except PassError as error:
        raise ApiError(str(error), param=param) from None


def tokenize_request(
    session: Session, limits: ServeOptions, request: GenerationRequest, arrived: float | None = None, salt: str = ""
) -> TokenizedRequest:
    """Check a request, tokenize its prompts, and begin to compile its constraints, which may take seconds. salt: keeps
    the client's cached prompts apart from those of others. All clients' salts have one length: `cache_salt` is
    appended, and must not turn one into another. Raises ApiError if the request is invalid."""
    arrived = time.perf_counter() if arrived is None else arrived
    if (name := unsupported_field(request)) is not None:
        raise not_supported(name, getattr(request, name))
    if isinstance(request, CompletionRequest):
        _check_completion(request)
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options are for streams: set stream to true", param="stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise not_supported("stream_options.include_obfuscation", True)
    try:
        chat_format = ChatFormat(session, limits) if isinstance(request, ChatRequest) else None
        prompts = _prompts(session, limits, chat_format, request)
        turn_format = None
        if chat_format is not None and isinstance(request, ChatRequest):
            turn_format = chat_format.turn_format(request, prompts[0])
        n, per_prompt = _int_or_1(request.n), count_per_prompt(request)
        if len(prompts) * per_prompt > limits.max_sequences:
            raise ApiError(
                f"{len(prompts)} prompts with {per_prompt} sequences each are more than {limits.max_sequences}, "
                "the limit of this server; send fewer",
                param="n",
            )
        compiling, constraint, kind = _constraint(session, chat_format, turn_format, request)
        options = _options(request, constraint, salt)
    except PassError as error:
        raise ApiError(str(error)) from None

    def finish() -> ParsedRequest:
        try:
            requests = _requests(session, limits, request, prompts, options, per_prompt)
        except PassError as error:
            raise ApiError(str(error)) from None
        return ParsedRequest(requests, n, arrived, per_prompt, _echo(session, request), turn_format, kind)

    return TokenizedRequest(compiling, finish)


def _requests(
    session: Session,
    limits: ServeOptions,
    request: GenerationRequest,
    prompts: list[list[int]],
    options: GenerateOptions,
    per_prompt: int,
) -> tuple[Request, ...]:
    """`per_prompt` requests for each prompt."""
    if session.resolve(options).cycle is not None and not limits.client_plans:
        raise ApiError(
            "this server decides how to decode: leave out plan, speculative, lookahead and draft",
            param="plan" if request.plan else "speculative" if request.speculative is False else "lookahead",
            code="unsupported_parameter",
        )
    requests: list[Request] = []
    for ids in prompts:
        most = _max_new_tokens(session, limits, request, len(ids))
        least = request.min_tokens or 0
        if least > most:
            raise ApiError(f"min_tokens is {least}, but must be at most {most}", param="min_tokens")
        each = replace(options, max_new_tokens=most, min_tokens=least, reuse_prefix=limits.reuse_prefix)
        prompt = tuple(ids)  # requests with the same tuple object share its K/V
        samplings = _samplings(options.sampling, per_prompt)
        requests += [session.request(prompt, replace(each, sampling=sampling)) for sampling in samplings]
    return tuple(requests)


def count_sequences(request: GenerationRequest) -> int:
    """The number of sequences of a request that was not checked yet; at least 1."""
    prompts = len(_prompt_list(request.prompt)) if isinstance(request, CompletionRequest) else 1
    return count_per_prompt(request) * prompts or 1


def count_per_prompt(request: GenerationRequest) -> int:
    """The number of sequences to generate for each prompt."""
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    return max(_int_or_1(best_of), _int_or_1(request.n))


def _int_or_1(value: Any) -> int:
    """`value`, or 1 if it is not an int: `only` fields hold anything before they are checked."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 1


def prompt_bytes(request: GenerationRequest) -> int:
    """The UTF-8 bytes of the longest prompt that is not token ids; all messages and tools of a chat are one prompt."""
    if isinstance(request, ChatRequest):
        in_messages = [text for each in request.messages for text in (*content_texts(each), *other_prompt_texts(each))]
        in_tools = [json.dumps(tool.model_dump(), ensure_ascii=False) for tool in request.tools or ()]
        return sum(map(_utf8_bytes, (*in_messages, *in_tools)))
    assert isinstance(request, CompletionRequest)
    return max((_utf8_bytes(each) for each in _prompt_list(request.prompt) if isinstance(each, str)), default=0)


def _utf8_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _check_completion(request: CompletionRequest) -> None:
    if request.suffix:
        why = "this model was trained to continue a text, not to fill a gap before a suffix"
        raise not_supported("suffix", request.suffix, why)
    if request.best_of is not None and _int_or_1(request.best_of) < _int_or_1(request.n):
        raise ApiError(f"best_of is {request.best_of}, and n is {request.n}: it must be at least n", param="best_of")
    if request.stream and count_per_prompt(request) > _int_or_1(request.n):
        raise ApiError("best_of above n cannot be streamed: leave out stream or best_of", param="best_of")
    if request.echo and request.logprobs is not None:
        why = "there are no log-probabilities of the prompt: leave out echo or logprobs"
        raise ApiError(why, param="echo", code="unsupported_parameter")


def _echo(session: Session, request: GenerationRequest) -> tuple[str, ...]:
    if not isinstance(request, CompletionRequest) or not request.echo:
        return ()
    return tuple(
        each if isinstance(each, str) else session.decode(each, skip_special_tokens=True)
        for each in _prompt_list(request.prompt)
    )


def _prompts(
    session: Session, limits: ServeOptions, chat_format: ChatFormat | None, request: GenerationRequest
) -> list[list[int]]:
    if isinstance(request, ChatRequest):
        assert chat_format is not None
        variables = chat_format.variables(request)
        messages = template_messages(request, calls=chat_format.calls is not None)
        return [session.encode_chat(messages, allow_special_tokens=limits.special_tokens, variables=variables)]
    assert isinstance(request, CompletionRequest)
    prompts = [session.encode(each) if isinstance(each, str) else each for each in _prompt_list(request.prompt)]
    vocabulary = session.manifest.model.vocab_size
    if not prompts or not all(prompts):
        raise ApiError("the prompt has no tokens", param="prompt")
    if any(not 0 <= token < vocabulary for ids in prompts for token in ids):
        raise ApiError(f"a token id of the prompt is not in the vocabulary of {vocabulary}", param="prompt")
    return prompts


def _prompt_list(prompt: Any) -> list[str | list[int]]:
    """One prompt as a list of one, several as they are."""
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else prompt


def _options(request: GenerationRequest, constraint: Constraint | None, salt: str) -> GenerateOptions:
    plan = request.plan or "auto"
    if request.speculative is False:
        if request.plan not in (None, "ar"):
            raise ApiError(f"speculative false means plan ar, but plan is {plan}: leave out one", param="speculative")
        plan = "ar"
    elif request.speculative and plan == "ar":
        raise ApiError("speculative is true, but plan ar does not speculate: leave out one", param="speculative")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if any(stop.encode(errors="replace").decode() != stop for stop in stops):  # a lone surrogate
        raise ApiError("stop is not valid Unicode text", param="stop")
    fields = {field.name: getattr(request, field.http) for field in REQUEST_FIELDS if field.http is not None}
    given = {"temperature": 1.0} | {name: value for name, value in fields.items() if value is not None}
    given.pop("min_tokens", None)  # `_requests` adds it, with max_new_tokens, which bounds it
    given["top_k"] = max(given.get("top_k", 0), 0)
    if "seed" in given:
        given["seed"] %= 1 << 64
    given["logit_bias"] = {int(token): bias for token, bias in given.get("logit_bias", {}).items()}
    given |= {"plan": plan, "cache_salt": salt + (request.cache_salt or "")}
    return GenerateOptions(logprobs=_logprobs(request), constraint=constraint).with_fields(**given)


def _constraint(
    session: Session, chat_format: ChatFormat | None, turn_format: TurnFormat | None, request: GenerationRequest
) -> tuple[tuple[tuple[Future[Any], str], ...], Constraint | None, str | None]:
    """(`compiling` of TokenizedRequest, the constraint of a sequence, `constraint_kind` of ParsedRequest). `compiling`
    also has the requested constraint if a chat's turn has another. Raises ApiError if a constraint is invalid."""
    param, requested = constraint_of(request) or ("tools", None)
    found = requested  # in a chat, the whole turn has another constraint if it may have reasoning or calls
    if chat_format is not None and isinstance(request, ChatRequest):
        found = chat_format.constraint(request, turn_format, requested)
    if found is not None and request.ignore_eos:
        raise ApiError(f"{param} decides where the text ends: leave out ignore_eos", param="ignore_eos")
    compiling: list[tuple[Future[Any], str]] = []
    for constraint in dict.fromkeys((requested, found)):
        if constraint is not None:
            field = param if constraint is requested else "tools"
            with constraint_errors(field):
                compiling.append((session.prepare(constraint), field))
    return tuple(compiling), found, None if found is None else "tools" if requested is None else requested.kind


def _logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        if request.logprobs is None and count_per_prompt(request) > _int_or_1(request.n):
            return 0  # to choose the likeliest sequences
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError("top_logprobs need logprobs to be true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _samplings(sampling: SamplingParams, n: int) -> list[SamplingParams]:
    """The sampling of each of n sequences, whose seeds are consecutive numbers."""
    seeded = sampling.seeded()
    return [replace(seeded, seed=((seeded.seed or 0) + i) % (1 << 64)) for i in range(n)]


def _max_new_tokens(session: Session, limits: ServeOptions, request: GenerationRequest, prompt: int) -> int:
    """The most tokens to generate after a prompt of `prompt` tokens."""
    context = session.capacity
    if prompt > (most := min(limits.max_prompt_tokens or context, context - 1)):
        raise ApiError(
            f"the prompt has {prompt} tokens, but may have {most} on this server; shorten it",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    chat = isinstance(request, ChatRequest)
    param = "max_tokens"
    wanted = request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if wanted not in (None, request.max_completion_tokens):
            raise ApiError("max_tokens and max_completion_tokens differ: give one", param="max_tokens")
        param, wanted = "max_completion_tokens", request.max_completion_tokens
    most = min(limits.max_output_tokens or context, context)
    if wanted is None:
        return min(most, context - prompt, context if chat else DEFAULT_COMPLETION_TOKENS)
    if wanted > most:
        raise ApiError(f"{param} is {wanted}, but must be at most {most} on this server", param=param)
    if prompt + wanted > context:
        raise ApiError(
            f"the prompt has {prompt} tokens and {param} is {wanted}: together more than the context of {context}",
            param=param,
            code="context_length_exceeded",
        )
    return wanted
