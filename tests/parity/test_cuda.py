from dataclasses import replace
from pathlib import Path

import onnxruntime as ort
import pytest

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.measuring.lossless import run_tokens
from same_text import assert_same_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu"
    ),
]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.9, seed=1), SamplingParams(0.9, 50, 0.9, 2)]
)
def test_cuda_writes_what_the_cpu_writes(random_bundle: Path, sampling: SamplingParams):
    cpu, prompt = load(random_bundle, "cpu", threads=1), list(range(2, 60))
    plain = GenerateOptions(80, sampling, plan="ar", ignore_eos=True)
    expected = run_tokens(cpu, prompt, plain).token_ids
    with load(random_bundle, "cuda") as cuda:
        for options in (plain, replace(plain, plan="two-pass")):
            tokens = run_tokens(cuda, prompt, options).token_ids
            assert_same_text(cpu, prompt, options, expected, tokens)


def test_requests_of_one_batch_write_what_they_write_alone(random_bundle: Path):
    """Long requests need a larger KV capacity than the first ones, so that the cache grows."""
    cpu = load(random_bundle, "cpu", threads=1)
    requests = []
    for i, plan in enumerate(("ar", "two-pass", "fused", "auto", "two-pass", "ar")):
        prompt = [2 + (7 * i + k) % 300 for k in range(5 + 60 * i)]
        sampling = SamplingParams(0.9 * (i % 2), seed=i)
        requests.append(
            (prompt, GenerateOptions(40 + 10 * i, sampling, plan=plan, ignore_eos=True))
        )
    with load(random_bundle, "cuda", max_batch_size=4) as cuda:
        streams = [cuda.generate_ids(*request) for request in requests]
        written = [stream.result().token_ids for stream in streams]
    for (prompt, options), tokens in zip(requests, written, strict=True):
        plain = replace(options, plan="ar")
        assert_same_text(cpu, prompt, plain, run_tokens(cpu, prompt, plain).token_ids, tokens)
