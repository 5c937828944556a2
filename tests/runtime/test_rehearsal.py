"""A warm-up on a (fake) device captures the passes of later requests, so that none has to wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_sessions import PROMPT, Gpu, assert_cpu_writes, submit_together, with_engines

from pass_runtime import GenerateOptions, SamplingParams
from pass_runtime.backends.trt.backend import RUNTIME_CACHE_FILE

SLOTS = 2
GREEDY = SamplingParams()
REQUESTS = [
    ([2 + i, *PROMPT[i:]], GenerateOptions(12, GREEDY, plan=plan, ignore_eos=True))
    for i, plan in enumerate(("ar", "fused", "two-pass", "ar"))
]
LONG_REQUEST = (
    [7 + i % 90 for i in range(560)],
    GenerateOptions(12, GREEDY, plan="fused", ignore_eos=True),
)


@pytest.fixture(scope="module", params=["tensorrt", "tensorrt-rtx"])
def engine_bundle(request, adapter_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rehearsal")
    return with_engines(adapter_bundle, directory, 2, SLOTS, request.param)


@pytest.mark.slow
def test_after_a_warm_up_no_request_waits_for_a_capture(engine_bundle: Path, monkeypatch):
    gpu = Gpu(engine_bundle, monkeypatch)
    with gpu.open(max_batch_size=SLOTS) as session:
        session.warm_up(GREEDY)
        captures, contexts = gpu.cuda.captures, gpu.trt.contexts
        assert captures > 20
        compiled = engine_bundle / "engines" / "fake" / RUNTIME_CACHE_FILE
        # It is written at once, so that a killed process keeps it too.
        assert compiled.exists() == gpu.library.compiles_kernels
        session.warm_up(GREEDY)
        for requests in (REQUESTS[:1], REQUESTS, [LONG_REQUEST]):
            for request, stream in zip(requests, submit_together(session, requests), strict=True):
                assert_cpu_writes(gpu.bundle, request, stream.result().token_ids)
        assert (gpu.cuda.captures, gpu.trt.contexts) == (captures, contexts)
        streams = submit_together(session, REQUESTS)
        session.warm_up(GREEDY)  # while requests decode, whose text stays the same
        for request, stream in zip(REQUESTS, streams, strict=True):
            assert_cpu_writes(gpu.bundle, request, stream.result().token_ids)
    gpu.assert_all_freed()
