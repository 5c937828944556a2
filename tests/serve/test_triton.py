"""Models in NVIDIA's tritonserver: answers are those of a session, also among failing requests."""

from __future__ import annotations

import json
import random
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from metered import disconnects_early, mixed_requests
from process_memory import anonymous_bytes
from triton_server import Client, ids_of, text_of

from pass_runtime import GenerateOptions, SamplingParams

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


def expected(session, prompt: str | list[int], fields: dict):
    names = {"temperature", "top_k", "top_p", "min_p", "seed"} & fields.keys()
    sampling = SamplingParams(**{name: fields[name] for name in names})
    options = GenerateOptions(fields["max_tokens"], sampling, plan="ar")
    return session.generate(prompt, options).result()


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
    options = GenerateOptions(max_new_tokens=12, logprobs=0)
    generation = session.generate("The quick", options).result()
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


JUNK = ["", "\x00", "🦊" * 50, "{", "[]", "null", '{"a": ' * 2000, "9" * 5000, "NaN", "-1"]
JUNK.append('{"temperature": 1e999}')
NUMBERS = [0, -1, 1, 2**31 - 1, -(2**31), 1e38, -1e38, float("nan"), float("inf"), 0.5]


@pytest.mark.slow
def test_five_hundred_random_requests_are_answered_or_refused(triton_server, session):
    """Whatever the inputs, no process ends. Half of the requests are sent by gRPC, half by HTTP."""
    from tritonclient.utils import InferenceServerException

    rng, stubs = random.Random(0), triton_server.stubs()
    names = [
        *("text_input", "input_ids", "stream", "max_tokens", "temperature", "top_p", "top_k"),
        *("min_p", "seed", "plan", "stop_words", "stop_token_ids", "ignore_eos"),
        *("sampling_parameters", "lookahead", "draft", "nonsense"),
    ]
    outcomes = {"answered": 0, "refused": 0}

    def junk(client: Client, name: str):
        dtype = rng.choice([None, None, None, "STRING", "BOOL", "INT32", "FP32"])
        values = rng.choices(NUMBERS, k=rng.choice([0, 1, 1, 1, 1, 2, 300]))
        with np.errstate(all="ignore"):
            try:
                return client.tensor(name, values, dtype)
            except (ValueError, OverflowError, AttributeError):
                random_bytes = bytes(rng.randrange(256) for _ in range(40))
                texts = rng.choices([*JUNK, random_bytes], k=rng.choice([1, 1, 1, 3]))
                return client.tensor(name, texts, "STRING")

    with Client(triton_server) as client:
        for number in range(250):
            model, prompt = rng.choice([("text", "text_input"), ("tokens", "input_ids")])
            tensors = [client.tensor(prompt, {"text_input": "The", "input_ids": [5, 6]}[prompt])]
            tensors.append(client.tensor("max_tokens", 3))
            others = [name for name in names if name not in (prompt, "max_tokens")]
            chosen = rng.sample(others, k=rng.choice([0, 1, 1, 2]))
            if rng.random() < 0.2:  # junk in place of the prompt
                tensors, chosen = [], [prompt, "max_tokens"]
            client.send(model, [*tensors, *(junk(client, name) for name in chosen)])
            try:
                list(client.responses(timeout=30))
                outcomes["answered"] += 1
            except InferenceServerException as error:
                assert "internal error" not in str(error), (number, error)
                outcomes["refused"] += 1
        for number in range(250):
            chosen = rng.sample(names, k=rng.choice([0, 1, 1, 2]))
            values = [*JUNK, *NUMBERS[:6], None, [], {}, True]
            request = {"text_input": "The", "max_tokens": 3} if rng.random() < 0.8 else {}
            request |= {name: rng.choice(values) for name in chosen}
            answer = triton_server.generate("text", **request)
            if answer.status_code >= 500:  # Triton's own answer to JSON that it cannot parse
                assert "Unable to parse" in answer.text, (number, request, answer.text)
            outcomes["answered" if answer.status_code == 200 else "refused"] += 1
    assert min(outcomes.values()) > 50
    assert triton_server.stubs() == stubs
    fields = {"max_tokens": 8, "temperature": 0.0}
    answer = triton_server.generate("text", text_input="The", **fields)
    assert answer.json()["text_output"] == expected(session, "The", fields).text


@pytest.mark.slow
def test_a_killed_model_is_loaded_again(triton_server, session):
    """Triton loads a model again if its directory has changed. Here it looks every second."""
    fields = {"max_tokens": 8, "temperature": 0.0}
    triton_server.stubs()["text"].kill()
    other_model = triton_server.generate("tokens", input_ids=[5, 6], **fields)
    assert other_model.status_code == 200
    deadline = time.monotonic() + 60
    while (answer := triton_server.generate("text", text_input="The", **fields)).status_code != 200:
        assert "not healthy" in answer.text
        assert time.monotonic() < deadline, triton_server.log_text
        time.sleep(0.2)
    assert answer.json()["text_output"] == expected(session, "The", fields).text
