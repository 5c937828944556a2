"""A warm-up on a (fake) device captures the passes of later requests, so that none has to wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_sessions import PROMPT, Gpu, assert_cpu_writes, submit_together, with_engines

from pass_runtime import GenerateOptions, SamplingParams
from pass_runtime.backends.trt.backend import RUNTIME_CACHE_FILE

SLOTS = 2
GREEDY = SamplingParams()
ASKED = [
    ([2 + i, *PROMPT[i:]], GenerateOptions(12, GREEDY, plan=plan, ignore_eos=True))
    for i, plan in enumerate(("ar", "fused", "two-pass", "ar"))
]
LONG = ([7 + i % 90 for i in range(560)], ASKED[1][1])


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
        for asked in (ASKED[:1], ASKED, [LONG]):
            for one, stream in zip(asked, submit_together(session, asked), strict=True):
                assert_cpu_writes(gpu.bundle, one, stream.result().token_ids)
        assert (gpu.cuda.captures, gpu.trt.contexts) == (captures, contexts)
        begun = submit_together(session, ASKED)
        session.warm_up(GREEDY)  # while requests decode, whose text stays the same
        for one, stream in zip(ASKED, begun, strict=True):
            assert_cpu_writes(gpu.bundle, one, stream.result().token_ids)
    gpu.assert_all_freed()
