"""If a pass fails, its requests get an error, also as an event of a stream. The server goes on."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from changed_pass_run import pass_run_with_hook
from running import Server, expect_error


def failing_pass_run(marker: object) -> list[str]:
    """Return a command for pass-run: passes take 20 ms, and fail while the file `marker` exists."""
    return pass_run_with_hook(
        "time.sleep(0.02)",
        f"if Path({str(marker)!r}).exists():",
        "    raise RuntimeError('the device is on fire')",
    )


@pytest.mark.slow
def test_requests_of_a_failed_pass_get_an_error_and_later_ones_do_not(random_bundle, tmp_path):
    marker = tmp_path / "marker"
    fields = {"prompt": "a", "max_tokens": 500, "plan": "ar", "ignore_eos": True}
    with Server(random_bundle, tmp_path / "log", command=failing_pass_run(marker)) as server:
        body = fields | {"model": server.model, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            marker.touch()
            *_, last, done = [line.removeprefix("data: ") for line in lines if line]
        assert response.status_code == 200
        assert done == "[DONE]"
        problem = {"message": "internal error", "type": "server_error", "param": None, "code": None}
        assert json.loads(last)["error"] == problem
        marker.unlink()
        body = {"model": server.model, "input": "a", "max_output_tokens": 500, "stream": True}
        extra = {"plan": "ar", "ignore_eos": True}
        events = server.client().responses.create(**body, extra_body=extra)
        received = [event for _, event in zip(range(8), events, strict=False)]
        marker.touch()
        received += events
        assert [event.sequence_number for event in received] == list(range(len(received)))
        last_types = [event.type for event in received[-2:]]
        assert last_types == ["response.output_text.delta", "response.failed"]
        failed = received[-1].response
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        assert failed.error.message == "internal error"
        assert failed.output[0].status == "incomplete"
        assert failed.output_text == "".join(getattr(event, "delta", "") for event in received)
        expect_error(server.complete(**fields), 500)
        expect_error(server.complete(**fields, stream=True), 500)  # before anything was written
        with pytest.raises(openai.InternalServerError):
            server.client().completions.create(model=server.model, prompt="a")
        assert "the device is on fire" in server.log_text
        marker.unlink()
        assert server.complete(max_tokens=4).status_code == 200
        assert server.metric("vllm:num_requests_running") == 0
        errors = server.metric("vllm:request_success_total", finished_reason="error")
        assert errors == 5  # all of the above
