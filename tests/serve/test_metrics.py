"""What requests add to the metrics at /metrics. Each app has metrics of its own."""

from __future__ import annotations

import pytest
from in_process import App
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from pass_runtime import GenerateOptions
from pass_server.answers import Choice
from pass_server.metrics import RequestMetrics
from pass_server.prometheus import PrometheusSink

TIMES = ("queue_time", "prefill_time", "decode_time", "inference_time", "time_per_output_token")
RECORDED = {
    "prompt_tokens_total": 5,
    "generation_tokens_total": 20,
    "request_success_total": 1,
    "time_to_first_token_seconds_count": 1,
    "e2e_request_latency_seconds_count": 1,
    **{f"request_{name}_seconds_count": 1 for name in TIMES},
    "prefix_cache_queries_total": 5,
    "prefix_cache_hits_total": 0,
    "request_prompt_tokens_sum": 5,
    "request_generation_tokens_sum": 20,
}
"""What a request of 5 prompt tokens and 20 written ones adds to metrics of vLLM."""


def differences(server, names, action):
    """Return what an action returns, and by how much it changes each of the metrics `vllm:NAME`."""
    before = [server.metric(f"vllm:{name}") for name in names]
    result = action()
    after = [server.metric(f"vllm:{name}") for name in names]
    return result, [new - old for new, old in zip(after, before, strict=True)]


@pytest.mark.slow
def test_one_request_adds_its_tokens_times_and_drafts(server):
    of_path = {"path": "/v1/completions"}
    responses = server.metric("pass:http_responses_total", **of_path)
    kinds = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    names = [*RECORDED, *(f"spec_decode_num_{kind}_total" for kind in kinds)]
    fields = {"max_tokens": 20, "plan": "fused", "ignore_eos": True, "prompt": [5, 6, 7, 8, 9]}
    answer, changes = differences(server, names, lambda: server.complete(**fields).json())
    *recorded, passes, drafted, accepted, by_position = changes
    assert dict(zip(RECORDED, recorded, strict=True)) == RECORDED
    assert server.metric("pass:http_responses_total", **of_path) == responses + 1
    statistics = answer["choices"][0]["pass"]
    assert (drafted, accepted) == (statistics["drafted"], statistics["accepted"])
    assert by_position == accepted
    assert 0 < passes <= statistics["passes"]  # the metric counts only passes with drafts


def test_gauges_and_labels(server):
    ended = server.complete(prompt=[15, 16], max_tokens=4, ignore_eos=True).json()["choices"][0]
    assert ended["finish_reason"] == "length"
    server.wait_until("vllm:num_requests_running", 0)
    text = server.metrics()
    assert f'vllm:num_requests_running{{model_name="{server.model}"}} 0.0' in text
    assert server.metric("pass:slots") == 4
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    for name in ("vllm:inter_token_latency_seconds_bucket", "vllm:request_success_total"):
        assert f"{name}{{" in text
    assert 'finished_reason="length"' in text


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_n_choices_share_one_prefill(server, path):
    fields = {"n": 4, "max_tokens": 6, "temperature": 1, "seed": 3, "ignore_eos": True}
    fields["cache_salt"] = f"no other request has {path}"
    post = server.complete if path == "completions" else server.chat
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total")
    answer, counts = differences(server, names, lambda: post(**fields).json())
    prompt = answer["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # The last token of a prompt is the root of the first window, so it is never cached.
    assert counts == [4 * prompt, 3 * (prompt - 1)]
    assert len(answer["choices"]) == 4


@pytest.mark.slow
def test_the_times_of_a_sequence_add_up(slow_server):
    """As in vLLM: waiting for a slot, then until the first tokens (prefill), then to the last."""
    names = [f"request_{name}_seconds_sum" for name in TIMES[:4]]
    names += ["time_to_first_token_seconds_sum", "e2e_request_latency_seconds_sum"]
    names += ["inter_token_latency_seconds_count", "inter_token_latency_seconds_sum"]
    # There is one slot, so the second choice waits for the first.
    fields = {"n": 2, "max_tokens": 8, "plan": "fused", "ignore_eos": True}
    answer, changes = differences(slow_server, names, lambda: slow_server.complete(**fields).json())
    queue, prefill, decode, inference, first, whole, gap_count, gap_sum = changes
    choices = answer["choices"]
    assert queue == pytest.approx(sum(choice["pass"]["queue_seconds"] for choice in choices))
    assert queue > 0.1
    assert inference == pytest.approx(prefill + decode)
    assert queue + prefill <= first
    assert first + decode <= whole
    assert gap_count == sum(choice["pass"]["passes"] for choice in choices) - len(choices)
    assert gap_sum == pytest.approx(decode)


def test_an_app_mounted_below_a_path_keeps_its_keys(session):
    outer = Starlette(routes=[Mount("/llm", App(session, keys=("key",)).app)])
    client, keyed = TestClient(outer), {"Authorization": "Bearer key"}
    for path in ("/v1/models", "/v1/completions", "/nothing"):
        assert client.get(f"/llm{path}").status_code == 401
    assert client.get("/llm/v1/models", headers=keyed).status_code == 200
    assert client.get("/llm/nothing", headers=keyed).status_code == 404
    assert client.get("/llm/health").status_code == 200
    assert 'path="/v1/models",status="401"} 1.0' in client.get("/llm/metrics").text


def test_tokens_that_no_client_read_are_counted(session):
    generation = session.generate("The", GenerateOptions(8, ignore_eos=True))
    assert generation._sequence.ended.wait(60)
    next(generation)
    sink = PrometheusSink(session, "mine")
    RequestMetrics(sink, "mine").record_end(Choice(0, generation, generation.submitted))
    unread = generation.stats.generated_tokens - len(generation.tokens)
    assert 0 < unread < 8
    assert f'vllm:generation_tokens_total{{model_name="mine"}} {unread}.0' in sink.text().decode()


def test_apps_have_their_own_metrics_and_need_no_server(session):
    one, two = (App(session, model_name=name) for name in ("one", "two"))
    text = one.complete(prompt="The", max_tokens=8).json()["choices"][0]["text"]
    assert session.generate("The").result().text.startswith(text)
    assert one.metric("vllm:generation_tokens_total", model_name="one") == 8
    assert "vllm:generation_tokens_total{" not in two.metrics()
