"""pass-cpp on the command line: what it prints, and its errors, which are those of pass-run."""

from __future__ import annotations

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
from pass_runtime.bundle.option import Option, options_of
from pass_runtime.bundle.read import read_manifest
from pass_runtime.cli.prompt_io import read_prompt
from pass_runtime.errors import PassError

IDS = "5,6,7"
PROMPT = "Über naïve\nThe quick brown fox"


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


def test_processors_are_those_of_python(program: Path, random_bundle: Path):
    # Of several biases of a token, the last one counts.
    words = "--presence-penalty 1.5 --frequency-penalty 0.5 --repetition-penalty 1.2"
    words += " --logit-bias 9=100 --logit-bias 9=-100 --logit-bias 17=2.5 --min-tokens 6"
    flags = [*words.split(), "--allowed-token-id", "11"]
    flags += [word for token in range(12, 90, 2) for word in ("--allowed-token-id", str(token))]
    sampling = SamplingParams(0, 0, 1, None, 0, 1.5, 0.5, 1.2, {9: -100, 17: 2.5})
    options = GenerateOptions(
        20, sampling, plan="ar", min_tokens=6, allowed_token_ids=[11, *range(12, 90, 2)]
    )
    with load(random_bundle, "cpu", threads=1) as session:
        expected = session.generate_ids([5, 6, 7], options).result().token_ids

    def token_ids(*more: str) -> list[int]:
        fixed = ("--json", "--max-new-tokens", 20, "--prompt-ids", IDS, *flags)
        return json.loads(output(program, "generate", random_bundle, *fixed, *more))["token_ids"]

    for plan in ("ar", "two-pass", "fused", "auto"):
        assert token_ids("--plan", plan) == expected
    bad_words = [flag for token in expected[:2] for flag in ("--bad-word-ids", str(token))]
    assert not {*expected[:2]} & {*token_ids(*bad_words)}


def answer(program: Path, bundle: Path, *arguments: object, stdin: bytes = b"") -> dict:
    """Return the report for a text. Skip the test if no library encodes text here."""
    flags = ("--json", "--max-new-tokens", 4, "--plan", "ar", "--trust-bundle")
    done = run(program, "generate", bundle, *flags, *arguments, stdin=stdin)
    if b"onnxruntime-genai" in done.stderr:
        pytest.skip("onnxruntime-genai is not installed (extra peers)")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(program: Path, *arguments: object, stdin: bytes = b"") -> str:
    """Return the one line with which a command must fail."""
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
    bundle, cache_file = tmp_path / "bundle", tmp_path / "cache" / "hashes.txt"
    shutil.copytree(random_bundle, bundle)
    flags = ("generate", bundle, "--prompt-ids", IDS, "--max-new-tokens", 2, "--plan", "ar")
    assert run(program, *flags).returncode == 0
    assert not cache_file.exists()  # hashes of files that changed a moment ago are not cached
    monkeypatch.setattr(integrity, "MIN_AGE_NS", 0)
    load(bundle, "cpu").close()
    lines = cache_file.read_text()
    assert len(lines.splitlines()) == len(read_manifest(bundle).files)

    changed = bundle / "chat_template.jinja"
    before = integrity._identity(changed)
    changed.write_bytes(changed.read_bytes()[:-1] + b" ")
    mismatch = "chat_template.jinja does not match its SHA-256"
    assert mismatch in refusal(program, *flags)
    # If the cache says that the file has the right hash, it is not read.
    cache_file.write_text(lines.replace(before, integrity._identity(changed)))
    assert run(program, *flags).returncode == 0
    cache_file.write_bytes(b"\xff no such line\n\n")
    assert mismatch in refusal(program, *flags)


@pytest.mark.slow
def test_hashes_are_cached_for_python(
    program: Path, random_bundle: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("PASS_CACHE", str(tmp_path / "cache"))
    time.sleep(2.1)  # hashes of files that changed in the last 2 s are not cached
    output(program, "generate", random_bundle, "--prompt-ids", IDS, "--max-new-tokens", 2)
    monkeypatch.setattr(integrity, "file_info", None)  # reading any file would fail
    load(random_bundle, "cpu").close()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["hashes.txt"]


def python_error(prompt: str | None, file: Path | None, *, keep_newline: bool = False) -> str:
    with pytest.raises(PassError) as caught:
        read_prompt(prompt, file, keep_newline=keep_newline)
    return str(caught.value)


@pytest.mark.slow
def test_a_prompt_is_the_same_from_every_source(program: Path, tiny_bundle: Path, tmp_path: Path):
    def prompt_ids(*flags: object, stdin: bytes = b"") -> list[int]:
        return answer(program, tiny_bundle, *flags, stdin=stdin)["prompt_ids"]

    given, encoded = answer(program, tiny_bundle, "-p", PROMPT), PROMPT.encode()
    ids = given["prompt_ids"]
    assert len(ids) > 4 and given["text"]
    file = tmp_path / "prompt.txt"
    for content in (encoded, encoded + b"\n", encoded + b"\r\n", b"\xef\xbb\xbf" + encoded):
        file.write_bytes(content)
        assert prompt_ids("--prompt-file", file) == ids
        assert prompt_ids(stdin=content) == prompt_ids("--prompt-file", "-", stdin=content) == ids
    with_newline = prompt_ids("-p", PROMPT + "\n")
    assert with_newline != ids
    assert prompt_ids("--keep-newline", stdin=encoded + b"\n") == with_newline
    # Exactly one newline is left out.
    assert prompt_ids(stdin=encoded + b"\n\n") == with_newline
    assert prompt_ids(stdin=b"\n") == [0]


def test_prompts_are_refused_as_in_python(program: Path, tiny_bundle: Path, tmp_path: Path):
    latin1 = tmp_path / "latin1.txt"
    latin1.write_bytes("Straße".encode("latin-1"))
    bundle = ("generate", tiny_bundle)
    for file in (latin1, tmp_path / "missing.txt", tmp_path):
        assert refusal(program, *bundle, "--prompt-file", file) == python_error(None, file)
    assert refusal(program, *bundle, "--prompt-file", "x", "-p", "a") == python_error(
        "a", Path("x")
    )
    assert refusal(program, *bundle, "--keep-newline", "-p", "a") == python_error(
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


def test_a_closed_standard_input_is_refused(program: Path, tiny_bundle: Path):
    command = ["sh", "-c", 'exec "$@" <&-', "sh", str(program), "generate", str(tiny_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "error: standard input is closed: give the prompt in another way\n"
    assert done.returncode == 2


def test_a_single_ctrl_d_ends_a_prompt_that_is_typed(program: Path, tiny_bundle: Path):
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


def test_a_trunk_that_cannot_be_loaded_is_named(program: Path, tiny_bundle: Path, tmp_path: Path):
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    trunk = bundle / "trunk.cpu.onnx"
    content = trunk.read_bytes()
    trunk.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    message = refusal(
        program, "generate", bundle, "--prompt-ids", IDS, "--threads", 4, "--trust-bundle"
    )
    assert message.startswith(f"onnxruntime cannot load {trunk}: ")


WHOLE_NUMBERS = (
    "--max-new-tokens --threads --capacity --lookahead --stop-token-id --logprobs --top-k"
)
OTHER_FLAGS = "--temperature --seed --stop --plan --draft --device --onnxruntime --prompt-ids"


@pytest.mark.parametrize("flag", f"{WHOLE_NUMBERS} {OTHER_FLAGS}".split())
def test_empty_values_are_refused(program: Path, tiny_bundle: Path, flag: str):
    """CLI11 would read an empty number as 0."""
    assert refusal(program, "generate", tiny_bundle, flag, "").startswith(
        f"{flag}: the value is empty"
    )


@pytest.mark.parametrize(
    "value", ["12abc", "0x10", "1e1", "1_0", "99999999999999999999", "+", "-", "1 2"]
)
def test_what_is_no_number_is_refused(program: Path, tiny_bundle: Path, value: str):
    for flag in WHOLE_NUMBERS.split():
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


@pytest.mark.parametrize("field", options_of(SamplingParams).values(), ids=lambda field: field.name)
def test_values_out_of_bounds_are_refused_as_in_python(
    program: Path, tiny_bundle: Path, field: Option
):
    """And the bounds themselves are taken."""
    flags = ("generate", tiny_bundle, "--prompt-ids", IDS, "--max-new-tokens", 1, "--plan", "ar")
    flag = "--" + field.name.replace("_", "-")
    for name, bound in field.bounds.items():
        step = 1 if field.type is int else 0.5
        beyond = bound - step if name in ("ge", "gt") else bound + step
        for number in (beyond, bound):
            if number == float("inf"):
                continue
            value = f"5={number}" if field.shape == "map" else number
            try:
                SamplingParams(**{field.name: {5: number} if field.shape == "map" else number})
            except PassError as error:
                assert refusal(program, *flags, flag, value) == str(error)
            else:
                assert run(program, *flags, flag, value).returncode == 0


def test_top_p_0_takes_the_likeliest_token(program: Path, random_bundle: Path):
    flags = ("generate", random_bundle, "--prompt-ids", IDS, "--max-new-tokens", 12, "--plan")
    for plan in ("ar", "two-pass", "fused"):
        greedy = output(program, *flags, plan)
        for top_p in ("0", "1e-300"):
            drawn = (plan, "--temperature", 1.3, "--top-k", -1, "--top-p", top_p)
            assert output(program, *flags, *drawn) == greedy
    assert output(program, *flags, "ar", "--temperature", 1.3, "--seed", 1) != greedy


def test_numbers_are_decimal(program: Path, tiny_bundle: Path):
    """010 is ten, as for pass-run, and not eight."""
    flags = ("--prompt-ids", IDS, "--ignore-eos", "--plan", "ar", "--max-new-tokens")
    assert len(output(program, "generate", tiny_bundle, *flags, "010").split()) == 10


@pytest.mark.parametrize("ids", ["1,,2", ",", "1,2,", ",1", "1;2", "1,x", " ", "1.5"])
def test_prompt_ids_that_are_no_list_are_refused(program: Path, tiny_bundle: Path, ids: str):
    expected = f"--prompt-ids must list token ids, as in 1,2,3, not '{ids}'"
    message = refusal(program, "generate", tiny_bundle, "--prompt-ids", ids)
    assert message == expected or (
        not ids.strip() and "--prompt-ids must list token ids" in message
    )


def interrupted(program: Path, bundle: Path, *flags: object) -> tuple[int, dict, str]:
    """Interrupt a command as soon as it begins to generate, when it handles both signals. Return
    its exit status, its report and its errors."""
    command = [program, "generate", bundle, "--json", "--ignore-eos", "--plan", "ar"]
    with subprocess.Popen(
        [*command, *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        status = Path(f"/proc/{running.pid}/status")
        while running.poll() is None and not _handles(status.read_text(), signal.SIGTERM):
            time.sleep(0.001)
        running.send_signal(signal.SIGINT)
        printed, errors = running.communicate(timeout=60)
    return running.returncode, json.loads(printed), errors


def test_an_interrupted_generation_prints_its_tokens_as_json(program: Path, tiny_bundle: Path):
    flags = ("--prompt-ids", IDS, "--max-new-tokens", 760)
    returncode, report, errors = interrupted(program, tiny_bundle, *flags)
    # All tokens may have been written before the signal came.
    assert (returncode, errors) in [(130, "interrupted\n"), (0, "")]
    tokens = report["token_ids"]
    assert report["finish_reason"] == ("length" if len(tokens) == 760 else "cancelled")
    fixed = ("--json", "--ignore-eos", "--plan", "ar", *flags)
    all_tokens = json.loads(output(program, "generate", tiny_bundle, *fixed))["token_ids"]
    assert all_tokens[: len(tokens)] == tokens


def test_an_interrupt_ends_the_reading_of_a_prompt(program: Path, tiny_bundle: Path):
    """Before its first token. On a busy machine the signal may come later, so there are tries."""
    prompt = ",".join(str(5 + i % 90) for i in range(760))
    for _ in range(20):
        flags = ("--prompt-ids", prompt, "--max-new-tokens", 2, "--threads", 1)
        returncode, report, errors = interrupted(program, tiny_bundle, *flags)
        if report["token_ids"] == []:
            break
    assert (report["token_ids"], report["finish_reason"]) == ([], "cancelled")
    assert (returncode, errors) == (130, "interrupted\n")


def _handles(status: str, number: int) -> bool:
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", status)
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.slow
def test_the_example_of_the_readme_compiles_and_runs(program: Path, tmp_path: Path):
    """Without the bundle that it names, it reports that in one line."""
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
