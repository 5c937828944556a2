"""`pass-run serve` as a process: its command line, connections, passes that fail, and its end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from changed_pass_run import pass_run_with_hook, slow_pass_run
from in_process import App
from metered import wait_until
from replacing import copy_bundle, write_into
from running import ENDLESS, PASS_RUN, Server, expect_error

from pass_runtime import load
from pass_server.serve_options import check_exposure, read_keys
from pass_server.server import listen


def error_line(*arguments: object) -> str:
    """Run `pass-run serve`, which must refuse. Return its one line on stderr."""
    command = [*PASS_RUN, "serve", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stderr


def test_listening_to_a_network_needs_keys_or_a_flag(random_bundle):
    message = error_line(random_bundle, "--host", "0.0.0.0")
    assert "--api-key-file" in message
    assert "--allow-no-key" in message


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_hosts_that_need_keys(host):
    with pytest.raises(Exception, match="--allow-no-key"):
        check_exposure(host, (), allow_no_key=False)
    check_exposure(host, ("key",), allow_no_key=False)
    check_exposure(host, (), allow_no_key=True)
    for own in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_exposure(own, (), allow_no_key=False)


def test_a_key_file_has_one_key_a_line_and_comments(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# comment\n one \n\ntwo\n")
    assert read_keys(path) == ("one", "two")
    path.write_text("# comment\n")
    with pytest.raises(Exception, match="has no key"):
        read_keys(path)


def test_a_port_that_is_taken_is_refused_with_the_flags_to_change(random_bundle):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        message = error_line(random_bundle, "--port", taken.getsockname()[1])
        assert "Address already in use; choose another with --host and --port" in message


@pytest.mark.slow
def test_wrong_limits_are_refused(random_bundle):
    assert "max-queue" in error_line(random_bundle, "--max-queue", -1)
    assert "request-seconds" in error_line(random_bundle, "--request-seconds", 0)


@pytest.mark.parametrize("missing", ["fastapi", "pass_server"])
def test_a_missing_package_of_the_extra_serve_is_named(random_bundle, missing):
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\n"  # importing it raises ImportError
        f"sys.argv = ['pass-run', 'serve', {str(random_bundle)!r}]\n"
        "from pass_runtime.cli.main import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    command = "pip install 'pass-toolkit[serve]'"
    assert done.stderr == f"error: {missing} is not installed; run: {command}\n"


def test_no_client_plan_refuses_plans_of_clients(session):
    app = App(session, client_plans=False)
    for fields, param in (({"plan": "ar"}, "plan"), ({"speculative": False}, "speculative")):
        problem = expect_error(app.complete(max_tokens=2, **fields), 400)
        assert (problem["param"], problem["code"]) == (param, "unsupported_parameter")
    assert expect_error(app.complete(max_tokens=2, lookahead=0), 400)["param"] == "lookahead"
    allowed = ({"plan": "auto"}, {"speculative": True}, {"lookahead": 2}, {"draft": "ngram"})
    for fields in ({}, *allowed):
        assert app.complete(max_tokens=2, **fields).status_code == 200, fields


def test_a_server_whose_bundle_was_written_answers_503_and_is_not_ready(random_bundle, tmp_path):
    """So whoever watches it starts it again."""
    bundle = copy_bundle(random_bundle, tmp_path)
    with load(bundle, "cpu", threads=1) as session:
        app = App(session)
        assert app.complete(max_tokens=4).status_code == 200
        assert app.http.get("/ready").status_code == 200
        write_into(bundle / "trunk.onnx.data")
        assert {app.http.get(path).status_code for path in ("/ready", "/health")} == {503}
        for fields in ({}, {"plan": "fused"}, {"logprobs": 2}, {"stream": True}):
            problem = expect_error(app.complete(max_tokens=4, **fields), 503)
            assert problem["message"].startswith("the bundle has changed")
        assert app.http.get("/ready").status_code == 503


def test_accepted_sockets_have_tcp_nodelay():
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()[:2]):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.slow
def test_a_connection_without_a_next_request_is_closed(server):
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200 OK" in b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.mark.slow
def test_requests_on_too_many_connections_get_status_503(random_bundle, tmp_path):
    flags, slow = ("--max-connections", 2), slow_pass_run(0.05)
    with (
        Server(random_bundle, tmp_path / "log", *flags, command=slow) as server,
        server.stream(),
    ):
        assert server.complete(max_tokens=1).status_code == 200
        with server.stream():
            assert server.complete(max_tokens=1).status_code == 503


@pytest.mark.slow
def test_requests_of_a_failed_pass_get_an_error_and_later_ones_do_not(random_bundle, tmp_path):
    marker = tmp_path / "marker"  # passes take 20 ms, and fail while it exists
    failing = pass_run_with_hook(
        "time.sleep(0.02)",
        f"if Path({str(marker)!r}).exists():",
        "    raise RuntimeError('the device is on fire')",
    )
    with Server(random_bundle, tmp_path / "log", command=failing) as server:
        with server.stream() as events:
            marker.touch()
            *_, last, done = events
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
        expect_error(server.complete(**ENDLESS), 500)
        expect_error(server.complete(**ENDLESS, stream=True), 500)  # before anything was written
        assert "the device is on fire" in server.log_text
        marker.unlink()
        assert server.complete(max_tokens=4).status_code == 200
        assert server.metric("vllm:num_requests_running") == 0
        errors = server.metric("vllm:request_success_total", finished_reason="error")
        assert errors == 4  # all of the above


def wait_until_draining(server) -> None:
    wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)


@pytest.mark.slow
def test_after_sigterm_running_answers_are_finished_and_others_refused(random_bundle, tmp_path):
    with (
        Server(random_bundle, tmp_path / "log", command=slow_pass_run(0.05)) as server,
        server.stream(max_tokens=80) as events,
    ):
        server.terminate()
        wait_until_draining(server)
        refused = server.complete()
        assert expect_error(refused, 503)["code"] == "shutting_down"
        assert "Retry-After" in refused.headers
        assert httpx.get(f"{server.url}/health").status_code == 200
        *_, last, done = events
        assert done == "[DONE]"
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert server.exit_status() == 0


@pytest.mark.slow
@pytest.mark.parametrize("second_signal", [False, True])
def test_answers_get_an_error_after_drain_seconds_or_at_a_second_signal(
    random_bundle, tmp_path, second_signal
):
    flags = ("--drain-seconds", 60 if second_signal else 0.5)
    with (
        Server(random_bundle, tmp_path / "log", *flags, command=slow_pass_run(0.05)) as server,
        server.stream() as events,
    ):
        server.terminate()
        if second_signal:
            wait_until_draining(server)
            server.terminate()
        *_, last, done = events
        assert done == "[DONE]"
        assert json.loads(last)["error"]["code"] == "shutting_down"
        assert server.exit_status() == 0


@pytest.mark.slow
def test_ctrl_c_ends_it_with_status_0(random_bundle, tmp_path):
    with Server(random_bundle, tmp_path / "log") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.exit_status() == 0
        assert "Traceback" not in server.log_text
        assert f"\na page to try it: {server.url}/\n" in server.log_text
