from __future__ import annotations

import pytest

from pass_runtime.backends.cuda import (
    CAPABILITY_MAJOR,
    NON_BLOCKING,
    ON_DEVICE,
    THREAD_LOCAL,
    TO_DEVICE,
    find_device,
    import_api,
    unwrap,
)
from pass_runtime.errors import PassError

pytest.importorskip("cuda.bindings", reason="pip install 'pass-toolkit[cuda]'")

CALLS = {  # arguments by function, with 0 for handles and addresses
    "cudaGetDeviceCount": (),
    "cudaGetDevice": (),
    "cudaSetDevice": (1,),
    "cudaDeviceGetAttribute": (CAPABILITY_MAJOR, 0),
    "cudaGetDeviceProperties": (0,),
    "cudaMemGetInfo": (),
    "cudaStreamCreateWithFlags": (NON_BLOCKING,),
    "cudaMalloc": (256,),
    "cudaMallocHost": (256,),
    "cudaMemsetAsync": (0, 0, 256, 0),
    "cudaMemcpyAsync": (0, 0, 256, TO_DEVICE, 0),
    "cudaMemcpy2DAsync": (0, 256, 0, 256, 64, 2, ON_DEVICE, 0),
    "cudaStreamSynchronize": (0,),
    "cudaStreamBeginCapture": (0, THREAD_LOCAL),
    "cudaStreamEndCapture": (0,),
    "cudaGraphInstantiate": (0, 0),
    "cudaGraphLaunch": (0, 0),
    "cudaGraphDestroy": (0,),
    "cudaGraphExecDestroy": (0,),
    "cudaStreamDestroy": (0,),
    "cudaFree": (0,),
    "cudaFreeHost": (0,),
}


@pytest.mark.parametrize("name", CALLS)
def test_cuda_python_accepts_the_arguments(name: str):
    if find_device() is not None:
        pytest.skip("there is a GPU, for which these addresses are invalid")
    with pytest.raises(PassError, match=r"CUDA error \d+ \(cudaError.*nvidia-smi"):
        unwrap(getattr(import_api(), name)(*CALLS[name]))
