"""pass-cpp as people use it: its output, and its refusals in the words of pass-run."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cpp_programs import program_at

from pass_runtime.cli.prompts import read_prompt
from pass_runtime.errors import PassError

IDS = "5,6,7"
PROMPT = "Über naïve\nThe quick brown fox"
QUICK = ("--max-new-tokens", "8", "--repeat", "2", "--prompt-ids", IDS, "--prompt-ids", "9,8,7,6")


@pytest.fixture(scope="session")
def program() -> Path:
    return program_at("pass-cpp")


def run(program: Path, *arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([program, *map(str, arguments)], input=stdin, capture_output=True, timeout=60, check=False)


def output(program: Path, *arguments: object, stdin: bytes = b"") -> str:
    done = run(program, *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_bench_tells_what_the_host_takes(program: Path, random_bundle: Path):
    report = json.loads(output(program, "bench", random_bundle, *QUICK, "--batch", "1,2", "--json"))
    names = ["ar", "two-pass L=6", "fused L=6", "auto"]
    assert [plan["plan"] for plan in report["plans"]] == [f"{name} x{size}" for size in (1, 2) for name in names]
    assert all(0 < plan["host_milliseconds_per_pass"] < plan["milliseconds_per_pass"] for plan in report["plans"])
    table = output(program, "bench", random_bundle, *QUICK, "--plan", "ar")
    host = table.splitlines()[2].split()[4]
    assert "host" in table and 0 < float(host) < 1


def answer(program: Path, bundle: Path, *arguments: object, stdin: bytes = b"") -> dict:
    flags = ("--json", "--max-new-tokens", 4, "--plan", "ar", "--trust-bundle")
    done = run(program, "generate", bundle, *flags, *arguments, stdin=stdin)
    if b"onnxruntime-genai" in done.stderr:
        pytest.skip("onnxruntime-genai is not installed (extra peers)")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(program: Path, *arguments: object, stdin: bytes = b"") -> str:
    """Status 2, and nothing but one line on stderr, whose text is returned."""
    done = run(program, *arguments, stdin=stdin)
    assert (done.returncode, done.stdout) == (2, b""), done.stderr
    line = done.stderr.decode()
    assert line.startswith("error: ") and line.count("\n") == 1 and line.endswith("\n")
    return line.removeprefix("error: ").removesuffix("\n")


def complaint(prompt: str | None, file: Path | None, *, keep_newline: bool = False) -> str:
    """The Python runtime's."""
    with pytest.raises(PassError) as caught:
        read_prompt(prompt, file, keep_newline=keep_newline)
    return str(caught.value)


def test_a_prompt_is_the_same_from_every_source(program: Path, tiny_bundle: Path, tmp_path: Path):
    given = answer(program, tiny_bundle, "-p", PROMPT)
    assert len(given["prompt_ids"]) > 4 and given["text"]
    file = tmp_path / "prompt.txt"
    for before, behind in ((b"", b""), (b"", b"\n"), (b"", b"\r\n"), (b"\xef\xbb\xbf", b"")):
        content = before + PROMPT.encode() + behind
        file.write_bytes(content)
        assert answer(program, tiny_bundle, "--prompt-file", file)["prompt_ids"] == given["prompt_ids"]
        for flags in ((), ("--prompt-file", "-")):
            assert answer(program, tiny_bundle, *flags, stdin=content)["text"] == given["text"]
    kept = answer(program, tiny_bundle, "-p", PROMPT + "\n")["prompt_ids"]
    assert kept != given["prompt_ids"]
    assert answer(program, tiny_bundle, "--keep-newline", stdin=PROMPT.encode() + b"\n")["prompt_ids"] == kept
    assert answer(program, tiny_bundle, stdin=PROMPT.encode() + b"\n\n")["prompt_ids"] == kept  # exactly one
    assert answer(program, tiny_bundle, stdin=b"\n")["prompt_ids"] == [0]


def test_refused_prompts(program: Path, tiny_bundle: Path, tmp_path: Path):
    latin1 = tmp_path / "latin1.txt"
    latin1.write_bytes("Straße".encode("latin-1"))
    bundle = ("generate", tiny_bundle)
    for file in (latin1, tmp_path / "missing.txt", tmp_path):
        assert refusal(program, *bundle, "--prompt-file", file) == complaint(None, file)
    assert refusal(program, *bundle, "--prompt-file", "x", "-p", "a") == complaint("a", Path("x"))
    assert refusal(program, *bundle, "--keep-newline", "-p", "a") == complaint("a", None, keep_newline=True)
    assert refusal(program, *bundle, stdin=b"\xff\xfe") == "the prompt in standard input is not UTF-8 text"
    assert "--prompt-ids or as text" in refusal(program, *bundle, "--prompt-ids", IDS, "-p", "a")
    assert "--prompt-ids is taken as it is" in refusal(program, *bundle, "--prompt-ids", IDS, "--keep-newline")


def test_a_closed_standard_input(program: Path, tiny_bundle: Path):
    command = ["sh", "-c", 'exec "$@" <&-', "sh", str(program), "generate", str(tiny_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "error: standard input is closed: give the prompt in another way\n"
    assert done.returncode == 2


def test_a_prompt_that_is_typed(program: Path, tiny_bundle: Path):
    """Ctrl-D ends it, once."""
    given = answer(program, tiny_bundle, "-p", PROMPT)
    master, slave = pty.openpty()
    os.write(master, PROMPT.encode() + b"\n\x04")
    command = [program, "generate", tiny_bundle, "--json", "--max-new-tokens", "4", "--plan", "ar", "--trust-bundle"]
    done = subprocess.run(command, stdin=slave, capture_output=True, timeout=60, check=True)
    os.close(slave)
    os.close(master)
    assert done.stderr == b"reading the prompt from the terminal; end with Ctrl-D\n"
    assert json.loads(done.stdout)["prompt_ids"] == given["prompt_ids"]


@pytest.mark.parametrize("as_text", [False, True], ids=["ids", "text"])
def test_drafts_are_shown(program: Path, random_bundle: Path, as_text: bool):
    """In a terminal, in the colours of pass-run; the legend counts them."""
    prompt = ("-p", "th th th th th th") if as_text else ("--prompt-ids", IDS + ",5,6,7,5,6")
    flags = ("--plan", "fused", "--draft", "both", "--max-new-tokens", "60", "--ignore-eos", "--trust-bundle")
    flags = (*flags, "--temperature", "1", "--seed", "2")
    if as_text:
        answer(program, random_bundle, "-p", "a")  # is there a tokenizer?
    plain = output(program, "generate", random_bundle, *prompt, *flags)
    told = json.loads(output(program, "generate", random_bundle, *prompt, *flags, "--json"))
    stats = told["stats"]
    assert stats["accepted"] > 0
    shown, legend = shown_in_a_terminal(program, "generate", random_bundle, *prompt, *flags, "--show-drafts")
    assert "".join(re.split("\x1b\\[[0-9]*m", shown)) == plain
    counts = {name: int(number) for number, name in re.findall(r"(\d+) ([a-z' -]+)", legend)}
    drafts = counts.get("look-ahead drafts", 0) + counts.get("drafts from the text", 0)
    assert drafts + counts["the model's own"] == 60 and 0 < drafts <= stats["accepted"]
    marks = shown.count("\x1b[32m") + shown.count("\x1b[36m")
    assert 0 < marks <= drafts if as_text else marks == drafts  # a token may have no text of its own


def shown_in_a_terminal(program: Path, *arguments: object) -> tuple[str, str]:
    """What standard output got, which is a terminal, and standard error, which is none."""
    master, slave = pty.openpty()
    with os.fdopen(master, "rb", buffering=0) as terminal:
        done = subprocess.run(
            [program, *map(str, arguments)], stdout=slave, stderr=subprocess.PIPE, timeout=60, check=True
        )
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # nobody has the other end any more
            while read := terminal.read(4096):
                shown += read
    return shown.decode().replace("\r\n", "\n"), done.stderr.decode()


def test_a_trunk_that_cannot_be_loaded(program: Path, tiny_bundle: Path, tmp_path: Path):
    """ONNX Runtime gives up a session whose threads have not begun."""
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    trunk = bundle / "trunk.cpu.onnx"
    content = trunk.read_bytes()
    trunk.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    told = refusal(program, "generate", bundle, "--prompt-ids", IDS, "--threads", 4, "--trust-bundle")
    assert told.startswith(f"onnxruntime cannot load {trunk}: ")
