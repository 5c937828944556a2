"""pass-cpp on the command line: its output, and its errors, which are those of pass-run."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cpp_programs import BUILD, ROOT, program_at

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.bundle import integrity
from pass_runtime.bundle.read import read_manifest
from pass_runtime.cli.prompt_io import read_prompt
from pass_runtime.errors import PassError

IDS = "5,6,7"
PROMPT = "Über naïve\nThe quick brown fox"
QUICK = ("--max-new-tokens", "8", "--repeat", "2", "--prompt-ids", IDS, "--prompt-ids", "9,8,7,6")


@pytest.fixture(scope="session")
def program() -> Path:
    return program_at("pass-cpp")


def run(
    program: Path, *arguments: object, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [program, *map(str, arguments)], input=stdin, capture_output=True, timeout=60, check=False
    )


def output(program: Path, *arguments: object, stdin: bytes = b"") -> str:
    done = run(program, *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_bench_reports_the_time_outside_the_engine(program: Path, random_bundle: Path):
    report = json.loads(output(program, "bench", random_bundle, *QUICK, "--batch", "1,2", "--json"))
    names = ["ar", "two-pass L=6", "fused L=6", "auto"]
    assert [plan["plan"] for plan in report["plans"]] == [
        f"{name} x{size}" for size in (1, 2) for name in names
    ]
    assert all(
        0 < plan["host_milliseconds_per_pass"] < plan["milliseconds_per_pass"]
        for plan in report["plans"]
    )
    table = output(program, "bench", random_bundle, *QUICK, "--plan", "ar")
    host = table.splitlines()[2].split()[4]
    assert "host" in table and 0 < float(host) < 1


def test_processors_are_those_of_python(program: Path, random_bundle: Path):
    flags = [
        "--presence-penalty",
        "1.5",
        "--frequency-penalty",
        "0.5",
        "--repetition-penalty",
        "1.2",
    ]
    # The last bias of a token counts.
    flags += ["--logit-bias", "9=100", "--logit-bias", "9=-100", "--logit-bias", "17=2.5"]
    flags += ["--min-tokens", "6", "--allowed-token-id", "11"]
    flags += [word for token in range(12, 90, 2) for word in ("--allowed-token-id", str(token))]
    sampling = SamplingParams(0, 0, 1, None, 0, 1.5, 0.5, 1.2, {9: -100, 17: 2.5})
    options = GenerateOptions(
        20, sampling, plan="ar", min_tokens=6, allowed_token_ids=[11, *range(12, 90, 2)]
    )
    with load(random_bundle, "cpu", threads=1) as session:
        expected = session.generate_ids([5, 6, 7], options).result().token_ids
    words = ("--json", "--max-new-tokens", "20", "--prompt-ids", IDS, *flags)
    for plan in ("ar", "two-pass", "fused", "auto"):
        assert (
            json.loads(output(program, "generate", random_bundle, *words, "--plan", plan))[
                "token_ids"
            ]
            == expected
        )
    banned = [flag for token in expected[:2] for flag in ("--bad-word-ids", str(token))]
    without = json.loads(output(program, "generate", random_bundle, *words, *banned))["token_ids"]
    assert not {*expected[:2]} & {*without}


def answer(program: Path, bundle: Path, *arguments: object, stdin: bytes = b"") -> dict:
    flags = ("--json", "--max-new-tokens", 4, "--plan", "ar", "--trust-bundle")
    done = run(program, "generate", bundle, *flags, *arguments, stdin=stdin)
    if b"onnxruntime-genai" in done.stderr:
        pytest.skip("onnxruntime-genai is not installed (extra peers)")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(program: Path, *arguments: object, stdin: bytes = b"") -> str:
    """Run a command that must fail with status 2 and one line on stderr. Returns its message."""
    done = run(program, *arguments, stdin=stdin)
    assert (done.returncode, done.stdout) == (2, b""), done.stderr
    line = done.stderr.decode()
    assert line.startswith("error: ") and line.count("\n") == 1 and line.endswith("\n")
    return line.removeprefix("error: ").removesuffix("\n")


def test_files_are_hashed_once(
    program: Path, random_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each runtime trusts the hashes that the other one cached, and reads the other files."""
    monkeypatch.setenv("PASS_CACHE", str(tmp_path / "cache"))
    bundle, kept = tmp_path / "bundle", tmp_path / "cache" / "hashes.txt"
    shutil.copytree(random_bundle, bundle)
    flags = ("generate", bundle, "--prompt-ids", IDS, "--max-new-tokens", 2, "--plan", "ar")
    assert run(program, *flags).returncode == 0
    assert not kept.exists()  # the files are too young
    monkeypatch.setattr(integrity, "MIN_AGE_NS", 0)
    load(bundle, "cpu").close()
    lines = kept.read_text()
    assert len(lines.splitlines()) == len(read_manifest(bundle).files)

    changed = bundle / "chat_template.jinja"
    before = integrity._identity(changed)
    changed.write_bytes(changed.read_bytes()[:-1] + b" ")
    assert "chat_template.jinja does not match its SHA-256" in refusal(program, *flags)
    kept.write_text(lines.replace(before, integrity._identity(changed)))
    assert run(program, *flags).returncode == 0
    kept.write_bytes(b"\xff no such line\n\n")
    assert "chat_template.jinja does not match its SHA-256" in refusal(program, *flags)


@pytest.mark.slow
def test_hashes_are_cached_for_python(
    program: Path, random_bundle: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("PASS_CACHE", str(tmp_path / "cache"))
    time.sleep(2.1)  # the files have settled
    assert (
        run(
            program, "generate", random_bundle, "--prompt-ids", IDS, "--max-new-tokens", 2
        ).returncode
        == 0
    )
    monkeypatch.setattr(integrity, "file_info", None)  # reading any would fail
    load(random_bundle, "cpu").close()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["hashes.txt"]


def test_trees_that_could_change_texts_are_refused(program: Path, rounding_bundle: Path):
    with (
        load(rounding_bundle, "cpu", threads=1) as session,
        pytest.raises(PassError, match="could change") as caught,
    ):
        session.generate_ids([5, 6, 7], GenerateOptions(plan="tree-5"))
    flags = ("--prompt-ids", IDS, "--max-new-tokens", 2)
    assert refusal(program, "generate", rounding_bundle, *flags, "--plan", "tree-5") == str(
        caught.value
    )
    assert run(program, "generate", rounding_bundle, *flags, "--plan", "fused").returncode == 0


def complaint(prompt: str | None, file: Path | None, *, keep_newline: bool = False) -> str:
    """Return the Python runtime's error for a prompt."""
    with pytest.raises(PassError) as caught:
        read_prompt(prompt, file, keep_newline=keep_newline)
    return str(caught.value)


@pytest.mark.slow
def test_a_prompt_is_the_same_from_every_source(program: Path, tiny_bundle: Path, tmp_path: Path):
    given = answer(program, tiny_bundle, "-p", PROMPT)
    assert len(given["prompt_ids"]) > 4 and given["text"]
    file = tmp_path / "prompt.txt"
    for before, behind in ((b"", b""), (b"", b"\n"), (b"", b"\r\n"), (b"\xef\xbb\xbf", b"")):
        content = before + PROMPT.encode() + behind
        file.write_bytes(content)
        assert (
            answer(program, tiny_bundle, "--prompt-file", file)["prompt_ids"] == given["prompt_ids"]
        )
        for flags in ((), ("--prompt-file", "-")):
            assert answer(program, tiny_bundle, *flags, stdin=content)["text"] == given["text"]
    kept = answer(program, tiny_bundle, "-p", PROMPT + "\n")["prompt_ids"]
    assert kept != given["prompt_ids"]
    assert (
        answer(program, tiny_bundle, "--keep-newline", stdin=PROMPT.encode() + b"\n")["prompt_ids"]
        == kept
    )
    # exactly one
    assert answer(program, tiny_bundle, stdin=PROMPT.encode() + b"\n\n")["prompt_ids"] == kept
    assert answer(program, tiny_bundle, stdin=b"\n")["prompt_ids"] == [0]


def test_refused_prompts(program: Path, tiny_bundle: Path, tmp_path: Path):
    latin1 = tmp_path / "latin1.txt"
    latin1.write_bytes("Straße".encode("latin-1"))
    bundle = ("generate", tiny_bundle)
    for file in (latin1, tmp_path / "missing.txt", tmp_path):
        assert refusal(program, *bundle, "--prompt-file", file) == complaint(None, file)
    assert refusal(program, *bundle, "--prompt-file", "x", "-p", "a") == complaint("a", Path("x"))
    assert refusal(program, *bundle, "--keep-newline", "-p", "a") == complaint(
        "a", None, keep_newline=True
    )
    assert (
        refusal(program, *bundle, stdin=b"\xff\xfe")
        == "the prompt in standard input is not UTF-8 text"
    )
    assert "--prompt-ids or as text" in refusal(program, *bundle, "--prompt-ids", IDS, "-p", "a")
    assert "--prompt-ids is taken as it is" in refusal(
        program, *bundle, "--prompt-ids", IDS, "--keep-newline"
    )


def test_a_closed_standard_input(program: Path, tiny_bundle: Path):
    command = ["sh", "-c", 'exec "$@" <&-', "sh", str(program), "generate", str(tiny_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "error: standard input is closed: give the prompt in another way\n"
    assert done.returncode == 2


def test_a_prompt_that_is_typed(program: Path, tiny_bundle: Path):
    """A single Ctrl-D ends the prompt."""
    given = answer(program, tiny_bundle, "-p", PROMPT)
    master, slave = pty.openpty()
    os.write(master, PROMPT.encode() + b"\n\x04")
    flags = ["--json", "--max-new-tokens", "4", "--plan", "ar", "--trust-bundle"]
    command = [program, "generate", tiny_bundle, *flags]
    done = subprocess.run(command, stdin=slave, capture_output=True, timeout=60, check=True)
    os.close(slave)
    os.close(master)
    assert done.stderr == b"reading the prompt from the terminal; end with Ctrl-D\n"
    assert json.loads(done.stdout)["prompt_ids"] == given["prompt_ids"]


@pytest.mark.parametrize("as_text", [False, True], ids=["ids", "text"])
def test_drafts_are_shown(program: Path, random_bundle: Path, as_text: bool):
    """In a terminal, drafts have the colours of pass-run; the legend counts them."""
    prompt = ("-p", "th th th th th th") if as_text else ("--prompt-ids", IDS + ",5,6,7,5,6")
    flags = [
        "--plan",
        "fused",
        "--draft",
        "both",
        "--max-new-tokens",
        "60",
        "--ignore-eos",
        "--trust-bundle",
    ]
    flags += ["--temperature", "1", "--seed", "2"]
    if as_text:
        answer(program, random_bundle, "-p", "a")  # is there a tokenizer?
    plain = output(program, "generate", random_bundle, *prompt, *flags)
    report = json.loads(output(program, "generate", random_bundle, *prompt, *flags, "--json"))
    stats = report["stats"]
    assert stats["accepted"] > 0
    shown, legend = shown_in_a_terminal(
        program, "generate", random_bundle, *prompt, *flags, "--show-drafts"
    )
    assert "".join(re.split("\x1b\\[[0-9]*m", shown)) == plain
    counts = {name: int(number) for number, name in re.findall(r"(\d+) ([a-z' -]+)", legend)}
    drafts = counts.get("look-ahead drafts", 0) + counts.get("n-gram drafts", 0)
    assert drafts + counts["the model's own"] == 60 and 0 < drafts <= stats["accepted"]
    marks = shown.count("\x1b[32m") + shown.count("\x1b[36m")
    # a token may have no text of its own
    assert 0 < marks <= drafts if as_text else marks == drafts


def shown_in_a_terminal(program: Path, *arguments: object) -> tuple[str, str]:
    """Return what is written to standard output, a terminal, and to standard error, a pipe."""
    master, slave = pty.openpty()
    with os.fdopen(master, "rb", buffering=0) as terminal:
        done = subprocess.run(
            [program, *map(str, arguments)],
            stdout=slave,
            stderr=subprocess.PIPE,
            timeout=60,
            check=True,
        )
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while read := terminal.read(4096):
                shown += read
    return shown.decode().replace("\r\n", "\n"), done.stderr.decode()


def test_a_trunk_that_cannot_be_loaded_is_named(program: Path, tiny_bundle: Path, tmp_path: Path):
    """ONNX Runtime ends a session whose threads have not begun to work."""
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    trunk = bundle / "trunk.cpu.one.onnx"
    content = trunk.read_bytes()
    trunk.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    message = refusal(
        program, "generate", bundle, "--prompt-ids", IDS, "--threads", 4, "--trust-bundle"
    )
    assert message.startswith(f"onnxruntime cannot load {trunk}: ")


NUMBERS = (
    "--max-new-tokens",
    "--threads",
    "--capacity",
    "--lookahead",
    "--stop-token-id",
    "--logprobs",
    "--top-k",
)
OTHERS = (
    "--temperature",
    "--seed",
    "--stop",
    "--plan",
    "--draft",
    "--device",
    "--onnxruntime",
    "--prompt-ids",
)


@pytest.mark.parametrize("flag", (*NUMBERS, *OTHERS))
def test_empty_values_are_refused(program: Path, tiny_bundle: Path, flag: str):
    """CLI11 alone would read them as 0."""
    assert refusal(program, "generate", tiny_bundle, flag, "").startswith(
        f"{flag}: the value is empty"
    )


@pytest.mark.parametrize(
    "value", ["12abc", "0x10", "1e1", "1_0", "99999999999999999999", "+", "-", "1 2"]
)
def test_what_is_no_number_is_refused(program: Path, tiny_bundle: Path, value: str):
    for flag in NUMBERS:
        assert f"'{value}' is not a whole number" in refusal(
            program, "generate", tiny_bundle, flag, value
        )
    assert "max-new-tokens must be at least 1" in refusal(
        program, "generate", tiny_bundle, "--max-new-tokens", "-3"
    )
    for text in ("0x1p3", "1e999", "0.8x"):
        assert f"'{text}' is not a number" in refusal(
            program, "generate", tiny_bundle, "--temperature", text
        )


def test_numbers_are_decimal(program: Path, tiny_bundle: Path):
    """010 is ten, as for pass-run, and not eight."""
    flags = ("--prompt-ids", IDS, "--ignore-eos", "--plan", "ar", "--max-new-tokens")
    assert len(output(program, "generate", tiny_bundle, *flags, "010").split()) == 10


@pytest.mark.parametrize("ids", ["1,,2", ",", "1,2,", ",1", "1;2", "1,x", " ", "1.5"])
def test_prompt_ids_that_are_no_list(program: Path, tiny_bundle: Path, ids: str):
    expected = f"--prompt-ids must list token ids, as in 1,2,3, not '{ids}'"
    if ids.strip():
        assert refusal(program, "generate", tiny_bundle, "--prompt-ids", ids) == expected
        assert refusal(program, "bench", tiny_bundle, "--prompt-ids", ids) == expected
    else:
        assert "--prompt-ids must list token ids" in refusal(
            program, "generate", tiny_bundle, "--prompt-ids", ids
        )


@pytest.mark.parametrize("sizes", ["1,,2", "0", "2,-1", "1,x", "99999999999"])
def test_batches_that_are_no_list(program: Path, tiny_bundle: Path, sizes: str):
    line = refusal(program, "bench", tiny_bundle, "--prompt-ids", IDS, "--batch", sizes)
    assert line == f"--batch must list numbers of sequences, as in 1,2,4,8, not '{sizes}'"


def test_an_interrupted_generation_as_json(program: Path, tiny_bundle: Path):
    """The tokens that were written before are printed."""
    flags = ("--prompt-ids", IDS, "--ignore-eos", "--plan", "ar", "--json", "--max-new-tokens", 760)
    command = [program, "generate", tiny_bundle, *map(str, flags)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        status = Path(f"/proc/{running.pid}/status")
        while running.poll() is None and not _handles(status.read_text(), signal.SIGTERM):
            time.sleep(0.001)
        running.send_signal(signal.SIGINT)
        printed, errors = running.communicate(timeout=60)
    # it may have been done
    assert (running.returncode, errors) in [(130, "interrupted\n"), (0, "")]
    found, whole = json.loads(printed), json.loads(output(program, "generate", tiny_bundle, *flags))
    assert found["finish_reason"] == ("length" if len(found["token_ids"]) == 760 else "cancelled")
    assert whole["token_ids"][: len(found["token_ids"])] == found["token_ids"]


def _handles(status: str, number: int) -> bool:
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", status)
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.slow
def test_the_example_of_the_readme(program: Path, tmp_path: Path):
    """It compiles, and reports a wrong path in one line."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no compiler")
    page = (ROOT / "runtime/cpp/README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```cpp\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "example.cpp").write_text(code)
    flags = ("-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", ROOT / "runtime/cpp/include")
    link = ("-L", BUILD, f"-Wl,-rpath,{BUILD}", "-lpass")
    command = [compiler, *flags, tmp_path / "example.cpp", "-o", tmp_path / "example", *link]
    subprocess.run(command, check=True, timeout=120)
    done = subprocess.run(
        [tmp_path / "example"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 2) and done.stdout == ""
    assert (
        done.stderr.startswith("error: build/smollm2-135m is not a bundle")
        and done.stderr.count("\n") == 1
    )
