"""A bundle driven as docs/bundle.md says ("Driving it"), by pass_config.json alone, writes what the
runtime writes. No two buffers share memory."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime as ort
import pytest

from pass_runtime import GenerateOptions, SamplingParams, load

CAPACITY = 128
POSITIONS = CAPACITY + 17
"""A window can reach beyond the capacity."""
PROMPTS = ([5, 90, 33, 17, 120, 8, 44, 10, 11], [7, 250])
TOKENS = 24
SEED = (3 << 32) + 11
MASK = "window_mask"


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 of a counter of four words and a key of two."""
    for _ in range(10):
        low, high = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        words = (high >> 32 ^ counter[1] ^ key[0], high, low >> 32 ^ counter[3] ^ key[1], low)
        counter = [word & 0xFFFFFFFF for word in words]
        key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return counter


def noise_offsets(seed: int) -> np.ndarray:
    """Of one slot, [POSITIONS,2]."""
    words = [philox([n, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])[:2] for n in range(POSITIONS)]
    return np.array(words, np.int64) >> 17


class Driver:
    def __init__(self, bundle, slots: int) -> None:
        self.bundle, self.slots, self.sessions = bundle, slots, {}
        self.manifest = json.loads((bundle / "pass_config.json").read_text())
        self.windows = {window["name"]: window for window in self.manifest["windows"]}
        model = self.manifest["model"]
        self.vocab_size = model["vocab_size"]
        cache = (slots, model["kv_heads"], CAPACITY, model["head_dim"])
        names = [tensor["name"] for tensor in self.manifest["trunk"]["inputs"]]
        self.buffers = {
            name: np.zeros(cache, np.float32) for name in names if name.startswith("past_")
        }
        self.buffers |= {name: np.zeros(slots, np.int64) for name in ("length", "active", "top_k")}
        self.buffers |= {name: np.zeros(slots, np.float32) for name in ("temperature", "min_p")}
        self.buffers |= {
            "top_p": np.ones(slots, np.float32),
            "noise_offsets": np.zeros((slots, POSITIONS, 2), np.int64),
        }

    def constants(self, window: str) -> dict:
        """The manifest writes masks as "110"."""
        listed = self.windows[window]["constants"]
        mask = [[seen == "1" for seen in row] for row in listed[MASK]]
        arrays = {name: np.array(value, np.int64) for name, value in listed.items() if name != MASK}
        return arrays | {MASK: np.array(mask)}

    def run(self, graph: dict, given: dict) -> None:
        file = graph["file"]
        if file not in self.sessions:
            self.sessions[file] = ort.InferenceSession(
                self.bundle / file, providers=["CPUExecutionProvider"]
            )
        tensors = self.buffers | given
        inputs = {tensor["name"]: tensors[tensor["name"]] for tensor in graph["inputs"]}
        results = self.sessions[file].run(None, inputs)
        for tensor, result in zip(graph["outputs"], results, strict=True):
            self.buffers[self.manifest["feeds"].get(tensor["name"], tensor["name"])] = result

    def prefill(self, slot: int, tokens: list[int], width: int = 4) -> None:
        """The trunk runs over all slots, so the K/V of the others are put back."""
        saved = {
            name: array.copy() for name, array in self.buffers.items() if name.startswith("past_")
        }
        for start in range(0, len(tokens), width):
            chunk = tokens[start : start + width]
            ids = np.zeros((self.slots, width), np.int64)
            ids[slot, : len(chunk)] = chunk
            length = np.zeros(self.slots, np.int64)
            length[slot] = start
            rows = np.arange(width)
            given = {"input_ids": ids, "length": length, "row_position": rows}
            given |= {"logit_rows": rows[:1], "lookahead_rows": rows[:0]}
            given |= {MASK: np.tri(width, dtype=bool)}
            self.run(self.manifest["trunk"], given)
        for name, array in saved.items():
            array[slot] = self.buffers[name][slot]
            self.buffers[name] = array

    def stage(self, texts: dict[int, list[int]], window: str) -> None:
        """Stage windows without drafts, and mask slots without a text."""
        constants, drafts = self.constants(window), self.windows[window]["drafts"]
        ids = np.zeros((self.slots, len(constants["row_position"])), np.int64)
        for slot, tokens in texts.items():
            ids[slot] = [tokens[-1], *[self.vocab_size] * drafts, *constants["lookahead_ids"]]
            self.buffers["length"][slot] = len(tokens) - 1
        self.buffers["input_ids"] = ids
        self.buffers["active"][:] = [slot in texts for slot in range(self.slots)]

    def run_pass(self, window: str, sampler: str) -> list[list[int]]:
        """Return the tokens that each slot wrote."""
        constants = self.constants(window)
        self.run(self.manifest["trunk"], constants)
        self.run(self.windows[window]["tails"][sampler], constants)
        counts, emitted = self.buffers["count"], self.buffers["emitted"]
        return [row[:count].tolist() for row, count in zip(emitted, counts, strict=True)]


@pytest.fixture(scope="module", params=["tiny_bundle", "head_bundle"])
def bundle(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def expected(bundle):
    sampling = {
        "greedy": SamplingParams(),
        "sample": SamplingParams(temperature=0.9, seed=SEED),
        "truncated": SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=SEED),
    }
    with load(bundle, "cpu", threads=1) as session:

        def decode(prompt, params):
            options = GenerateOptions(TOKENS, params, plan="ar", ignore_eos=True)
            return session.generate_ids(prompt, options).result().token_ids

        return {
            name: [decode(prompt, params) for prompt in PROMPTS]
            for name, params in sampling.items()
        }


@pytest.mark.parametrize("sampler", ["greedy", "sample", "truncated"])
@pytest.mark.parametrize("first", ["ar", "draft-3", "verify-2", "fused-2"])
def test_a_bundle_driven_by_its_manifest_writes_the_runtimes_text(bundle, expected, first, sampler):
    """After three passes windows are staged again, as if another one was chosen."""
    driver = Driver(bundle, slots=3)
    if sampler != "greedy":
        driver.buffers["temperature"][:] = 0.9
        driver.buffers["noise_offsets"][:] = noise_offsets(SEED)
    if sampler == "truncated":
        for name, value in {"top_k": 40, "top_p": 0.95, "min_p": 0.01}.items():
            driver.buffers[name][:] = value
    texts = {0: list(PROMPTS[0]), 2: list(PROMPTS[1])}  # slot 1 is masked
    for slot, prompt in texts.items():
        driver.prefill(slot, prompt[:-1])
    driver.stage(texts, first)
    window, passes, emitted = first, 0, {slot: [] for slot in texts}
    while min(map(len, emitted.values())) < TOKENS:
        written = driver.run_pass(window, sampler)
        assert written[1] == [] and driver.buffers["length"][1] == 0  # the masked slot
        for slot in texts:
            emitted[slot] += written[slot]
        window, passes = driver.windows[window]["next"], passes + 1
        if passes == 3:
            driver.stage({slot: texts[slot] + emitted[slot] for slot in texts}, first)
            window = first
    assert [tokens[:TOKENS] for tokens in emitted.values()] == expected[sampler]
    driver.run(driver.manifest["logprobs"], {})
    assert driver.buffers["top_ids"].shape == (3, driver.buffers["emitted"].shape[1], 20)
    assert (driver.buffers["chosen_logprob"][0, : driver.buffers["count"][0]] <= 0).all()
