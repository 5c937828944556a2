"""Models in NVIDIA's tritonserver: answers are those of a session, among failing requests and after
SIGTERM too."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from metered import disconnects_early, mixed_requests, wait_until, written
from process_memory import anonymous_bytes
from triton_server import Client, Triton, ids_of, text_of

PLANS = ("ar", "two-pass", "fused", "fused:2,2,1", "auto")
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
)
CLIENTS, REQUESTS = 16, 20
PAGE = (Path(__file__).parents[2] / "docs" / "triton.md").read_text(encoding="utf-8")
LONG = {"text_input": "The", "max_tokens": 700, "temperature": 0.0, "plan": "ar"}
LONG |= {"ignore_eos": True}
"""A request that takes the slow model 20 s."""
SHORT = {"max_tokens": 8, "temperature": 0.0}


def expected(session, prompt, fields):
    plain = {name: value for name, value in fields.items() if name not in ("stream", "input_ids")}
    return written(session, prompt, **plain | {"plan": "ar"})


@pytest.mark.parametrize("plan", PLANS)
def test_texts_and_token_ids_are_those_of_a_session(triton_server, session, plan):
    cases = [
        ({"max_tokens": 40, "seed": seed, "plan": plan, **sampling}, stream)
        for seed, sampling in enumerate(SAMPLINGS, 11)
        for stream in (False, True)
    ]

    def ask(fields: dict, stream: bool) -> tuple[str, list[int]]:
        with Client(triton_server) as client:
            texts = client.ask("text", text_input="The quick brown", stream=stream, **fields)
            ids = client.ask("tokens", input_ids=[5, 6, 7, 8], stream=stream, **fields)
        assert stream or (len(texts), len(ids)) == (1, 1)
        return text_of(texts), ids_of(ids)

    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: ask(*case), cases))
    for (fields, _), (text, ids) in zip(cases, answers, strict=True):
        assert text == expected(session, "The quick brown", fields).text
        assert ids == expected(session, [5, 6, 7, 8], fields).token_ids


def test_optional_outputs_are_those_of_a_session(triton_server, session):
    outputs = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens")
    outputs += ("num_output_tokens", "statistics")
    request = {"max_tokens": 12, "temperature": 0.0, "plan": "fused"}
    request |= {f"return_{name}": True for name in outputs}
    with Client(triton_server) as client:
        (whole,) = client.ask("text", text_input="The quick", **request)
        pieces = client.ask("text", text_input="The quick", stream=True, **request)
    generation = written(session, "The quick", max_tokens=12, logprobs=0)
    total = sum(token.logprobs.logprob for token in generation.tokens)
    assert whole["finish_reason"] == [b"length"]
    assert whole["num_input_tokens"] == [len(generation.prompt_ids)]
    assert whole["num_output_tokens"] == [12]
    assert whole["cumulative_logprob"] == pytest.approx([total], abs=1e-3)
    logprobs = json.loads(whole["logprobs"][0])
    assert [int(token) for each in logprobs for token in each] == generation.token_ids
    statistics = json.loads(whole["statistics"][0])
    assert statistics["plan"] == "fused"
    assert statistics["drafted"] > 0
    assert text_of(pieces) == text_of([whole])
    assert sum(piece["num_output_tokens"][0] for piece in pieces) == 12
    *earlier, last = [piece["finish_reason"][0] for piece in pieces]
    assert set(earlier) == {b"None"} and last == b"length"
    assert sum(len(json.loads(piece["logprobs"][0])) for piece in pieces) == 12


def test_sampling_parameters_as_vllm_and_its_frontend_send_them(triton_server, session):
    sampling = {"max_tokens": 16, "temperature": 0.8, "top_k": -1, "seed": 5}
    sampling |= {"n": 1, "frequency_penalty": 0.0}
    text = expected(session, "The", {"max_tokens": 16, "temperature": 0.8, "seed": 5}).text
    parameters = json.dumps(sampling | {"logprobs": False})
    request = {"text_input": "The", "sampling_parameters": parameters}
    with Client(triton_server) as client:
        for excluded, start in ((True, ""), (False, "The")):
            answer = client.ask("text", **request, exclude_input_in_output=excluded)
            assert text_of(answer) == start + text
    nested = triton_server.generate("text", text_input="The", parameters={"max_tokens": 16})
    assert nested.json()["text_output"]
    stop = text[3:6]
    fields = {"seed": 5, "max_tokens": 16, "temperature": 0.8, "stop_words": [stop, "zz"]}
    answer = triton_server.generate("text", text_input="The", **fields)
    assert answer.json()["text_output"] == text[: text.index(stop)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_parameters": '{"n": 2}'}, "n 2 is not supported"),
        ({"sampling_parameters": '{"guided_regex": "("}'}, "regex is not valid"),
        ({"max_tokens": 100_000}, "max_tokens is 100000"),
        ({"best": 1}, "unknown field: best"),
        ({"text_input": ["a", "b"]}, "shape"),
    ],
)
def test_wrong_and_unsupported_inputs_are_refused(triton_server, fields, message):
    answer = triton_server.generate("text", **({"text_input": "The"} | fields))
    assert answer.status_code == 400
    assert message in answer.json()["error"]


def test_a_cancelled_request_frees_its_slot(triton_server):
    """Whether the request streams or not, and also while it waits for a slot."""
    aborted = {"finished_reason": "abort", "model_name": "slow"}
    before = triton_server.metric("vllm:request_success_total", **aborted)
    clients = [Client(triton_server) for _ in range(3)]
    with triton_server.first_response("slow", **LONG, stream=True):
        for number, client in enumerate(clients):
            client.begin("slow", **LONG, stream=number == 1)
            triton_server.wait_until("vllm:num_requests_running", 2, model_name="slow")
        triton_server.wait_until("vllm:num_requests_waiting", 2, model_name="slow")
        for client in reversed(clients):  # the stream among them never gets a slot
            client.cancel()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        triton_server.wait_until(f"vllm:{name}", 0, model_name="slow")
    assert triton_server.metric("vllm:request_success_total", **aborted) - before == 4
    for client in clients:
        client.__exit__()


@pytest.mark.parametrize("line", re.findall(r"^    (curl .*)$", PAGE, re.MULTILINE))
def test_the_commands_of_the_page_run(triton_server, line):
    for documented, here in (
        ("http://127.0.0.1:8000", triton_server.http),
        ("http://127.0.0.1:8002", triton_server.metrics_url),
        ("/smollm2-135m-tokens/", "/tokens/"),
        ("/smollm2-135m/", "/text/"),
        ("[504, 3575, 282, 4649, 314]", "[5, 6, 7]"),
    ):
        line = line.replace(documented, here)
    command = ["bash", "-c", line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert re.search("text_output|output_ids|vllm:num_requests_running", done.stdout)
    assert "error" not in done.stdout


def requests_of(client: int) -> list[dict]:
    return mixed_requests(client, REQUESTS, "input_ids", PLANS)


@pytest.mark.slow
def test_sixteen_clients_get_the_tokens_of_a_session_and_leave_nothing_behind(
    triton_server, session
):
    stub = triton_server.stubs()["tokens"]
    memory = anonymous_bytes(stub.pid)
    before = triton_server.metric("vllm:request_success_total", model_name="tokens")

    def send_all(client_number: int) -> list[list[int] | None]:
        """Return the token ids of each answer, or None where the client disconnects."""
        answers: list[list[int] | None] = []
        with Client(triton_server) as client:
            for number, fields in enumerate(requests_of(client_number)):
                if disconnects_early(number):
                    triton_server.disconnect_early("tokens", **fields)
                    answers.append(None)
                else:
                    answers.append(ids_of(client.ask("tokens", **fields)))
        return answers

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers_by_client = list(pool.map(send_all, range(CLIENTS)))
    triton_server.wait_until("vllm:num_requests_running", 0, model_name="tokens")
    triton_server.wait_until("vllm:num_requests_waiting", 0, model_name="tokens")
    triton_server.wait_until(
        "vllm:request_success_total", before + CLIENTS * REQUESTS, model_name="tokens"
    )
    for client_number, answers in enumerate(answers_by_client):
        for fields, ids in zip(requests_of(client_number), answers, strict=True):
            if ids is not None:
                assert ids == expected(session, fields["input_ids"], fields).token_ids, fields
    disconnected = sum(answers.count(None) for answers in answers_by_client)
    assert disconnected == CLIENTS * REQUESTS // 5
    assert anonymous_bytes(stub.pid) - memory < 64 << 20


@pytest.mark.slow
def test_a_killed_model_is_loaded_again(triton_server, session):
    """Triton loads a model again if its directory has changed. Here it looks every second."""
    triton_server.stubs()["text"].kill()
    other_model = triton_server.generate("tokens", input_ids=[5, 6], **SHORT)
    assert other_model.status_code == 200
    answers = []

    def answered() -> bool:
        answers.append(triton_server.generate("text", text_input="The", **SHORT))
        assert answers[-1].status_code == 200 or "not healthy" in answers[-1].text
        return answers[-1].status_code == 200

    wait_until(answered, 60)
    assert answers[-1].json()["text_output"] == expected(session, "The", SHORT).text


def over_http(server: Triton, tokens: int) -> tuple[str, str | None]:
    url, text = f"{server.http}/v2/models/slow/generate_stream", ""
    with httpx.stream(
        "POST", url, json=LONG | {"max_tokens": tokens, "stream": True}, timeout=60
    ) as response:
        for line in response.iter_lines():
            event = json.loads(line.removeprefix("data: ")) if line else {}
            if "error" in event:
                return text, event["error"]
            text += event.get("text_output", "")
    return text, None


def over_grpc(server: Triton, tokens: int) -> tuple[str, str | None]:
    from tritonclient.utils import InferenceServerException

    responses = []
    with Client(server) as client:
        client.begin("slow", **LONG | {"max_tokens": tokens}, stream=True)
        try:
            responses += client.responses()
        except InferenceServerException as error:
            return text_of(responses), error.message()
    return text_of(responses), None


@pytest.mark.slow
@pytest.mark.parametrize("to_models", [False, True])
def test_after_sigterm_answers_finish_or_end_with_an_error(
    triton_server, session, tmp_path, to_models
):
    """The server waits for all answers; models that get the signal, too, for `drain_seconds`."""
    tokens = 700 if to_models else 100
    flags = ("--model-control-mode=explicit", "--load-model=slow", "--exit-timeout-secs=30")
    with (
        Triton(triton_server.repository, tmp_path / "log", *flags) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        futures = [pool.submit(over, server, tokens) for over in (over_http, over_grpc)]
        server.wait_until("vllm:num_requests_running", 2)
        (os.killpg if to_models else os.kill)(server.process.pid, signal.SIGTERM)
        whole = written(session, "The", max_tokens=tokens, plan="ar", ignore_eos=True).text
        for answer in futures:
            text, error = answer.result(timeout=30)
            assert error == ("the server is shutting down" if to_models else None)
            assert text
            assert whole.startswith(text) if to_models else text == whole
        assert server.process.wait(timeout=30) == 0, server.log_text
