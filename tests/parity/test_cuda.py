"""The same bundle on ONNX Runtime's CUDA provider: run with `-m gpu` on a machine that has one."""

from pathlib import Path

import onnxruntime as ort
import pytest

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.measuring.lossless import first_difference, run_tokens

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
    expected = run_tokens(
        cpu, prompt, GenerateOptions(80, sampling, plan="ar", ignore_eos=True)
    ).token_ids
    with load(random_bundle, "cuda") as cuda:
        for plan in ("ar", "two-pass"):
            options = GenerateOptions(80, sampling, plan=plan, ignore_eos=True)
            tokens = run_tokens(cuda, prompt, options).token_ids
            difference = first_difference(cpu, prompt, options, expected, tokens)
            assert difference is None or difference.is_near_tie, f"{plan}: {difference}"


def test_requests_side_by_side(random_bundle: Path):
    """Growing past the first capacity, too."""
    cpu = load(random_bundle, "cpu", threads=1)
    asked = [
        (
            [2 + (7 * i + k) % 300 for k in range(5 + 60 * i)],
            GenerateOptions(
                40 + 10 * i, SamplingParams(0.9 * (i % 2), seed=i), plan=plan, ignore_eos=True
            ),
        )
        for i, plan in enumerate(("ar", "two-pass", "fused", "auto", "two-pass", "ar"))
    ]
    with load(random_bundle, "cuda", max_batch_size=4) as cuda:
        streams = [cuda.generate_ids(*one) for one in asked]
        written = [stream.result().token_ids for stream in streams]
    for (prompt, options), tokens in zip(asked, written, strict=True):
        alone = GenerateOptions(
            options.max_new_tokens, options.sampling, plan="ar", ignore_eos=True
        )
        expected = run_tokens(cpu, prompt, alone).token_ids
        difference = first_difference(cpu, prompt, alone, expected, tokens)
        assert difference is None or difference.is_near_tie, f"{options.plan}: {difference}"
