from __future__ import annotations

from pathlib import Path

from replacing import copy_bundle, write_into
from running import expect_error
from starlette.testclient import TestClient

from pass_runtime import load
from pass_server.app import make_app
from pass_server.serve_options import ServeOptions

COMPLETION = {"model": "m", "prompt": "The quick", "max_tokens": 4, "temperature": 0}


def test_a_server_whose_bundle_was_written_answers_503_and_is_not_ready(
    random_bundle: Path, tmp_path: Path
):
    """So whoever watches it starts it again."""
    bundle = copy_bundle(random_bundle, tmp_path)
    with (
        load(bundle, "cpu", threads=1) as session,
        TestClient(make_app(session, ServeOptions(model_name="m"))) as http,
    ):
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
        assert http.get("/ready").status_code == 200
        write_into(bundle / "trunk.onnx.data")
        assert http.get("/ready").status_code == http.get("/health").status_code == 503
        for fields in ({}, {"plan": "fused"}, {"logprobs": 2}, {"stream": True}):
            problem = expect_error(http.post("/v1/completions", json=COMPLETION | fields), 503)
            assert problem["message"].startswith("the bundle has changed")
        assert http.get("/ready").status_code == 503
