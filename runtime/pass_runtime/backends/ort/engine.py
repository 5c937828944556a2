"""Opens ONNX Runtime sessions: chooses the device and its options, and checks that a session's
graph is the one in the manifest."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime as ort

from pass_runtime.backends.cuda import (
    Cuda,
    find_device,
    has_driver,
    import_api,
    require_device,
    why_no_device,
)
from pass_runtime.backends.devices import split_device
from pass_runtime.backends.memory import HostMemory, Memory
from pass_runtime.backends.ort.kernels import library
from pass_runtime.bundle.manifest import Graph, Manifest
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.read import METADATA_KEY, trunk_metadata
from pass_runtime.errors import PassError
from pass_runtime.packages import why_no_cuda

log = logging.getLogger("pass_runtime.device")

PROVIDERS: Mapping[str, tuple[str, str]] = {
    "cpu": ("CPUExecutionProvider", "cpu"),
    "cuda": ("CUDAExecutionProvider", "cuda"),
}
"""Device -> ONNX Runtime's execution provider, and its name for the device's memory."""

CAPTURE = "enable_cuda_graph"
PROVIDER_OPTIONS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "cpu": ({},),
    "cuda": ({CAPTURE: "1", "use_tf32": "0"}, {"use_tf32": "0"}),
}
"""Device -> the provider's options to try in turn. With capture, ONNX Runtime refuses a graph that
has a node on the CPU, so the second options do not capture. TF32 would round float32."""

NO_COPIES = "session.use_external_initializer_file_buffers_directly"
"""The option with which ONNX Runtime, from 1.31 on, copies no weights that it is given."""


def choose_device(device: str) -> str:
    """Return the device to use: `device`, or for "auto" CUDA if this onnxruntime has it and CUDA
    sees a GPU, else the CPU. Raises PassError if `device` cannot be used."""
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
    """Whether CUDA sees a GPU and this onnxruntime has CUDA. Log it if only one of them is true."""
    gpu = find_device()
    if gpu is not None and not has_cuda:
        log.warning("%s is not used: %s", gpu.name, why_no_cuda())
    elif gpu is None and has_cuda:
        # With a driver, the user probably expects that the GPU is used.
        log.log(
            logging.WARNING if has_driver() else logging.INFO, "no GPU is used: %s", why_no_device()
        )
    return gpu is not None and has_cuda


def provider_options(device: str) -> Sequence[Mapping[str, str]]:
    """Return the provider options to try for a device, one after the other."""
    kind, ordinal = split_device(device)
    device_id = {"device_id": str(ordinal)} if ordinal else {}
    return [{**settings, **device_id} for settings in PROVIDER_OPTIONS[kind]]


def open_session(
    path: Path,
    device: str,
    threads: int = 0,
    *,
    exact: bool = False,
    files: OpenFiles | None = None,
) -> ort.InferenceSession:
    """Open a session of the graph `path` on `device`. Raises PassError if that fails. The session
    gets the attributes `captures` (whether it captures CUDA graphs), `not_captured` (ONNX Runtime's
    reason if it cannot on CUDA, else None) and `file` (the name of the graph's file).

    threads: 0 lets ONNX Runtime choose. exact: fuse no nodes and pack no weights. Fused kernels
    round activations to 8 bits; without them quantized weights are multiplied in float32, slowly.
    files: those of the graph's folder that are open already; None opens the graph and all data.
    """
    if files is None:
        data = (each.name for each in path.parent.glob("*.data"))
        files = OpenFiles(path.parent, [path.name, *data])
    if path.name not in files.graphs:
        raise PassError(f"{path} is missing; export the bundle again")
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.intra_op_num_threads = threads
    kind, ordinal = split_device(device)
    # A memory pattern would be kept for every shape, and there are many on the CPU.
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
        ort.preload_dlls()  # CUDA and cuDNN from the wheels of onnxruntime-gpu, if installed
    if ordinal:  # ONNX Runtime's own error would not say how many GPUs there are.
        require_device(import_api(), ordinal)
    provider, errors = PROVIDERS[kind][0], []
    for settings in provider_options(device):
        try:
            # By default (enable_fallback=1), it would open a session on the CPU if CUDA fails.
            session = ort.InferenceSession(
                files.graphs[path.name],
                options,
                providers=[(provider, settings)],
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
    session.files = files  # Keeps the weights' memory as long as the session.
    return session


def open_memory(device: str) -> Memory:
    """Return the memory of `device` for the buffers that sessions are bound to."""
    kind, ordinal = split_device(device)
    return HostMemory() if kind == "cpu" else Cuda(import_api(), ordinal=ordinal)


ORT_TYPES = {
    "int64": "tensor(int64)",
    "int32": "tensor(int32)",
    "bool": "tensor(bool)",
    "float16": "tensor(float16)",
    "bfloat16": "tensor(bfloat16)",
    "float32": "tensor(float)",
}
"""dtype in the manifest -> ONNX Runtime's name for a tensor's type."""


def check_graph(
    session: ort.InferenceSession, graph: Graph, manifest: Manifest | None = None
) -> None:
    """Raise PassError if a session's inputs or outputs differ from those of `graph`. manifest: for
    a trunk, to be compared with the metadata in the trunk's file."""
    for described, actual_tensors in (
        (graph.inputs, session.get_inputs()),
        (graph.outputs, session.get_outputs()),
    ):
        listed = [(tensor.name, ORT_TYPES[tensor.dtype], tensor.shape) for tensor in described]
        actual = [(tensor.name, tensor.type, tuple(tensor.shape)) for tensor in actual_tensors]
        for name, _, shape in sorted({*listed} ^ {*actual}, key=str):  # sizes: int or str
            raise PassError(
                f"the manifest and {session.file} differ in {name} {list(shape)}; export the "
                "bundle again"
            )
    if manifest is not None:
        stated = json.loads(session.get_modelmeta().custom_metadata_map.get(METADATA_KEY, "{}"))
        for name, value in trunk_metadata(manifest).items():
            if stated.get(name) != value:
                raise PassError(
                    f"the manifest says {name} {value} and {session.file} {stated.get(name)}; "
                    "export the bundle again"
                )
