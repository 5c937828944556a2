"""The bundle of a server is replaced, removed or written into: the server goes on with what it
opened, or answers 503 and is not ready, so that whoever watches it starts it again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from replacing import REPLACEMENTS, copy_bundle, write_into
from running import expect_error
from starlette.testclient import TestClient

from pass_runtime import load
from pass_server.app import make_app
from pass_server.serve_options import ServeOptions

COMPLETION = {"model": "m", "prompt": "The quick", "max_tokens": 4, "temperature": 0}
KINDS = [
    {},
    {"plan": "fused"},
    {"temperature": 1, "seed": 1},
    {"temperature": 1, "seed": 1, "top_k": 5},
    {"logprobs": 2},
    {"logit_bias": {"5": 1}},
    {"structured_outputs": {"regex": "[a-z]+"}},
]


@pytest.fixture
def bundle(random_bundle: Path, tmp_path: Path) -> Path:
    return copy_bundle(random_bundle, tmp_path)


@pytest.fixture
def http(bundle: Path) -> Iterator[TestClient]:
    with (
        load(bundle, "cpu", threads=1) as session,
        TestClient(make_app(session, ServeOptions(model_name="m"))) as http,
    ):
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
        yield http


@pytest.mark.parametrize("way", REPLACEMENTS)
def test_every_request_is_answered_after_the_bundle_was_replaced(
    bundle: Path, http: TestClient, subset_bundle: Path, way: str
):
    REPLACEMENTS[way](bundle, subset_bundle)
    for fields in KINDS:
        answer = http.post("/v1/completions", json=COMPLETION | fields)
        assert answer.status_code == 200, answer.text
    assert http.get("/ready").status_code == http.get("/health").status_code == 200


def test_a_server_whose_bundle_was_written_is_not_ready(bundle: Path, http: TestClient):
    assert http.get("/ready").status_code == 200
    write_into(bundle / "trunk.onnx.data")
    assert http.get("/ready").status_code == http.get("/health").status_code == 503
    for fields in (*KINDS, {"stream": True}):
        problem = expect_error(http.post("/v1/completions", json=COMPLETION | fields), 503)
        assert problem["message"].startswith("the bundle has changed")
    assert http.get("/ready").status_code == 503
