"""The command line of `pass-run serve`: which hosts need keys, refused flags, and Ctrl-C."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import httpx
import pytest
from running import PASS_RUN, Server, expect_error

from pass_server.serve_options import check_exposure, read_keys


def error_line(*arguments: object) -> str:
    """Run `pass-run` with arguments that it must refuse, and return its one line on stderr."""
    command = [*PASS_RUN, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stderr


def test_listening_to_a_network_needs_keys_or_a_flag(random_bundle):
    message = error_line("serve", random_bundle, "--host", "0.0.0.0")
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
        message = error_line("serve", random_bundle, "--port", taken.getsockname()[1])
        assert "Address already in use; choose another with --host and --port" in message


@pytest.mark.slow
def test_no_client_plan_refuses_plans_of_clients(random_bundle, tmp_path):
    flags = ("--no-client-plan", "--max-batch-size", 2)
    with Server(random_bundle, tmp_path / "log", *flags) as server:
        for fields, param in (({"plan": "ar"}, "plan"), ({"speculative": False}, "speculative")):
            problem = expect_error(server.complete(max_tokens=2, **fields), 400)
            assert (problem["param"], problem["code"]) == (param, "unsupported_parameter")
        assert expect_error(server.complete(max_tokens=2, lookahead=0), 400)["param"] == "lookahead"
        allowed = ({"plan": "auto"}, {"speculative": True}, {"lookahead": 2}, {"draft": "ngram"})
        for fields in ({}, *allowed):
            assert server.complete(max_tokens=2, **fields).status_code == 200, fields


@pytest.mark.slow
def test_no_page_serves_no_page(random_bundle, tmp_path):
    with Server(random_bundle, tmp_path / "log", "--no-page") as server:
        assert httpx.get(f"{server.url}/").status_code == 404
    assert "try it" not in server.log_text


@pytest.mark.slow
def test_wrong_limits_are_refused(random_bundle):
    assert "max-queue" in error_line("serve", random_bundle, "--max-queue", -1)
    assert "request-seconds" in error_line("serve", random_bundle, "--request-seconds", 0)


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


@pytest.mark.slow
def test_ctrl_c_ends_it_with_status_0(random_bundle, tmp_path):
    with Server(random_bundle, tmp_path / "log") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.exit_status() == 0
        assert "Traceback" not in server.log_text
        assert f"\na page to try it: {server.url}/\n" in server.log_text
