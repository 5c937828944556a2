"""Golden traces: requests and results of the Python runtime, which the C++ runtime must reproduce.

A line is a scene: requests that share a session, and their results. The steps of the engine run one
by one, so that the scene decides which requests share a pass. Of requests with `auto` only tokens
are compared, because its choice depends on the machine's speed; under the rejection rule they are
greedy, because sampled tokens depend on the plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.option import options_of
from pass_runtime.bundle.read import read_manifest
from pass_runtime.decode.engine import Engine
from pass_runtime.decode.sequence import SequenceState
from pass_runtime.generation import TokenStream
from pass_runtime.tuning.auto import Auto

SAMPLING = tuple(options_of(SamplingParams))
NO_OPTIONS = ("prompt_ids", "round", "cancel_round", "continues")
"""Keys that are no options. "continues": the request whose text precedes the prompt."""
TIMES = (
    "queue_seconds",
    "prefill_seconds",
    "decode_seconds",
    "engine_seconds",
    "decode_tokens_per_second",
)
SAMPLERS: Sequence[Mapping[str, Any]] = (
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": (1 << 63) + 11},
    {"temperature": 0.7, "min_p": 0.05, "seed": 3},
)
PLANS: Sequence[Mapping[str, Any]] = (
    {"plan": "ar"},
    {"plan": "two-pass"},
    {"plan": "fused"},
    {"plan": "fused:2,1,1"},
    {"plan": "fused", "lookahead": 1},
    {"plan": "two-pass", "draft": "ngram"},
    {"plan": "two-pass", "draft": "both"},
    {"plan": "fused", "draft": "both"},
)
MOVING = (("ar", 3), ("two-pass", 16), ("fused", 16))
"""When the first has ended, the third moves to its slot, and the second decides the plan."""

PROCESSED: Sequence[Mapping[str, Any]] = (
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"repetition_penalty": 1.3, "temperature": 0.8, "seed": 5},
    {"logit_bias": {"5": -100.0, "9": 4.0, "17": 3.5}, "frequency_penalty": -0.5},
    {"min_tokens": 9, "allowed_token_ids": list(range(0, 60, 3))},
)

Request = dict[str, Any]
Scene = dict[str, Any]


class Prompts:
    """Prompts that sometimes repeat themselves, as text does."""

    def __init__(self, vocab_size: int, special: Sequence[int]) -> None:
        self._usable = [token for token in range(vocab_size) if token not in special]

    def of(self, length: int, seed: int = 1) -> list[int]:
        state, ids = seed, list[int]()
        while len(ids) < length:
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            if len(ids) > 8 and state >> 60 < 3:  # three times in sixteen
                ids += ids[-8:-3]
            else:
                ids.append(self._usable[(state >> 33) % len(self._usable)])
        return ids[:length]


def scenes(manifest: Manifest, tokens: int) -> Iterator[Scene]:
    """tokens: how many most requests write."""
    model = manifest.model
    prompts = Prompts(model.vocab_size, (*model.eos_token_ids, model.bos_token_id or 0))

    def request(length: int, seed: int = 1, /, **more: Any) -> Request:
        return {
            "prompt_ids": prompts.of(length, seed),
            "max_new_tokens": tokens,
            "ignore_eos": True,
            **more,
        }

    def alone(name: str, *requests: Request, **more: Any) -> Scene:
        return {"name": name, "slots": 1, "requests": list(requests), **more}

    for plan in PLANS:
        name = " ".join(str(value) for value in plan.values())
        yield alone(
            f"{name}: every sampler",
            *(request(11 + i, **plan, **s) for i, s in enumerate(SAMPLERS)),
        )
    lengths = (1, 2, 15, 16, 17, 18, 63, 64, 65, 66, 81, 128)
    yield alone(
        "borders of prefill and capacity",
        *(request(n, n, plan="two-pass", **SAMPLERS[1]) for n in lengths),
    )
    yield alone(
        "log-probabilities",
        *(request(9, n, plan="fused", logprobs=k) for n, k in enumerate((0, 3, 20))),
    )
    yield {
        **alone(
            "the end of the capacity",
            *(request(90, plan=p["plan"], max_new_tokens=99) for p in PLANS[:5]),
        ),
        "capacity": 128,
    }
    reused = {"plan": "fused", "reuse_prefix": True}
    for name, more in (
        ("a kept prefix", {}),
        ("a kept prefix, which is asked for", {"prefix_cache": False}),
    ):
        yield alone(name, *(request(n, **reused, **SAMPLERS[1]) for n in (40, 70, 30)), **more)
    yield from shared_prefixes(request, PLANS[:3])
    stops = list(range(0, model.vocab_size, 7))
    yield alone(
        "stops",
        *(request(12, n, plan="two-pass", stop_token_ids=stops, **SAMPLERS[1]) for n in range(3)),
    )
    batches = [("a batch", {"plan": "fused"}), ("a batch with n-grams", PLANS[6])]
    for name, plan in batches:
        mixed = [request(5 + 9 * i, i, round=2 * i, **plan, **SAMPLERS[i % 4]) for i in range(7)]
        mixed[2]["cancel_round"] = 9
        mixed[3]["max_new_tokens"] = 3
        mixed[5]["logprobs"] = 2
        yield {"name": name, "slots": 4, "requests": mixed}
    moving = [
        request(5 + i, i, plan=plan, max_new_tokens=count) for i, (plan, count) in enumerate(MOVING)
    ]
    yield {"name": "the third moves to the first one's slot", "slots": 4, "requests": moving}
    different = [request(8 + 3 * i, i, round=i, **plan) for i, plan in enumerate(PLANS)]
    yield {"name": "many plans in one batch", "slots": 3, "requests": different}
    limited = [
        request(9 + i, i, round=2 * i, **plan)
        for i, plan in enumerate((*PLANS[2:], {"plan": "auto"}))
    ]
    name = "drafts while at most two decode"
    yield {"name": name, "slots": 4, "speculative_max_concurrency": 2, "requests": limited[:-1]}
    yield {"name": "no drafts", "slots": 2, "speculative_max_concurrency": 0, "requests": limited}
    for plan in PLANS:
        name = " ".join(str(value) for value in plan.values())
        ended = {"ignore_eos": False}
        yield alone(
            f"{name}: processors",
            *(request(9 + i, i, **plan, **p, **ended) for i, p in enumerate(PROCESSED)),
        )
    processed = [
        request(
            6 + 5 * i,
            i,
            round=2 * i,
            plan=("fused", "ar", "two-pass")[i % 3],
            **(PROCESSED[i // 2] if i % 2 else {}),
        )
        for i in range(8)
    ]
    processed[3]["logprobs"] = 2
    yield {"name": "a batch with processors in some slots", "slots": 4, "requests": processed}
    samplers = SAMPLERS if manifest.rule == "match" else SAMPLERS[:1]
    yield {
        **alone("auto", *(request(20, n, **s) for n, s in enumerate(samplers))),
        "compare": "tokens",
    }


def shared_prefixes(
    request: Callable[..., Request], plans: Sequence[Mapping[str, Any]]
) -> Iterator[Scene]:
    several = [
        request(90, 2, **plans[i % len(plans)], **SAMPLERS[i % 4], round=1) for i in range(6)
    ]
    yield {
        "name": "one prompt in a batch",
        "slots": 4,
        "requests": [request(6, 7, plan="ar"), *several],
    }
    alike = [request(70 + 9 * i, 2, **plans[i % len(plans)], round=3 * i) for i in range(5)]
    yield {"name": "prompts that begin alike", "slots": 2, "requests": alike}
    salted = [
        request(70, 2, plan="ar", cache_salt=salt, round=5 * i)
        for i, salt in enumerate(("", "a", "", "a", "b"))
    ]
    yield {"name": "salts", "slots": 2, "requests": salted}
    given_up = [
        request(length, seed, **plans[0])
        for length, seed in ((150, 2), (5, 4), (100, 2), (40, 6), (170, 2))
    ]
    yield {"name": "what a slot gave up", "slots": 1, "requests": given_up}
    for plan in plans:
        first, other = request(40, 2, **plan, **SAMPLERS[1]), request(50, 7, **plan)
        again = request(3, 11, continues=0, **plan)
        yield {
            "name": f"{plan['plan']}: a conversation",
            "slots": 1,
            "requests": [first, again, other, dict(again)],
        }


def options_for(request: Request) -> GenerateOptions:
    sampling = {key: request[key] for key in SAMPLING if key in request}
    if "logit_bias" in sampling:  # names of JSON's objects are strings
        sampling["logit_bias"] = {
            int(token): bias for token, bias in sampling["logit_bias"].items()
        }
    others = {key: value for key, value in request.items() if key not in (*SAMPLING, *NO_OPTIONS)}
    return GenerateOptions(sampling=SamplingParams(**sampling), **others)


def play(session: Session, scene: Scene) -> list[dict[str, Any]]:
    """Run a scene. Prompts that continue another request get its text."""
    requests: list[Request] = scene["requests"]
    for request in requests:
        if "continues" in request:
            first = requests[request.pop("continues")]
            written = play(session, {"requests": [first]})[0]["token_ids"]
            request["prompt_ids"] = [*first["prompt_ids"], *written, *request["prompt_ids"]]
    engine = Engine(
        session.backend,
        Auto(session.manifest.lookahead, session.backend.capabilities),
        len(requests),
        speculative_max_concurrency=scene.get("speculative_max_concurrency"),
        prefix_cache=scene.get("prefix_cache", True),
    )
    streams: dict[int, TokenStream] = {}
    sequences: dict[int, SequenceState] = {}
    step = 0
    while len(streams) < len(requests) or not engine.idle:
        for i, request in enumerate(requests):
            if request.get("round", 0) == step:
                sequences[i] = SequenceState(
                    session.request(request["prompt_ids"], options_for(request))
                )
                engine.reserve(1)
                engine.add(sequences[i])
                streams[i] = TokenStream(sequences[i], session)
            if request.get("cancel_round") == step:
                sequences[i].cancelled = True
        engine.step()
        step += 1
    return [result_of(streams[i].result()) for i in range(len(requests))]


def result_of(stream: TokenStream) -> dict[str, Any]:
    result = stream.as_dict() | {"sources": [token.source for token in stream.tokens]}
    for key in ("prompt_ids", "text", "seed"):
        del result[key]
    for key in TIMES:
        del result["stats"][key]
    return result


def write(path: Path, scenes: Sequence[Scene]) -> Path:
    path.write_text("".join(json.dumps(scene) + "\n" for scene in scenes), "utf-8")
    return path


def record(bundle: Path, *, tokens: int, names: Sequence[str] = ()) -> list[Scene]:
    """Return the scenes with these names, or all of them, with their results."""
    chosen = [s for s in scenes(read_manifest(bundle), tokens) if not names or s["name"] in names]
    assert len(chosen) >= len(names)
    for scene in chosen:
        slots, capacity = scene["slots"], scene.get("capacity")
        with load(
            bundle, "cpu", threads=1, verify=False, max_batch_size=slots, capacity=capacity
        ) as session:
            scene["results"] = play(session, scene)
    return chosen
