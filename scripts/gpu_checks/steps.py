"""The steps, in the order in which they tell most: does the device work, do all backends, what do rows cost, and then
everything else."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_checks.machine import Found
from pass_exporter.model.registry import registry
from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.bundle.manifest import FILE_NAME, Manifest
from pass_runtime.bundle.plan import MODES, make_cycle
from pass_runtime.bundle.read import read_manifest

ROOT = Path(__file__).resolve().parents[2]
MODEL, BUNDLE, LOOKAHEAD = "smollm2-135m", ROOT / "build/smollm2-135m-fp16", 4
TESTS = ("tests/parity/test_cuda.py", "tests/runtime/test_trt_backend.py")
PLANS = "--plan ar --plan two-pass --plan fused --plan auto --draft lookahead --draft ngram --draft both"
DEVICES = ("cuda", *LIBRARIES)
PROGRAM = ROOT / "build/cpp/release/pass-cpp"
PROMPT = "504,3575,282,4649,314,253,2591,216"
"""The prompt for the C++ runtime, as token ids of SmolLM2: for text it would need another library."""
OUTPUT = "{output}"
"""Stands in a command for the file into which the step writes its JSON."""
SEQUENCE, LARGE = 2048, 22
"""The capacity of engines in tokens; the GiB that a 7B model in fp16 with a capacity of 8192 tokens needs to run. (A
card of 24 GB reports 23.6 or less.)"""
LAYERS, ROWS, CAPACITIES = 4, (1, 5, 9, 25), (512, 2048, 8192)
"""Of the part of a 7B shape whose passes are timed first."""


@dataclass(frozen=True)
class Step:
    """A command to run. blocked: the reason why it cannot be run. after: steps that must have succeeded."""

    name: str
    command: Sequence[str] = ()
    blocked: str | None = None
    after: Sequence[str] = ()


def plan_steps(found: Found, bundle: Path, tokens: int) -> list[Step]:
    """All steps in their order; what cannot be run says why."""
    manifest = read_manifest(bundle) if (bundle / FILE_NAME).is_file() else None
    steps = [
        *_first(found),
        *_of_bundle(found, bundle, manifest, tokens),
        _tests(),
        _attention(found),
        *_large(found),
        _peers(found, manifest, tokens),
    ]
    if found.gpu:
        return steps
    return [Step(step.name, step.command, "no NVIDIA GPU", step.after) for step in steps]


def _script(name: str, *flags: str) -> tuple[str, ...]:
    return sys.executable, str(ROOT / "scripts" / name), *flags


def _first(found: Found) -> list[Step]:
    """Whether the device copies and captures, whether backends write what the CPU writes, and what rows cost."""
    missing = found.missing
    steps = [Step("device", _script("gpu_checks/device.py", "-o", OUTPUT), missing.get("cuda-python"))]
    for name in DEVICES:
        steps.append(
            Step(f"tiny {name}", _script("gpu_checks/tiny.py", "--device", name, "-o", OUTPUT), missing.get(name))
        )
    sizes = [f"--rows={rows}" for rows in ROWS] + [f"--capacity={capacity}" for capacity in CAPACITIES]
    for name in DEVICES:
        flags = ("--engine", name, f"--num-hidden-layers={LAYERS}", *sizes, "--keep", "build/step-time", "-o", OUTPUT)
        blocked = missing.get(name) or missing.get("cuda-python")
        steps.append(Step(f"layers {name}", _script("step_time.py", *flags), blocked))
    # Without any engine, torch still tells what a row costs.
    runs = [step.name for step in steps[-len(DEVICES) :] if not step.blocked]
    flags = (f"--num-hidden-layers={LAYERS}", *sizes, "-o", OUTPUT)
    blocked = f"not needed beside {runs[0]}" if runs else missing.get("torch")
    steps.append(Step("layers torch", _script("torch_rows.py", *flags), blocked))
    return steps


def _of_bundle(found: Found, bundle: Path, manifest: Manifest | None, tokens: int) -> list[Step]:
    """Engines of the bundle, and its speed on every device."""
    length = min(SEQUENCE, manifest.model.max_capacity) if manifest else SEQUENCE
    tool, missing, exported = (sys.executable, "-m"), found.missing, () if manifest else ("export",)
    flags = f"--model {MODEL} --lookahead {LOOKAHEAD} --dtype fp16 -o".split()
    steps = [] if manifest else [Step("export", (*tool, "pass_exporter.cli", *flags, str(bundle)))]
    for name in LIBRARIES:
        command = (*tool, "pass_exporter.cli", "build", str(bundle), "--engine", name, "--max-seq-len", str(length))
        steps.append(Step(f"build {name}", command, missing.get(name), exported))
    bench = (*tool, "pass_runtime.cli.main", "bench", str(bundle))
    unbuilt = None if PROGRAM.exists() else "no C++ runtime; run scripts/build_cpp.sh"
    after = {name: (f"build {name}",) if name in LIBRARIES else exported for name in DEVICES}
    widths = ",".join(map(str, window_rows(manifest.lookahead.length if manifest else LOOKAHEAD)))
    for name in DEVICES:
        rows = f"--device {name} --rows {widths} -o {OUTPUT}".split()
        steps.append(Step(f"rows {name}", (*bench, *rows), missing.get(name), after[name]))
    batch = f"--plan ar --plan fused --batch 1,8 --device cuda --max-new-tokens {tokens} -o {OUTPUT}".split()
    steps.append(Step("batch cuda", (*bench, *batch), missing.get("cuda"), after["cuda"]))
    for name in DEVICES:
        flags = f"{PLANS} --device {name} --max-new-tokens {tokens} -o {OUTPUT}".split()
        for kind, sampling in {"greedy": "", "sampled": "--temperature 0.8 --seed 1"}.items():
            command = (*bench, *flags, *sampling.split())
            steps.append(Step(f"bench {name} {kind}", command, missing.get(name), after[name]))
        command = (str(PROGRAM), "bench", str(bundle), *flags, "--prompt-ids", PROMPT)
        steps.append(Step(f"cpp {name}", command, missing.get(name) or unbuilt, after[name]))
    return steps


def window_rows(lookahead: int) -> list[int]:
    """Return the rows of the windows for which there are engines."""
    return sorted({plan.width for mode in MODES for plan in make_cycle(mode, lookahead).plans})


def _tests() -> Step:
    flags = ["-q", "-m", "gpu", "-o", "addopts=-ra"]  # the project's addopts need plugins that may not be here
    blocked = None if importlib.util.find_spec("pytest") else "pytest is not installed"
    return Step("tests", (sys.executable, "-m", "pytest", *flags, *TESTS), blocked)


def _attention(found: Found) -> Step:
    """Two ways to attend in ONNX Runtime, for a shape whose query heads share K and V."""
    flags = (f"--num-hidden-layers={LAYERS}", "--num-key-value-heads=8", "--keep", "build/step-time", "-o", OUTPUT)
    blocked = found.missing.get("cuda") or found.missing.get("cuda-python")
    return Step("attention cuda", _script("gpu_checks/attention.py", *flags), blocked)


def _large(found: Found) -> list[Step]:
    """Passes of a whole 7B."""
    small = f"7B need {LARGE} GiB, this GPU has {found.memory:.1f}" if found.memory < LARGE else ""
    steps = []
    for name in DEVICES:
        flags = f"--engine {name} --no-own-caches --keep build/step-time -o {OUTPUT}".split()
        blocked = found.missing.get(name) or found.missing.get("cuda-python") or small
        steps.append(Step(f"step-time {name}", _script("step_time.py", *flags), blocked))
    return steps


def _peers(found: Found, manifest: Manifest | None, tokens: int) -> Step:
    model = manifest.model.name if manifest else MODEL
    unknown = None if model in registry() else f"{model} is not in models/registry.toml; see scripts/gpu_peers.py"
    dtype = {"float32": "fp32", "bfloat16": "bf16"}.get(manifest.model.dtype if manifest else "", "fp16")
    flags = ["--model", model, *f"--dtype {dtype} --tokens {tokens} -o {OUTPUT}".split()]
    return Step("peers", _script("gpu_peers.py", *flags), found.missing.get("torch") or unknown)
