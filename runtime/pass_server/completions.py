"""Fields of /v1/completions that chats do not have: `prompt`, `suffix`, `best_of`, `echo`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pass_runtime import Detokenizer, Session
from pass_server.api_error import ApiError, not_supported
from pass_server.schemas import CompletionRequest


def prompt_list(prompt: Any) -> list[str | list[int]]:
    """Return the prompts of the field `prompt`: text or token ids, of one prompt or of several."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def completion_ids(session: Session, request: CompletionRequest) -> list[list[int]]:
    """Return the token ids of each prompt. Raises ApiError if one has none, or an id is unknown, or
    if the model cannot fill the gap before a suffix."""
    prompts = [_prompt_ids(session, each, request.suffix) for each in prompt_list(request.prompt)]
    vocabulary = session.manifest.model.vocab_size
    if not prompts or not all(prompts):
        raise ApiError("the prompt has no tokens", param="prompt")
    if any(not 0 <= token < vocabulary for ids in prompts for token in ids):
        raise ApiError(
            f"a token id of the prompt is not in the vocabulary of {vocabulary}", param="prompt"
        )
    return prompts


def _prompt_ids(session: Session, prompt: str | list[int], suffix: str | None) -> list[int]:
    if not suffix:
        return session.encode(prompt) if isinstance(prompt, str) else prompt
    if not session.infill_end_ids:
        why = "this model was trained to continue a text, not to fill a gap before a suffix"
        raise not_supported("suffix", suffix, why)
    if not isinstance(prompt, str):
        raise ApiError("with a suffix the prompt must be text, not token ids", param="prompt")
    return session.encode_infill(prompt, suffix)


def check_completion(request: CompletionRequest) -> None:
    """Raise ApiError if fields contradict each other, or one is not supported."""
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


@dataclass(frozen=True)
class Echo:
    """A prompt that the answer repeats. offsets: where in its text each of its tokens begins."""

    text: str
    offsets: tuple[int, ...]


def echoes(session: Session, request: CompletionRequest) -> tuple[Echo, ...]:
    """Return each prompt if `echo` asks for it, else ()."""
    if not request.echo:
        return ()
    return tuple(_echo(session, each) for each in prompt_list(request.prompt))


def _echo(session: Session, prompt: str | list[int]) -> Echo:
    starts: list[int] = []
    if isinstance(prompt, str):
        # An empty prompt becomes the start token.
        spans = session.tokenizer.encode(prompt).offsets or [(0, 0)]
        # Tokens that the tokenizer adds are at 0, also those at the end.
        return Echo(prompt, tuple(accumulate((start for start, _ in spans), max)))
    detokenizer = Detokenizer(session.vocabulary)
    for token in prompt:
        detokenizer.push(token)
        starts.append(detokenizer.token_start)
    return Echo(session.decode(prompt, skip_special_tokens=True), tuple(starts))


def prompt_logprobs(request: CompletionRequest) -> int | None:
    """Return `GenerateOptions.prompt_logprobs`, which is needed to write no token."""
    if not request.echo:
        return None
    return request.logprobs or 0 if request.max_tokens == 0 else request.logprobs
