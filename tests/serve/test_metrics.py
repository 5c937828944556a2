"""The metrics of /metrics, and that each app has its own."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from pass_runtime import GenerateOptions
from pass_server.app import PrometheusSink, make_app
from pass_server.choices import Choice
from pass_server.serve_options import ServeOptions
from pass_server.service import RequestMetrics

RECORDED = {
    "vllm:prompt_tokens_total": 5,
    "vllm:generation_tokens_total": 20,
    "vllm:request_success_total": 1,
    "vllm:time_to_first_token_seconds_count": 1,
    "vllm:e2e_request_latency_seconds_count": 1,
    "vllm:request_time_per_output_token_seconds_count": 1,
    "vllm:request_queue_time_seconds_count": 1,
    "vllm:request_prefill_time_seconds_count": 1,
    "vllm:request_decode_time_seconds_count": 1,
    "vllm:request_inference_time_seconds_count": 1,
    "vllm:prefix_cache_queries_total": 5,
    "vllm:prefix_cache_hits_total": 0,
    "vllm:request_prompt_tokens_sum": 5,
    "vllm:request_generation_tokens_sum": 20,
    "pass:http_responses_total": 1,
}


def test_what_one_request_counts(server):
    def now() -> dict[str, float]:
        return {
            name: server.metric(
                name, **({"path": "/v1/completions"} if name.startswith("pass:http") else {})
            )
            for name in RECORDED
        }

    names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    spec = [f"vllm:spec_decode_num_{name}_total" for name in names]
    before, drafts = now(), [server.metric(name) for name in spec]
    fields = {"max_tokens": 20, "plan": "fused", "ignore_eos": True, "prompt": [5, 6, 7, 8, 9]}
    extension = server.complete(**fields).json()["choices"][0]["pass"]
    assert {name: value - before[name] for name, value in now().items()} == RECORDED
    count, drafted, accepted, by_position = (
        server.metric(name) - then for name, then in zip(spec, drafts, strict=True)
    )
    assert (drafted, accepted) == (extension["drafted"], extension["accepted"])
    assert by_position == accepted
    assert 0 < count <= extension["passes"]


def test_names_and_gauges(server):
    ended = server.complete(prompt=[15, 16], max_tokens=4, ignore_eos=True).json()["choices"][0]
    assert ended["finish_reason"] == "length"
    server.wait_until("vllm:num_requests_running", 0)
    text = httpx.get(f"{server.url}/metrics").text
    assert f'vllm:num_requests_running{{model_name="{server.model}"}} 0.0' in text
    assert server.metric("pass:slots") == 4
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    for name in ("vllm:inter_token_latency_seconds_bucket", "vllm:request_success_total"):
        assert f"{name}{{" in text
    assert 'finished_reason="length"' in text


FORMS = {
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a"]}}}
    },
    "json_object": {"response_format": {"type": "json_object"}},
    "regex": {"guided_regex": "a"},
    "choice": {"structured_outputs": {"choice": ["a", "b"]}},
    "grammar": {"guided_grammar": 'start: "a"'},
}


@pytest.mark.parametrize("form", FORMS)
def test_requests_with_a_form_are_counted(server, form):
    def now() -> list[float]:
        name = "pass:constrained_requests_total"
        return [server.metric(name), server.metric(name, form=form, model_name=server.model)]

    before, form_of = now(), {"prompt": [15, 16], **FORMS[form]}
    assert server.complete(**form_of, n=2, max_tokens=4).status_code == 200
    assert now() == [count + 1 for count in before]
    assert (
        server.complete(prompt=[15, 16], max_tokens=4, response_format={"type": "text"}).status_code
        == 200
    )
    assert server.complete(**form_of, ignore_eos=True).status_code == 400
    assert now() == [count + 1 for count in before]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_prompt_of_n_choices_is_read_once(server, path):
    names = [f"vllm:prefix_cache_{name}_total" for name in ("queries", "hits")]
    before = [server.metric(name) for name in names]
    fields = {"n": 4, "max_tokens": 6, "temperature": 1, "seed": 3, "ignore_eos": True}
    answer = (server.complete if path == "completions" else server.chat)(**fields).json()
    prompt = answer["usage"]["prompt_tokens"]
    queried, found = (server.metric(name) - then for name, then in zip(names, before, strict=True))
    earlier = answer["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]  # what prompts before it began with, too
    assert earlier < prompt / 2
    # The last token of a prompt is in the first window.
    assert (queried, found) == (4 * prompt, 3 * (prompt - 1) + earlier)
    assert len(answer["choices"]) == 4


def test_the_times_of_a_sequence_add_up(slow_server):
    """As vLLM defines them: in the queue, from a slot to the first tokens, from those to the
    last."""
    names = ("queue_time", "prefill_time", "decode_time", "inference_time")
    seconds = [f"vllm:request_{name}_seconds_sum" for name in names]
    seconds += ["vllm:time_to_first_token_seconds_sum", "vllm:e2e_request_latency_seconds_sum"]
    gaps = "vllm:inter_token_latency_seconds"
    before = [slow_server.metric(name) for name in [*seconds, f"{gaps}_count", f"{gaps}_sum"]]
    fields = {
        "n": 2,
        "max_tokens": 8,
        "plan": "fused",
        "ignore_eos": True,
    }  # one more than there are slots
    choices = slow_server.complete(**fields).json()["choices"]
    *found, gap_count, gap_sum = (
        slow_server.metric(name) - then
        for name, then in zip([*seconds, f"{gaps}_count", f"{gaps}_sum"], before, strict=True)
    )
    queue, prefill, decode, inference, first, whole = found
    assert queue == pytest.approx(sum(choice["pass"]["queue_seconds"] for choice in choices))
    assert queue > 0.1
    assert inference == pytest.approx(prefill + decode)
    assert queue + prefill <= first
    assert first + decode <= whole
    assert gap_count == sum(choice["pass"]["passes"] for choice in choices) - len(choices)
    assert gap_sum == pytest.approx(decode)


@pytest.fixture
def apps(session):
    return [make_app(session, ServeOptions(model_name=name)) for name in ("one", "two")]


def test_an_app_below_a_path_keeps_its_keys(session):
    """Where another one mounts it, the paths that it sees begin with that one's."""
    outer = Starlette(routes=[Mount("/llm", make_app(session, ServeOptions(keys=("key",))))])

    async def main() -> None:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(outer), base_url="http://a/llm"
        ) as client:
            keyed = {"Authorization": "Bearer key"}
            for path in ("/v1/models", "/v1/completions", "/nothing"):
                assert (await client.get(path)).status_code == 401
            assert (await client.get("/v1/models", headers=keyed)).status_code == 200
            assert (await client.get("/nothing", headers=keyed)).status_code == 404
            assert (await client.get("/health")).status_code == 200
            counted = (await client.get("/metrics")).text
            assert 'path="/v1/models",status="401"} 1.0' in counted

    asyncio.run(main())


def test_what_nobody_read_was_written_all_the_same(session):
    """As where a client reads slower than tokens come, until it gives up."""
    generation = session.generate("The", GenerateOptions(8, ignore_eos=True))
    assert generation._sequence.ended.wait(60)
    next(generation)
    sink = PrometheusSink(session, "mine")
    RequestMetrics(sink, "mine").record_end(Choice(0, generation, generation.submitted))
    left = generation.stats.generated_tokens - len(generation.tokens)
    assert 0 < left < 8
    assert f'vllm:generation_tokens_total{{model_name="mine"}} {left}.0' in sink.text().decode()


def test_apps_are_independent_of_a_server_and_of_each_other(apps, session):
    """As another ASGI server would run them."""

    async def main() -> list[str]:
        texts = []
        for app, name in zip(apps, ("one", "two"), strict=True):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://a", timeout=60
            ) as client:
                if name == "one":
                    fields = {"model": name, "prompt": "The", "temperature": 0, "max_tokens": 8}
                    answer = (await client.post("/v1/completions", json=fields)).json()
                    assert (
                        answer["choices"][0]["text"]
                        == session.generate("The")
                        .result()
                        .text[: len(answer["choices"][0]["text"])]
                    )
                texts.append((await client.get("/metrics")).text)
        return texts

    one, two = asyncio.run(main())
    assert 'vllm:generation_tokens_total{model_name="one"} 8.0' in one
    assert "vllm:generation_tokens_total{" not in two
