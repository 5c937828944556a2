"""ONNX Runtime sessions: our operators for the CPU, the devices, and the trunks."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import onnxruntime as ort

from pass_runtime.backends.cuda import (
    Cuda,
    find_device,
    import_api,
    log_level_without_gpu,
    require_device,
    why_no_device,
)
from pass_runtime.backends.memory import HostMemory, Memory
from pass_runtime.backends.open import split_device
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.window import Window
from pass_runtime.errors import PassError
from pass_runtime.packages import why_no_cuda

log = logging.getLogger("pass_runtime.backends")
device_log = logging.getLogger("pass_runtime.device")

SETTING = "PASS_KERNELS"
"""The environment variable with another library's path, or `off`."""
LIBRARY = Path(__file__).parents[2] / "libpass_kernels.so"
HOW_TO_GET = (
    "install a C++ compiler, then reinstall pass-toolkit (in a clone: python "
    "runtime/kernels/build.py)"
)


class Kernels(NamedTuple):
    """name: the kernels for this CPU, such as avx512-vnni."""

    path: Path
    name: str


def library() -> Path | None:
    """Return the library's path, or None if none can be loaded."""
    found = find_kernels()
    return found.path if isinstance(found, Kernels) else None


def kernels_name() -> str | None:
    found = find_kernels()
    return found.name if isinstance(found, Kernels) else None


def find_kernels() -> Kernels | str:
    """Return the library, or why there is none."""
    setting = os.environ.get(SETTING)
    if setting == "off":
        return f"{SETTING} is off"
    return _load(Path(setting) if setting else LIBRARY)


@cache
def _load(path: Path) -> Kernels | str:
    try:
        if _is_cut_off(path):
            return f"{path} is damaged"
        loaded = ctypes.CDLL(str(path))
        loaded.pass_kernels_name.restype = ctypes.c_char_p
        ort.SessionOptions().register_custom_ops_library(str(path))
        return Kernels(path, loaded.pass_kernels_name().decode())
    except FileNotFoundError:
        return f"there is no {path}"
    except Exception as error:  # onnxruntime raises bare classes of its own
        return " ".join(str(error).split())


def _is_cut_off(path: Path) -> bool:
    content = path.read_bytes()
    sections, count = int.from_bytes(content[40:48], "little"), content[60:62]
    end = sections + 64 * int.from_bytes(count, "little")
    return content[:6] == b"\x7fELF\x02\x01" and end > len(content)


PROVIDERS: Mapping[str, tuple[str, str]] = {
    "cpu": ("CPUExecutionProvider", "cpu"),
    "cuda": ("CUDAExecutionProvider", "cuda"),
}
"""Device -> execution provider, and its name for the device's memory."""

CAPTURE = "enable_cuda_graph"
PROVIDER_OPTIONS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "cpu": ({},),
    "cuda": ({CAPTURE: "1", "use_tf32": "0"}, {"use_tf32": "0"}),
}
"""Options to try in turn: ONNX Runtime refuses to capture a graph that has a node on the CPU.
TF32 would round float32."""

NO_COPIES = "session.use_external_initializer_file_buffers_directly"
"""From 1.31 on, ONNX Runtime then copies no weights that it is given."""


def choose_device(device: str) -> str:
    """For "auto", return CUDA if this onnxruntime has it and sees a GPU, else the CPU. Raises
    PassError if `device` cannot be used."""
    has_cuda = PROVIDERS["cuda"][0] in ort.get_available_providers()
    if device == "auto":
        return "cuda" if _sees_gpu(has_cuda) else "cpu"
    kind, ordinal = split_device(device)
    if kind not in PROVIDERS:
        raise PassError(f"unknown device {device!r}: choose one of auto, {', '.join(PROVIDERS)}")
    if kind == "cuda":
        if not has_cuda:
            raise PassError(why_no_cuda())
        require_device(import_api(), ordinal)
    return device


def _sees_gpu(has_cuda: bool) -> bool:
    gpu = find_device()
    if gpu is not None and not has_cuda:
        device_log.warning("%s is not used: %s", gpu.name, why_no_cuda())
    elif gpu is None and has_cuda:
        device_log.log(log_level_without_gpu(), "no GPU is used: %s", why_no_device())
    return gpu is not None and has_cuda


def open_session(
    path: Path,
    device: str,
    threads: int = 0,
    *,
    exact: bool = False,
    files: OpenFiles | None = None,
) -> ort.InferenceSession:
    """Raises PassError if that fails."""
    if files is None:
        data = (each.name for each in path.parent.glob("*.data"))
        files = OpenFiles(path.parent, [path.name, *data])
    if path.name not in files.graphs:
        raise PassError(f"{path} is missing; export the bundle again")
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.intra_op_num_threads = threads
    kind, ordinal = split_device(device)
    # It would be kept for every shape, and the CPU has many.
    options.enable_mem_pattern = kind != "cpu"
    names, contents = [*files.data], [*files.data.values()]
    options.add_session_config_entry(NO_COPIES, "1")
    options.add_external_initializers_from_files_in_memory(names, contents, [*map(len, contents)])
    if exact:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
    if kind == "cpu" and (kernels := library()) is not None:
        options.register_custom_ops_library(str(kernels))
    if kind == "cuda":
        ort.preload_dlls()  # CUDA and cuDNN from the wheels of onnxruntime-gpu
    if ordinal:  # ONNX Runtime's own error does not count the GPUs.
        require_device(import_api(), ordinal)
    provider, errors = PROVIDERS[kind][0], []
    device_id = {"device_id": str(ordinal)} if ordinal else {}
    for settings in PROVIDER_OPTIONS[kind]:
        try:
            # Its default (enable_fallback=1) would use the CPU if CUDA fails.
            session = ort.InferenceSession(
                files.graphs[path.name],
                options,
                providers=[(provider, {**settings, **device_id})],
                enable_fallback=0,
            )
            break
        except Exception as error:  # onnxruntime raises bare classes of its own
            errors.append(" ".join(str(error).split()))
    else:
        if "bad_alloc" in errors[-1]:
            raise PassError(
                f"too little memory to load {path}: end other programs, or export the model "
                "with --weights int8 or int4"
            )
        raise PassError(f"onnxruntime cannot load {path}: {errors[-1]}")
    if session.get_providers()[0] != provider:
        raise PassError(
            f"onnxruntime could not start {provider} (is the GPU visible?); use --device cpu"
        )
    session.file, session.not_captured = path.name, errors[0] if errors else None
    session.captures = CAPTURE in settings
    if errors:
        log.warning(
            "%s runs without a CUDA graph, which makes passes slower: %s", path.name, errors[0]
        )
    session.files = files  # as long as the session
    return session


def open_memory(device: str) -> Memory:
    kind, ordinal = split_device(device)
    return HostMemory() if kind == "cpu" else Cuda(import_api(), ordinal=ordinal)


@dataclass(frozen=True)
class Trunks:
    """`plain` runs passes without look-ahead rows. `lookahead` is opened for the first other
    pass, and may be `plain`."""

    plain: ort.InferenceSession
    open_lookahead: Callable[[], ort.InferenceSession]

    @cached_property
    def lookahead(self) -> ort.InferenceSession:
        return self.open_lookahead()

    def of(self, window: Window) -> ort.InferenceSession:
        return self.lookahead if len(window.lookahead_rows) else self.plain


def cpu_kernels(manifest: Manifest, device: str) -> Kernels | str | None:
    """Return the library that the trunk for `device` needs, or why it is missing; None if it
    needs none."""
    needed = split_device(device)[0] == "cpu" and manifest.derived_trunk("cpu", 1) is not None
    return find_kernels() if needed else None


def open_trunk(
    files: OpenFiles, manifest: Manifest, device: str, slots: int, threads: int
) -> Trunks:
    """Raises PassError if no trunk can run."""

    def open_file(file: str) -> ort.InferenceSession:
        return open_session(files.folder / file, device, threads, files=files)

    kind, _ = split_device(device)
    lookahead_file, plain_file = (
        manifest.trunk_file(kind, slots, lookahead_rows=rows) for rows in (True, False)
    )
    found = cpu_kernels(manifest, device)
    missing = found if isinstance(found, str) else None
    if missing is not None:
        lookahead_file = plain_file = manifest.trunk.file
    if plain_file not in files.graphs:
        remedy = (
            f"its kernels are missing ({missing}): {HOW_TO_GET}"
            if missing is not None
            else "it was exported for the CPU alone: export it with --target any"
        )
        raise PassError(f"{files.folder} cannot run: {remedy}")
    if missing is not None:
        device_log.warning(
            "ONNX Runtime's kernels run in place of ours, which are missing (%s): passes are "
            "slower, and near-ties may flip; %s",
            missing,
            HOW_TO_GET,
        )
    plain = open_file(plain_file)
    return Trunks(
        plain, lambda: plain if lookahead_file == plain_file else open_file(lookahead_file)
    )
