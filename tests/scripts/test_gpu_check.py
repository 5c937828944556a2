"""scripts/gpu_check.sh without a GPU: which steps it plans, how it runs them, and its verdict."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import pytest
from click.testing import CliRunner

from pass_runtime.backends.cuda import DeviceInfo, find_device
from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.bundle.manifest import FILE_NAME

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/cli")]

import gpu_check  # noqa: E402
import gpu_report  # noqa: E402
from gpu_check import OUTPUT_PLACEHOLDER, STEP_SECONDS, Step, plan_steps, run_steps  # noqa: E402
from gpu_report import Machine, verdict  # noqa: E402
from pass_run import assert_refused  # noqa: E402

GPU = {"name": "A | GPU", "memory.total": "81559 MiB", "compute_cap": "9.0"}
GIB = 1 << 30
WRITE_REPORT = (
    'import sys; open(sys.argv[1], "w").write(\'{"plans": [{"plan": "ar", "ratio": 1.5}], '
    '"uncaptured": %s}\')'
)
"""Python that writes a step's JSON; %s: what was not captured, as JSON."""


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def run(
    monkeypatch: pytest.MonkeyPatch, steps: list[Step], folder: Path, *flags: str
) -> tuple[click.testing.Result, Any]:
    """Run these steps as if there were a GPU. Return the command's result and its report.json."""
    bundle, output = folder / "bundle", folder / "out"
    bundle.mkdir()
    (bundle / FILE_NAME).touch()
    machine = Machine(GPU, "sm90", 80.0, {"torch": "2"})
    monkeypatch.setattr(gpu_check, "inspect_machine", lambda: machine)
    monkeypatch.setattr(gpu_check, "plan_steps", lambda *_: steps)
    done = CliRunner().invoke(gpu_check.main, [str(bundle), "-o", str(output), *flags])
    return done, json.loads((output / "report.json").read_text())


def run_script(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run scripts/gpu_check.sh with its output in `folder`/out."""
    command = [ROOT / "scripts/gpu_check.sh", *arguments, "-o", folder / "out"]
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.skipif(
    find_device() is not None or shutil.which("nvidia-smi") is not None, reason="there is a GPU"
)
def test_without_a_gpu_every_step_is_skipped(tmp_path: Path):
    """The report lists the steps that would have run."""
    done = run_script(tmp_path)
    assert done.returncode == 3
    last = done.stdout.splitlines()[-1]
    assert last.startswith("VERDICT: nothing ran (no NVIDIA GPU: nvidia-smi")
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["verdict"] == "nothing ran"
    for step in report["steps"]:
        assert (step["status"], step["reason"]) == ("skipped", "no NVIDIA GPU")
    names = {step["name"] for step in report["steps"]}
    assert names >= {"device", "tiny cuda", "layers tensorrt", "attention cuda"}
    text = (tmp_path / "out/report.md").read_text()
    assert text.startswith("**VERDICT: nothing ran** (no NVIDIA GPU")


@pytest.mark.slow
def test_a_missing_bundle_is_refused(tmp_path: Path):
    done = run_script(tmp_path, tmp_path / "nothing")
    assert "is not a bundle" in assert_refused(done.returncode, done.stdout, done.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("status", "uncaptured", "expected", "code"),
    [
        ("ok", "{}", "works", 0),
        ("ok", '{"tail.onnx": "capture refused"}', "works but not captured", 4),
        ("failed", '{"tail.onnx": "capture refused"}', "wrong", 1),
        ("skipped", "{}", "nothing ran", 3),
    ],
)
def test_the_verdict_follows_from_the_steps_results(
    status: str, uncaptured: str, expected: str, code: int, tmp_path: Path, monkeypatch
):
    end = "; sys.exit('broken')" if status == "failed" else ""
    command = (*python(WRITE_REPORT % uncaptured + end), OUTPUT_PLACEHOLDER)
    bench = Step("bench x", command, "no library" if status == "skipped" else None)
    done, report = run(monkeypatch, [Step("export", python("pass")), bench], tmp_path)
    assert done.exit_code == code
    last = done.output.splitlines()[-1]
    assert last.startswith(f"VERDICT: {expected} (")
    assert report["verdict"] == expected and report["why"] in last
    assert ("capture refused" in last) == (code == 4)


@pytest.mark.parametrize(
    ("target", "libraries"), [("sm90", ["tensorrt"]), ("sm89", ["tensorrt", "tensorrt-rtx"])]
)
def test_a_library_without_the_target_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, libraries: list[str]
):
    monkeypatch.setattr(gpu_report, "nvidia_smi", lambda: GPU)
    monkeypatch.setattr(gpu_report, "find_device", lambda: DeviceInfo("GPU", target, GIB, 80 * GIB))
    monkeypatch.setattr(gpu_report, "why_not", lambda _: "")
    monkeypatch.setattr(gpu_check, "PROGRAM", Path(sys.executable))
    steps = {step.name: step for step in plan_steps(gpu_report.find_machine(), tmp_path, 8, 4)}
    names = "tiny {0}|layers {0}|build {0}|rows {0}|bench {0} greedy|bench {0} sampled|cpp {0}"
    for library in LIBRARIES:
        for name in names.format(library).split("|"):
            if library in libraries:
                assert not steps[name].blocked
            else:
                assert f"tensorrt-rtx has no target {target}; it has sm75, " in steps[name].blocked
                assert "refuses these GPUs (Hopper)" in steps[name].blocked
    assert steps["build tensorrt"].after == ("export",) and not steps["export"].blocked
    assert steps["bench tensorrt greedy"].after == ("build tensorrt",)
    assert not steps["attention cuda"].blocked and steps["attention cuda"].after == ("layers cuda",)


def test_steps_that_say_most_come_first(tmp_path: Path):
    """The steps that say most come first, in case the budget of time ends early."""
    steps = plan_steps(Machine(GPU, "sm89", 80.0), tmp_path, 8, 4)
    order = "device tiny layers export build rows kernels batch bench cpp genai tests attention"
    kinds = dict.fromkeys(step.name.split()[0] for step in steps)
    assert [*kinds] == order.split() and set(kinds) == set(STEP_SECONDS)


@pytest.mark.parametrize(("memory", "blocked"), [(23.6, False), (22.2, False), (16.0, True)])
def test_a_gpu_of_24_gb_has_memory_for_all_layers_of_a_7b_model(
    memory: float, blocked: bool, tmp_path: Path
):
    """Such a GPU reports a little less than 24 GiB. A GPU with less memory runs fewer layers."""
    machine = Machine(GPU, "sm89", memory)
    few, all_layers = (
        {step.name: step for step in plan_steps(machine, tmp_path, 8, layers)} for layers in (4, 32)
    )
    for name in ("layers cuda", "layers tensorrt", "attention cuda"):
        assert bool(all_layers[name].blocked) == blocked and not few[name].blocked
        assert "--layers=32" in all_layers[name].command


def test_a_missing_package_blocks_its_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / FILE_NAME).touch()
    manifest = SimpleNamespace(
        model=SimpleNamespace(max_capacity=768), lookahead=SimpleNamespace(length=3)
    )
    monkeypatch.setattr(gpu_check, "read_manifest", lambda _: manifest)
    monkeypatch.setattr(gpu_check, "PROGRAM", tmp_path / "nothing")
    missing = {"cuda": "no onnxruntime-gpu", "tensorrt": "no TensorRT"}

    def steps_without(packages: dict[str, str]) -> dict[str, Step]:
        machine = Machine(GPU, "sm89", 1.0, {}, packages)
        return {step.name: step for step in plan_steps(machine, tmp_path, 8, 4)}

    steps = steps_without(missing)
    assert "export" not in steps
    assert "run scripts/build_cpp.sh" in steps_without({})["cpp tensorrt-rtx"].blocked
    for name in ("bench cuda greedy", "attention cuda"):
        assert steps[name].blocked == "no onnxruntime-gpu"
    assert steps["layers tensorrt"].blocked == "no TensorRT"
    assert steps["layers tensorrt-rtx"].blocked == "4 layers need 3 GiB, this GPU has 1.0"
    assert "--rows 1,4,16" in " ".join(steps["rows tensorrt"].command)
    build = steps["build tensorrt-rtx"]
    assert not build.blocked and build.command[-2:] == ("--max-seq-len", "768")


def test_a_failed_step_ends_neither_the_run_nor_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The report has the failed step's data and last lines. Steps that need it are skipped, and
    others run. A build whose engines are there already has not failed."""
    broken = python("import sys; print('[one]\\ntwo', file=sys.stderr); sys.exit(3)")
    write, exists = WRITE_REPORT % "{}", "error: B has engines y already; use --force"
    steps = [
        Step("build x", broken),
        Step("bench x greedy", python("1 / 0"), after=("build x",)),
        Step("bench y greedy", (*python(write), OUTPUT_PLACEHOLDER)),
        Step("bench z greedy", (*python(f"{write}; 1 / 0"), OUTPUT_PLACEHOLDER)),
        Step("tests", python("print('2 skipped in 1s')")),
        Step("build y", python(f"import sys; sys.exit({exists!r})")),
    ]
    done, report = run(monkeypatch, steps, tmp_path)
    assert done.exit_code == 1, done.output
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["gpu_check.log", "report.json", "report.md"]
    results = {step["name"]: (step["status"], step["reason"]) for step in report["steps"]}
    status, reason = results.pop("bench z greedy")
    assert status == "failed" and "ZeroDivisionError" in reason
    assert results == {
        "build x": ("failed", "[one] / two"),
        "bench x greedy": ("skipped", "build x failed"),
        "bench y greedy": ("ok", ""),
        "tests": ("skipped", "2 skipped in 1s"),
        "build y": ("ok", ""),
    }
    with_data = [step["name"] for step in report["steps"] if step["data"]]
    assert with_data == ["bench y greedy", "bench z greedy"]
    assert report["gpu"] == GPU and report["versions"] == {"torch": "2"}
    text = (tmp_path / "out/report.md").read_text()
    assert "| name | A \\| GPU |" in text and "| ar | - | 1.50 | - | - |" in text
    assert "VERDICT: wrong (build x failed: [one] / two, and 1 more)" in done.output
    assert "A \\| GPU" in done.output


def test_only_chooses_steps_by_the_beginning_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    steps = [Step(name, python("pass")) for name in ("export", "bench x", "bench y", "cpp x")]
    done, report = run(monkeypatch, steps, tmp_path, "--only", "bench", "--only", "cpp")
    names = [step["name"] for step in report["steps"]]
    assert done.exit_code == 0 and names == ["bench x", "bench y", "cpp x"]


@pytest.mark.slow
def test_steps_end_at_their_limit_or_with_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def run_one(step: Step, budget: float) -> gpu_report.Result:
        (result,) = run_steps([step], budget, tmp_path / "log", lambda _: None)
        return result

    result = run_one(Step("export", python("raise SystemExit('was run')")), 10)
    assert result.status == "skipped"
    assert result.reason == "it needs 40 s, and 10 s of the budget are left"
    result = run_one(Step("bench x", blocked="no x"), 10)
    assert (result.status, result.reason) == ("skipped", "no x")
    monkeypatch.setitem(STEP_SECONDS, "bench", (0, 1))
    slow = Step("bench x", python("import time; time.sleep(60)"))
    result = run_one(slow, 10)
    assert result.status == "failed" and result.reason.endswith("its limit")
    result = run_one(slow, 0.5)
    assert result.status == "skipped" and result.reason.endswith("the end of the budget")
    assert result.seconds < 30
    assert verdict(Machine(GPU), [result])[0] == "nothing ran"


def test_ctrl_c_while_a_step_begins_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", Interrupted)
    slow = Step("bench x", python("import time; time.sleep(60)"))
    with pytest.raises(KeyboardInterrupt):
        run_steps([slow], 60, tmp_path / "log", lambda _: None)
    assert started[0].poll() == -signal.SIGTERM


def test_ctrl_c_keeps_the_report_so_far(tmp_path: Path):
    (tmp_path / FILE_NAME).touch()
    driver = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "import gpu_check as g\n"
        "from gpu_check import Machine, Step\n"
        "g.inspect_machine = lambda: Machine({'name': 'GPU'})\n"
        "code = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        "g.plan_steps = lambda *_: [Step('bench y', (sys.executable, '-c', 'pass')),\n"
        "                           Step('bench x', (sys.executable, '-c', code))]\n"
        "g.main()\n"
    )
    log = tmp_path / "out/gpu_check.log"
    command = [sys.executable, "-c", driver, tmp_path, "-o", tmp_path / "out"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running_check:
        until = time.monotonic() + 60
        while time.monotonic() < until and not (
            log.exists() and log.read_text().splitlines()[-1].isdigit()
        ):
            time.sleep(0.05)
        running_check.send_signal(signal.SIGINT)
        errors = running_check.communicate(timeout=60)[1]
    assert running_check.returncode == 130 and errors.endswith("interrupted\n")
    assert not Path(f"/proc/{log.read_text().splitlines()[-1]}").exists()
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert [step["name"] for step in report["steps"]] == ["bench y"]
