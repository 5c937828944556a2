"""A request of the API, checked and parsed: prompts as token ids, and options for each sequence of the answer."""

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
from pass_server.fields import unsupported
from pass_server.schemas import ChatRequest, CompletionRequest, Sampled, constraint_of
from pass_server.serve_options import ServeOptions
from pass_server.turns import Turn, Turns, conversation, other_texts, texts

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat has no such limit."""


@dataclass(frozen=True)
class ParsedRequest:
    """requests: `written` for every prompt, of which the likeliest `n` are the choices of the answer, in this order.

    arrived: `time.perf_counter` when the request came, before its prompts were tokenized. echo: what the texts of each
    prompt begin with; () for nothing. turn: how texts are read; None if they are text only. form: what kind of
    constraint the texts must follow, "tools" if it is calls of functions alone; None if they are free.
    """

    requests: tuple[Request, ...]
    n: int
    arrived: float
    written: int = 1
    echo: tuple[str, ...] = ()
    turn: Turn | None = None
    form: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """The sum over all prompts, each counted once whatever `n` is."""
        return sum(len(request.prompt_ids) for request in self.requests[:: self.written])


@dataclass(frozen=True)
class ReadRequest:
    """A request that was read, but for its constraints. compiling: they, with the fields that they come from. finish:
    makes the parsed request of it, once all of these are done."""

    compiling: tuple[tuple[Future[Any], str], ...]
    finish: Callable[[], ParsedRequest]


@contextmanager
def constraint_errors(param: str) -> Iterator[None]:
    """For a block that compiles the constraint of the field `param`: its errors become ApiErrors."""
    try:
        yield
    except TooManyConstraints as error:
        raise as_api_error(error) from None
    except PassError as error:
        raise ApiError(str(error), param=param) from None


def read(
    session: Session, limits: ServeOptions, request: Sampled, arrived: float | None = None, client: str = ""
) -> ReadRequest:
    """Tokenize the prompts and check everything that can be wrong with a request. It does not wait for constraints,
    which may take seconds to compile. client: what tells its cached prompts from those of other clients, as long for
    each of them. Raises ApiError, which says what is wrong."""
    arrived = time.perf_counter() if arrived is None else arrived
    if (name := unsupported(request)) is not None:
        raise not_supported(name, getattr(request, name))
    if isinstance(request, CompletionRequest):
        _check_completion(request)
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options are for streams: set stream to true", param="stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise not_supported("stream_options.include_obfuscation", True)
    try:
        turns = Turns(session, limits) if isinstance(request, ChatRequest) else None
        prompts = _prompts(session, limits, turns, request)
        turn = turns.turn(request, prompts[0]) if turns is not None and isinstance(request, ChatRequest) else None
        n, written = _count(request.n), sequences_of_a_prompt(request)
        if len(prompts) * written > limits.max_sequences:
            raise ApiError(
                f"{len(prompts)} prompts with {written} sequences each are more than the {limits.max_sequences} "
                "sequences that a request may have",
                param="n",
            )
        compiling, constraint, form = _constraint(session, turns, turn, request)
        options = _options(request, constraint, client)
    except PassError as error:
        raise ApiError(str(error)) from None

    def finish() -> ParsedRequest:
        try:
            requests = _requests(session, limits, request, prompts, options, written)
        except PassError as error:
            raise ApiError(str(error)) from None
        return ParsedRequest(requests, n, arrived, written, _echo(session, request), turn, form)

    return ReadRequest(compiling, finish)


def _requests(
    session: Session,
    limits: ServeOptions,
    request: Sampled,
    prompts: list[list[int]],
    options: GenerateOptions,
    written: int,
) -> tuple[Request, ...]:
    """`written` requests for each prompt."""
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
            raise ApiError(f"min_tokens is {least}, and at most {most} are written", param="min_tokens")
        each = replace(options, max_new_tokens=most, min_tokens=least, reuse_prefix=limits.reuse_prefix)
        prompt = tuple(ids)  # one for all of them, which so share its K/V
        requests += [session.request(prompt, replace(each, sampling=s)) for s in _samplings(options.sampling, written)]
    return tuple(requests)


def sequences(request: Sampled) -> int:
    """How many sequences a request is for, as far as can be seen before it is parsed and checked."""
    prompts = len(_each(request.prompt)) if isinstance(request, CompletionRequest) else 1
    return sequences_of_a_prompt(request) * prompts or 1


def sequences_of_a_prompt(request: Sampled) -> int:
    """How many sequences are written for each prompt."""
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    return max(_count(best_of), _count(request.n))


def _count(value: Any) -> int:
    """The value of a field that may hold anything before it is checked; 1 if it is no whole number."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 1


def text_bytes(request: Sampled) -> int:
    """The size in UTF-8 of the longest text that becomes one prompt: a conversation, or one of several prompts."""
    if isinstance(request, ChatRequest):
        in_messages = [text for each in request.messages for text in (*texts(each), *other_texts(each))]
        in_tools = [json.dumps(tool.model_dump(), ensure_ascii=False) for tool in request.tools or ()]
        return sum(map(_bytes, (*in_messages, *in_tools)))
    assert isinstance(request, CompletionRequest)
    return max((_bytes(each) for each in _each(request.prompt) if isinstance(each, str)), default=0)


def _bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _check_completion(request: CompletionRequest) -> None:
    if request.suffix:
        why = "this model was trained to continue a text, not to fill a gap before a suffix"
        raise not_supported("suffix", request.suffix, why)
    if request.best_of is not None and _count(request.best_of) < _count(request.n):
        raise ApiError(f"best_of is {request.best_of}, and n is {request.n}: it must be at least n", param="best_of")
    if request.stream and sequences_of_a_prompt(request) > _count(request.n):
        raise ApiError("which text is the best is known at the end: leave out stream or best_of", param="best_of")
    if request.echo and request.logprobs is not None:
        why = "there are no log-probabilities of the prompt: leave out echo or logprobs"
        raise ApiError(why, param="echo", code="unsupported_parameter")


def _echo(session: Session, request: Sampled) -> tuple[str, ...]:
    if not isinstance(request, CompletionRequest) or not request.echo:
        return ()
    return tuple(
        each if isinstance(each, str) else session.decode(each, skip_special_tokens=True)
        for each in _each(request.prompt)
    )


def _prompts(session: Session, limits: ServeOptions, turns: Turns | None, request: Sampled) -> list[list[int]]:
    if isinstance(request, ChatRequest):
        assert turns is not None
        variables = turns.variables(request)
        messages = conversation(request, calls=turns.calls is not None)
        return [session.encode_chat(messages, allow_special_tokens=limits.special_tokens, variables=variables)]
    assert isinstance(request, CompletionRequest)
    prompts = [session.encode(each) if isinstance(each, str) else each for each in _each(request.prompt)]
    vocabulary = session.manifest.model.vocab_size
    if not prompts or not all(prompts):
        raise ApiError("the prompt has no tokens", param="prompt")
    if any(not 0 <= token < vocabulary for ids in prompts for token in ids):
        raise ApiError(f"a token id of the prompt is not in the vocabulary of {vocabulary}", param="prompt")
    return prompts


def _each(prompt: Any) -> list[str | list[int]]:
    """The prompts of a request that may have one or several."""
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else prompt


def _options(request: Sampled, constraint: Constraint | None, client: str) -> GenerateOptions:
    plan = request.plan or "auto"
    if request.speculative is False:
        if request.plan not in (None, "ar"):
            raise ApiError(f"speculative false is plan ar, but plan is {plan}", param="speculative")
        plan = "ar"
    elif request.speculative and plan == "ar":
        raise ApiError("speculative true, but plan is ar", param="speculative")
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
    given |= {"plan": plan, "cache_salt": client + (request.cache_salt or "")}
    return GenerateOptions(logprobs=_logprobs(request), constraint=constraint).with_fields(**given)


def _constraint(
    session: Session, turns: Turns | None, turn: Turn | None, request: Sampled
) -> tuple[tuple[tuple[Future[Any], str], ...], Constraint | None, str | None]:
    """What must be compiled, what the text must look like, and what kind of constraint that counts as. Raises
    ApiError if it cannot be followed here."""
    param, form = constraint_of(request) or ("tools", None)
    found = form
    if turns is not None and isinstance(request, ChatRequest):
        found = turns.constraint(request, turn, form)
    if found is not None and request.ignore_eos:
        raise ApiError(f"{param} ends the text: leave out ignore_eos", param="ignore_eos")
    compiling: list[tuple[Future[Any], str]] = []
    for constraint in dict.fromkeys((form, found)):
        if constraint is not None:
            of = param if constraint is form else "tools"
            with constraint_errors(of):
                compiling.append((session.prepare(constraint), of))
    return tuple(compiling), found, None if found is None else "tools" if form is None else form.kind


def _logprobs(request: Sampled) -> int | None:
    if isinstance(request, CompletionRequest):
        if request.logprobs is None and sequences_of_a_prompt(request) > _count(request.n):
            return 0  # by which the best are chosen
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError("top_logprobs need logprobs to be true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _samplings(sampling: SamplingParams, n: int) -> list[SamplingParams]:
    """For each of n choices, whose seeds are consecutive numbers."""
    seeded = sampling.seeded()
    return [replace(seeded, seed=((seeded.seed or 0) + i) % (1 << 64)) for i in range(n)]


def _max_new_tokens(session: Session, limits: ServeOptions, request: Sampled, prompt: int) -> int:
    """How many tokens to write at most after a prompt of `prompt` tokens."""
    context = session.capacity
    if prompt > (most := min(limits.max_prompt_tokens or context, context - 1)):
        raise ApiError(
            f"the prompt has {prompt} tokens, more than the {most} that this server reads; shorten it",
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
        raise ApiError(f"{param} is {wanted}, and this server writes {most} at most", param=param)
    if prompt + wanted > context:
        raise ApiError(
            f"the context is {context} tokens: the prompt has {prompt}, and {param} is {wanted}",
            param=param,
            code="context_length_exceeded",
        )
    return wanted
