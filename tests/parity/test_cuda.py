"""The same bundle on ONNX Runtime's CUDA provider: run with `-m gpu` on a machine that has one."""

from pathlib import Path

import onnxruntime as ort
import pytest

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.testing.lossless import first_difference, run_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.9, seed=1), SamplingParams(0.9, 50, 0.9, 2)])
def test_cuda_writes_what_the_cpu_writes(random_bundle: Path, sampling: SamplingParams):
    cpu, cuda = load(random_bundle, "cpu", threads=1), load(random_bundle, "cuda")
    prompt = list(range(2, 60))
    expected = run_tokens(cpu, prompt, GenerateOptions(80, sampling, plan="ar", ignore_eos=True)).token_ids
    for plan in ("ar", "two-pass"):
        options = GenerateOptions(80, sampling, plan=plan, ignore_eos=True)
        tokens = run_tokens(cuda, prompt, options).token_ids
        difference = first_difference(cpu, prompt, options, expected, tokens)
        assert difference is None or difference.is_near_tie, f"{plan}: {difference}"
