"""Requests made up from the OpenAPI document: the server answers with 200 or 400 (413 if the
body is too large), never with 500."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode

from pass_server.serve_options import ServeOptions

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "30"))
"""How many requests are sent to each endpoint: so many valid and so many invalid ones."""


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
"""A valid request for each endpoint, without its `model`."""


@pytest.mark.slow
@pytest.mark.parametrize("validity", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", VALID)
def test_random_requests_cause_no_server_error(server, schema, path, validity):
    statuses = []
    cases = schema[path]["POST"].as_strategy(generation_mode=validity)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def run(case):
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = server.model  # otherwise every answer is a 404
        response = case.call(base_url=server.url, timeout=60)
        case.validate_response(response, checks=[not_a_server_error])
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        if response.status_code == 413:
            assert len(response.request.body) > ServeOptions.max_body_bytes
        else:
            statuses.append(response.status_code)

    run()
    assert set(statuses) <= {200, 400}
    valid = httpx.post(server.url + path, json=VALID[path] | {"model": server.model}, timeout=60)
    assert valid.status_code == 200
    server.wait_until("vllm:num_requests_running", 0)
    assert httpx.get(f"{server.url}/health").status_code == 200
