"""Decodes one sequence greedily with a PaSS bundle, whose tensors docs/bundle.md explains.

    python examples/minimal_driver.py BUNDLE WINDOW NUM_TOKENS PROMPT_ID...

WINDOW, the first one, is `ar` (plain decoding) or another of the manifest's; all write the same
tokens.
"""

import json
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when it is loaded
import onnxruntime as ort

CAPACITY = 512  # of the KV cache: for the prompt, the text, and the rows of the last window
ort.set_default_logger_severity(3)  # hides warnings that every pass copies the KV cache


class MinimalDriver:
    """Runs a bundle's graphs for one sequence. tensors: their inputs and outputs, by name."""

    def __init__(self, bundle: Path) -> None:
        self.manifest = json.loads((bundle / "pass_config.json").read_text())
        self.windows = {window["name"]: window for window in self.manifest["windows"]}
        model, inputs = self.manifest["model"], self.manifest["trunk"]["inputs"]
        shape = (1, model["kv_heads"], CAPACITY, model["head_dim"])
        self.cache = [tensor["name"] for tensor in inputs if tensor["name"].startswith("past_")]
        self.tensors = {name: np.zeros(shape, np.float32) for name in self.cache}
        self.tensors["active"] = np.ones(1, np.int64)
        self._open = cache(lambda file: ort.InferenceSession(bundle / file))

    def generate(self, prompt: list[int], window_name: str, num_tokens: int) -> list[int]:
        """Return the next tokens. A pass runs the trunk, and a tail that writes the next window."""
        self._prefill(prompt[:-1])
        self._lay_out(prompt, window_name)
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            constants = self._constants(window := self.windows[window_name])
            self._run(self.manifest["trunk"], constants)
            self._run(window["tails"]["greedy"], constants)
            count = self.tensors["count"][0]
            tokens += self.tensors["emitted"][0, :count].tolist()
            window_name = window["next"]
        return tokens[:num_tokens]

    def _prefill(self, tokens: list[int]) -> None:
        """Write the K/V of `tokens`. Their logits are not used."""
        rows, mask = np.arange(len(tokens)), np.tri(len(tokens), dtype=bool)
        self.tensors |= {"input_ids": np.array([tokens], np.int64), "length": np.zeros(1, np.int64)}
        constants = {"row_position": rows, "logit_rows": rows[:1], "lookahead_rows": rows[:0]}
        if tokens:
            self._run(self.manifest["trunk"], constants | {"window_mask": mask})

    def _lay_out(self, text: list[int], window_name: str) -> None:
        """Write the first window: the last token of `text`, no drafts, and look-ahead ids."""
        window, no_draft = self.windows[window_name], self.manifest["model"]["vocab_size"]
        ids = [text[-1], *[no_draft] * window["drafts"], *window["constants"]["lookahead_ids"]]
        self.tensors |= {"input_ids": np.array([ids]), "length": np.array([len(text) - 1])}

    def _constants(self, window: dict) -> dict[str, np.ndarray]:
        """Return the inputs that are the same in every pass of a window: masks and positions."""
        constants = dict(window["constants"])
        mask = [[bit == "1" for bit in row] for row in constants.pop("window_mask")]
        arrays = {name: np.array(value, np.int64) for name, value in constants.items()}
        return arrays | {"window_mask": np.array(mask)}

    def _run(self, graph: dict, constants: dict[str, np.ndarray]) -> None:
        """Run a graph, and store each output under its name or that of the input that it feeds."""
        values = self.tensors | constants
        feed = {tensor["name"]: values[tensor["name"]] for tensor in graph["inputs"]}
        results = self._open(graph["file"]).run(None, feed)
        for tensor, result in zip(graph["outputs"], results, strict=True):
            self.tensors[self.manifest["feeds"].get(tensor["name"], tensor["name"])] = result


if __name__ == "__main__":
    directory, window, count, *ids = sys.argv[1:]
    print(
        *MinimalDriver(Path(directory)).generate([int(token) for token in ids], window, int(count))
    )
