"""Checks and parses requests of the API: prompts become token ids, fields the options of each
sequence."""

from __future__ import annotations

import json
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
from pass_server.api_error import ApiError, as_api_error, not_supported
from pass_server.fields import unsupported_field
from pass_server.schemas import (
    DEFAULT_TEMPERATURE,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    constraint_of,
)
from pass_server.serve_options import ServeOptions
from pass_server.turns import (
    ChatFormat,
    TurnFormat,
    content_texts,
    other_prompt_texts,
    template_messages,
)

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat has no such limit."""


@dataclass(frozen=True)
class ParsedRequest:
    """requests: `per_prompt` for each prompt, in the order of the prompts. The likeliest `n` of
    each prompt are the choices of the answer.

    arrived: `time.perf_counter` when the request came, before its prompts were tokenized. echo: the
    text of each prompt, if its choices begin with it; () if not. turn_format: how to read reasoning
    and calls; None if there is only text. constraint_kind: `Constraint.kind`, "tools" if only tool
    calls are constrained; None without a constraint.
    places: held for the requests until they begin.
    """

    requests: tuple[Request, ...]
    n: int
    arrived: float
    per_prompt: int = 1
    echo: tuple[str, ...] = ()
    turn_format: TurnFormat | None = None
    constraint_kind: str | None = None
    places: Places | None = None

    @property
    def prompt_tokens(self) -> int:
        """The sum over all prompts. A prompt counts once, however many sequences it has."""
        return sum(len(request.prompt_ids) for request in self.requests[:: self.per_prompt])


@dataclass(frozen=True)
class TokenizedRequest:
    """A request that was checked and tokenized; `RequestParser.finish` makes its sequences once the
    constraints are compiled. compiling: for each constraint, a future and the field that it comes
    from. options: those of every sequence, but for what depends on the prompt's length and the
    seed. Others: as in `ParsedRequest`."""

    request: GenerationRequest
    prompts: list[list[int]]
    options: GenerateOptions
    compiling: tuple[tuple[Future[Any], str], ...]
    arrived: float
    turn_format: TurnFormat | None
    constraint_kind: str | None


@contextmanager
def constraint_errors(param: str) -> Iterator[None]:
    """Turns the errors of the block, which compiles the constraint of the field `param`, into
    ApiErrors."""
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
        take seconds. salt: keeps the client's cached prompts apart from those of others. All
        clients' salts have one length: `cache_salt` is appended, and must not turn one into
        another."""
        if (name := unsupported_field(request)) is not None:
            raise not_supported(name, getattr(request, name))
        if isinstance(request, CompletionRequest):
            _check_completion(request)
        if request.stream_options is not None and not request.stream:
            raise ApiError(
                "stream_options are for streams: set stream to true", param="stream_options"
            )
        if request.stream_options is not None and request.stream_options.include_obfuscation:
            raise not_supported("stream_options.include_obfuscation", True)
        try:
            turn_format = None
            if isinstance(request, ChatRequest):
                prompts = [self.chat_ids(request)]
                turn_format = self._chat_format.turn_format(request, prompts[0])
            else:
                assert isinstance(request, CompletionRequest)
                prompts = self._completion_ids(request)
            per_prompt, most = count_per_prompt(request), self._serve_options.max_sequences
            if len(prompts) * per_prompt > most:
                raise ApiError(
                    f"{len(prompts)} prompts with {per_prompt} sequences each are more than "
                    f"{most}, the limit of this server; send fewer",
                    param="n",
                )
            compiling, constraint, kind = self._constraint(turn_format, request)
            options = _options(request, constraint, salt)
            if turn_format is not None:
                options = replace(options, shown_special_tokens=turn_format.marker_tokens)
        except PassError as error:
            raise ApiError(str(error)) from None
        if not self._serve_options.client_plans and (
            options.plan != "auto" or options.lookahead == 0
        ):
            raise ApiError(
                "this server decides how to decode: leave out plan, speculative, lookahead and "
                "draft",
                param="plan"
                if request.plan
                else "speculative"
                if request.speculative is False
                else "lookahead",
                code="unsupported_parameter",
            )
        return TokenizedRequest(request, prompts, options, compiling, arrived, turn_format, kind)

    def finish(self, tokenized: TokenizedRequest, places: Places | None = None) -> ParsedRequest:
        """Make the sequences of a request whose constraints are compiled."""
        request, per_prompt = tokenized.request, count_per_prompt(tokenized.request)
        requests: list[Request] = []
        for ids in tokenized.prompts:
            most = self._max_new_tokens(request, len(ids))
            least = request.min_tokens or 0
            if least > most:
                raise ApiError(
                    f"min_tokens is {least}, but must be at most {most}", param="min_tokens"
                )
            reuse = self._serve_options.reuse_prefix
            options = replace(
                tokenized.options, max_new_tokens=most, min_tokens=least, reuse_prefix=reuse
            )
            try:
                # Its tuple of ids is that of all: they share its K/V.
                first = self._session.request(ids, options)
            except PassError as error:
                raise ApiError(str(error)) from None
            requests += [
                replace(first, sampling=_with_seed(first.sampling, i)) for i in range(per_prompt)
            ]
        return ParsedRequest(
            tuple(requests),
            _int_or_1(request.n),
            tokenized.arrived,
            per_prompt,
            _echo(self._session, request),
            tokenized.turn_format,
            tokenized.constraint_kind,
            places,
        )

    def chat_ids(self, request: ChatRequest) -> list[int]:
        """The prompt of a chat."""
        variables = self._chat_format.variables(request)
        messages = template_messages(request, calls=self._chat_format.calls is not None)
        allowed = self._serve_options.special_tokens
        return self._session.encode_chat(
            messages, allow_special_tokens=allowed, variables=variables
        )

    def _completion_ids(self, request: CompletionRequest) -> list[list[int]]:
        prompts = [
            self._session.encode(each) if isinstance(each, str) else each
            for each in _prompt_list(request.prompt)
        ]
        vocabulary = self._session.manifest.model.vocab_size
        if not prompts or not all(prompts):
            raise ApiError("the prompt has no tokens", param="prompt")
        if any(not 0 <= token < vocabulary for ids in prompts for token in ids):
            raise ApiError(
                f"a token id of the prompt is not in the vocabulary of {vocabulary}", param="prompt"
            )
        return prompts

    def _constraint(
        self, turn_format: TurnFormat | None, request: GenerationRequest
    ) -> tuple[tuple[tuple[Future[Any], str], ...], Constraint | None, str | None]:
        """(`compiling` of TokenizedRequest, the constraint of a sequence, `constraint_kind` of
        ParsedRequest). `compiling` also has the requested constraint if a chat's turn has
        another."""
        param, requested = constraint_of(request) or ("tools", None)
        # in a chat, the whole turn has another constraint if it may have reasoning or calls
        found = requested
        if isinstance(request, ChatRequest):
            found = self._chat_format.constraint(request, turn_format, requested)
        if found is not None and request.ignore_eos:
            raise ApiError(
                f"{param} decides where the text ends: leave out ignore_eos", param="ignore_eos"
            )
        compiling: list[tuple[Future[Any], str]] = []
        for constraint in dict.fromkeys((requested, found)):
            if constraint is not None:
                field = param if constraint is requested else "tools"
                with constraint_errors(field):
                    compiling.append((self._session.prepare(constraint), field))
        return (
            tuple(compiling),
            found,
            None if found is None else "tools" if requested is None else requested.kind,
        )

    def _max_new_tokens(self, request: GenerationRequest, prompt: int) -> int:
        """The most tokens to generate after a prompt of `prompt` tokens."""
        context = self._session.capacity
        if prompt > (most := min(self._serve_options.max_prompt_tokens or context, context - 1)):
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
                raise ApiError(
                    "max_tokens and max_completion_tokens differ: give one", param="max_tokens"
                )
            param, wanted = "max_completion_tokens", request.max_completion_tokens
        most = min(self._serve_options.max_output_tokens or context, context)
        if wanted is None:
            return min(most, context - prompt, context if chat else DEFAULT_COMPLETION_TOKENS)
        if wanted > most:
            raise ApiError(
                f"{param} is {wanted}, but must be at most {most} on this server", param=param
            )
        if prompt + wanted > context:
            raise ApiError(
                f"the prompt has {prompt} tokens and {param} is {wanted}: together more than "
                f"the context of {context}",
                param=param,
                code="context_length_exceeded",
            )
        return wanted


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
    """The UTF-8 bytes of the longest prompt that is not token ids; all messages and tools of a chat
    are one prompt."""
    if isinstance(request, ChatRequest):
        in_messages = [
            text
            for each in request.messages
            for text in (*content_texts(each), *other_prompt_texts(each))
        ]
        in_tools = [
            json.dumps(tool.model_dump(), ensure_ascii=False) for tool in request.tools or ()
        ]
        return sum(map(_utf8_bytes, (*in_messages, *in_tools)))
    assert isinstance(request, CompletionRequest)
    return max(
        (_utf8_bytes(each) for each in _prompt_list(request.prompt) if isinstance(each, str)),
        default=0,
    )


def _utf8_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _check_completion(request: CompletionRequest) -> None:
    if request.suffix:
        why = "this model was trained to continue a text, not to fill a gap before a suffix"
        raise not_supported("suffix", request.suffix, why)
    if request.best_of is not None and _int_or_1(request.best_of) < _int_or_1(request.n):
        raise ApiError(
            f"best_of is {request.best_of}, and n is {request.n}: it must be at least n",
            param="best_of",
        )
    if request.stream and count_per_prompt(request) > _int_or_1(request.n):
        raise ApiError(
            "best_of above n cannot be streamed: leave out stream or best_of", param="best_of"
        )
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


def _prompt_list(prompt: Any) -> list[str | list[int]]:
    """One prompt as a list of one, several as they are."""
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else prompt


def _options(
    request: GenerationRequest, constraint: Constraint | None, salt: str
) -> GenerateOptions:
    plan = request.plan or "auto"
    if request.speculative is False:
        if request.plan not in (None, "ar"):
            raise ApiError(
                f"speculative false means plan ar, but plan is {plan}: leave out one",
                param="speculative",
            )
        plan = "ar"
    elif request.speculative and plan == "ar":
        raise ApiError(
            "speculative is true, but plan ar does not speculate: leave out one",
            param="speculative",
        )
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if any(stop.encode(errors="replace").decode() != stop for stop in stops):  # a lone surrogate
        raise ApiError("stop is not valid Unicode text", param="stop")
    fields = {
        field.name: getattr(request, field.http)
        for field in REQUEST_FIELDS
        if field.http is not None
    }
    given = {"temperature": DEFAULT_TEMPERATURE} | {
        name: value for name, value in fields.items() if value is not None
    }
    given.pop("min_tokens", None)  # `finish` adds it, with max_new_tokens, which bounds it
    given["top_k"] = max(given.get("top_k", 0), 0)
    if "seed" in given:
        given["seed"] %= 1 << 64
    given["logit_bias"] = {int(token): bias for token, bias in given.get("logit_bias", {}).items()}
    given |= {"plan": plan, "cache_salt": salt + (request.cache_salt or "")}
    return GenerateOptions(logprobs=_logprobs(request), constraint=constraint).with_fields(**given)


def _logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        if request.logprobs is None and count_per_prompt(request) > _int_or_1(request.n):
            return 0  # to choose the likeliest sequences
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError("top_logprobs need logprobs to be true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _with_seed(sampling: SamplingParams, i: int) -> SamplingParams:
    """The sampling of sequence i of a prompt: seeds are consecutive numbers."""
    return sampling if i == 0 else replace(sampling, seed=((sampling.seed or 0) + i) % (1 << 64))
