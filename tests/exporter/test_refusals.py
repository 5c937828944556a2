"""What pass-export cannot do is refused in one line, as early as possible, without output files."""

from __future__ import annotations

import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from export_process import PASS_EXPORT, command, error_line, process, wait_for

import pass_trainer.cli
from conftest import export_bundle
from pass_exporter import export
from pass_runtime import PassError
from pass_runtime.bundle.manifest import FileInfo

ENGINE = "--engine tensorrt-rtx --compute-capability 8.9"
FOR_FP32 = "--target cpu is for --dtype fp32, and --weights full"
NEVER_RUN = (
    "--trust-remote-code is refused: code that comes with a checkpoint is never run: take a model "
    "of"
)
REFUSED = {
    "--lookahead -1": "1 to 16",
    "--lookahead 0": "1 to 16",
    "--lookahead 17": "1 to 16",
    "--dtype int3": "'fp32', 'fp16'",
    "--weights w8a8": "there is no --weights w8a8: choose int8 or int4",
    "--weights source": "choose int4 or int8 (both keep the codes of a .gguf file)",
    "--weights int3": "choose one of full, int8, int4, fp8",
    "--weights fp8 --zero-points": "--zero-points is for --weights int4 and int8",
    f"--weights int4 --zero-points {ENGINE}": "TensorRT does not support zero points",
    "--weights full --calibrate short.txt": "--calibrate is for --weights int4: full needs no text",
    "--weights int8 --calibrate none": "--calibrate is for --weights int4: int8 needs no text",
    "--weights int4 --calibrate empty.txt": "--calibrate needs text",
    "--weights int4 --calibrate missing.txt": "No such file",
    "--weights int4 --calibrate short.txt --model {model}": "give one of at least 512",
    "--target cpu --dtype fp16": FOR_FP32,
    "--target cpu --weights fp8": FOR_FP32,
    f"--target cpu {ENGINE}": "--target cpu leaves out what engines are built from",
    "--cuda-attention group-query": "is for --dtype fp16",
    "--verify short.txt --dtype bf16": "which has no kernels for bf16",
    "--verify missing.txt": "missing.txt",
    "--verify latin1.txt": "latin1.txt",
    "--verify empty.txt": "empty.txt",
    "--verify short.txt --model {model}": "--verify has 8 tokens; give one of at least 256",
    "--trust-remote-code": NEVER_RUN,
}
"""By flags, without a model's name: of a model that does not exist, which would be refused next."""


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_are_refused(tiny_model, tmp_path, monkeypatch, flags):
    texts = {"short.txt": b"too short", "empty.txt": b" \n", "latin1.txt": "ß".encode("latin-1")}
    for name, content in texts.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    words = f"--model no-such-model -o bundle {flags.format(model=tiny_model)}".split()
    assert REFUSED[flags] in error_line(command(*words))
    assert {path.name for path in tmp_path.iterdir()} == texts.keys()


def test_pass_train_refuses_code_of_a_checkpoint_too():
    line = error_line(command("--model", "m", "--trust-remote-code", main=pass_trainer.cli.main))
    assert NEVER_RUN in line


@pytest.mark.slow
def test_a_process_that_refuses_leaves_no_file(tmp_path: Path):
    error_line(process("--model", "nobody/no-such-model", "-o", tmp_path / "bundle"))
    done = process("--model", "x", "--dtype", "int3", "-o", tmp_path / "bundle")
    assert error_line(done).endswith("--help") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def change_layer(trace: Callable) -> Callable:
    def changed_trace(model, lookahead):
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0] += 0.01
        return trace(model, lookahead)

    return changed_trace


def wrong_file_info(_path: Path) -> FileInfo:
    return FileInfo(sha256="0" * 64, bytes=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault", "error"),
    [
        ("export.trace_trunk", change_layer(export.trace_trunk), "differs from torch"),
        ("bundle.file_info", wrong_file_info, r"runtime refuses the bundle .* report it"),
    ],
)
def test_a_wrong_bundle_is_not_delivered(tiny_model, tmp_path, monkeypatch, name, fault, error):
    monkeypatch.setattr(f"pass_exporter.{name}", fault)
    with pytest.raises(PassError, match=error) as refused:
        export_bundle(tiny_model, tmp_path / "bundle", lookahead=2)
    assert "export the bundle again" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_failed_write_of_weights_is_reported(tiny_model: Path, tmp_path: Path):
    limit = (100_000, 100_000)
    done = process(
        *("--model", tiny_model, "--lookahead", 1, "-o", tmp_path / "bundle"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    error = error_line(done)
    assert "File too large" in error or "disk" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "awaited_path"),
    [(signal.SIGTERM, ".bundle.partial"), (signal.SIGINT, ".bundle.partial/trunk.onnx.data")],
    ids=["SIGTERM while loading", "SIGINT while writing"],
)
def test_an_export_that_a_signal_ends_leaves_no_files(tiny_model, tmp_path, number, awaited_path):
    flags = ["--model", str(tiny_model), "--lookahead", "6", "-o", str(tmp_path / "bundle")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*PASS_EXPORT, *flags], **pipes) as running:
        wait_for(tmp_path, awaited_path, running)
        running.send_signal(number)
        output, errors = running.communicate()
    assert running.returncode == 130
    assert output == ""
    assert errors.splitlines()[-1] == "interrupted" and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
