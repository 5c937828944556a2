"""pass-run serve and pass-run chat --server, as somebody types them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading

import pytest
from changed_pass_run import slow_pass_run
from running import PASS_RUN, Server, error

from pass_runtime import GenerateOptions
from pass_server.serve_options import check_exposure, read_keys


def run(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    line = [*PASS_RUN, *map(str, arguments)]
    return subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def refused(*arguments: object) -> str:
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_network_without_keys_has_to_be_said_twice(random_bundle):
    message = refused("serve", random_bundle, "--host", "0.0.0.0")
    assert "--api-key-file" in message
    assert "--allow-no-key" in message


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_what_is_exposed(host):
    with pytest.raises(Exception, match="--allow-no-key"):
        check_exposure(host, (), allow_no_key=False)
    check_exposure(host, ("key",), allow_no_key=False)
    check_exposure(host, (), allow_no_key=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_what_is_not(host):
    check_exposure(host, (), allow_no_key=False)


def test_keys_are_read(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# comment\n one \n\ntwo\n")
    assert read_keys(path) == ("one", "two")
    path.write_text("# comment\n")
    with pytest.raises(Exception, match="has no key"):
        read_keys(path)


def test_a_port_that_is_taken(random_bundle):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        message = refused("serve", random_bundle, "--port", taken.getsockname()[1])
        assert "Address already in use; choose another with --host and --port" in message


def test_a_server_that_chooses_how_to_decode(random_bundle, tmp_path):
    with Server(random_bundle, tmp_path / "log", "--no-client-plan", "--max-batch-size", 2) as server:
        for fields, param in (({"plan": "ar"}, "plan"), ({"speculative": False}, "speculative")):
            problem = error(server.complete(max_tokens=2, **fields), 400)
            assert (problem["param"], problem["code"]) == (param, "unsupported_parameter")
        assert error(server.complete(max_tokens=2, lookahead=0), 400)["param"] == "lookahead"
        for fields in ({}, {"plan": "auto"}, {"speculative": True}, {"lookahead": 2}, {"draft": "ngram"}):
            assert server.complete(max_tokens=2, **fields).status_code == 200, fields


def test_wrong_limits(random_bundle):
    assert "max-queue" in refused("serve", random_bundle, "--max-queue", -1)
    assert "request-seconds" in refused("serve", random_bundle, "--request-seconds", 0)


@pytest.mark.parametrize("missing", ["fastapi", "pass_server"])
def test_without_the_extra(random_bundle, missing):
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\n"
        f"sys.argv = ['pass-run', 'serve', {str(random_bundle)!r}]\n"
        "from pass_runtime.cli.main import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: {missing} is not installed: pip install 'pass-toolkit[serve]'\n"


def test_ctrl_c_ends_it_with_status_0(random_bundle, tmp_path):
    import signal

    with Server(random_bundle, tmp_path / "log") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == 0
        assert "Traceback" not in server.said


def test_a_chat_with_a_server(server, session, tmp_path):
    done = run("chat", "--server", server.url, "--max-new-tokens", 12, stdin="Hello\n/save %s\n" % (tmp_path / "said"))
    assert done.returncode == 0, done.stderr
    expected = session.chat([{"role": "user", "content": "Hello"}], GenerateOptions(max_new_tokens=12)).result().text
    assert done.stdout == expected + "\n"
    assert [turn["content"] for turn in json.loads((tmp_path / "said").read_text())] == ["Hello", expected]
    again = run("chat", "--server", f"{server.url}/v1/", "--max-new-tokens", 12, stdin="Hello\nfor\n")
    assert again.stdout.startswith(expected + "\n")
    assert len(again.stdout) > len(expected) + 1


def test_a_chat_that_grows_too_long_forgets(server):
    line = "word " * 60
    done = run("chat", "--server", server.url, "--max-new-tokens", 20, stdin=f"{line}\n" * 4)
    assert done.returncode == 0
    assert "the context is full" in done.stderr
    assert "error" not in done.stderr
    kept = run("chat", "--server", server.url, "--context-overflow", "stop", stdin=f"{line}\n" * 4)
    assert "context" in kept.stderr
    assert "error: the server refuses" in kept.stderr and kept.returncode == 2


def test_a_chat_with_a_key_and_a_server_that_dies(random_bundle, tmp_path):
    keys, others = tmp_path / "keys", tmp_path / "others"
    keys.write_text("secret\n")
    others.write_text("guess\n")
    with Server(random_bundle, tmp_path / "log", "--api-key-file", keys, command=slow_pass_run(0.05)) as server:
        assert "wants an API key: name a file that has one with --api-key" in refused("chat", "--server", server.url)
        message = refused("chat", "--server", server.url, "--api-key-file", others)
        assert "does not know the API key" in message
        assert "guess" not in message
        chat = ("chat", "--server", server.url, "--api-key-file", keys)
        done = run(*chat, "--max-new-tokens", 4, stdin="Hello\n")
        assert done.returncode == 0, done.stderr
        killing = threading.Timer(2, server.process.kill)
        killing.start()
        done = run(*chat, "--max-new-tokens", 500, "--ignore-eos", "--plan", "ar", stdin="Hello\n")
        killing.join()
        assert done.stdout
        assert "went away in the middle of its answer" in done.stderr and done.returncode == 2


def test_chats_that_cannot_be(random_bundle):
    assert "--server" in refused("chat")
    assert "--server" in refused("chat", random_bundle, "--server", "http://127.0.0.1:1")
    assert "does not answer" in refused("chat", "--server", "http://127.0.0.1:1")
    assert "is a URL" in refused("chat", "--server", "127.0.0.1:1")
    assert "--threads" in refused("chat", "--server", "http://127.0.0.1:1", "--threads", 2)
    assert "--api-key-file" in refused("chat", random_bundle, "--api-key-file", "x")
