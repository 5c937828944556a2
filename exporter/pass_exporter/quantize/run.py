"""Quantizes a loaded model by a spec, on calibration text if the spec needs it."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pass_exporter.model.load import LoadedModel
from pass_exporter.model.lookahead import LookaheadWeights
from pass_exporter.progress import Progress, Step
from pass_exporter.quantize.gguf_codes import GgufCodes
from pass_exporter.quantize.gptq import gptq_model
from pass_exporter.quantize.rounding import fits, round_to
from pass_exporter.quantize.spec import INT8, QuantSpec, WeightScheme
from pass_exporter.quantize.text import PROMPTS, file_ids, own_ids
from pass_exporter.quantize.weights import (
    LM_HEAD,
    QuantizedModel,
    layer_schemes,
    make_groups_alike,
    quantized_modules,
    round_weights,
    set_weight,
    shares_table,
    weight_name,
)
from pass_exporter.threads import one_thread

OWN_TEXT, FILE_TEXT = "the model's own text", "a file"
MAX_DIVERGENCE = 0.01
"""By how many nats rounding the LM head may change the next token's distribution. In 5 bits it is
0.005 for Qwen2.5-Coder-0.5B, whose perplexity grows by 1 %, and 0.033 for SmolLM2-135M: 4 %."""


def quantize(
    loaded: LoadedModel,
    lookahead_weights: LookaheadWeights,
    spec: QuantSpec,
    calibration: str | None,
    progress: Progress,
) -> QuantizedModel:
    """Quantize the model and the adapter in place, and return their codes. calibration: the text of
    a file; None if the model writes the text itself."""
    model, source, quantized = loaded.model, loaded.source, QuantizedModel(spec)
    shared_table, keeps_codes = shares_table(model, spec), source.is_gguf and spec.keeps_codes
    fine_head = INT8
    if shared_table or keeps_codes:
        fine_head = head_scheme(model, loaded.tokenizer, spec.fine)
    schemes = layer_schemes(model, spec, fine_head)
    if keeps_codes:
        step = progress.phase("keeping the file's codes")
        file = GgufCodes(Path(source.location), model, with_offsets=spec.keeps_offsets)
        schemes = _keep_codes(file, model, schemes, fine_head, quantized, step)
        table = model.get_input_embeddings().weight
        if table.dtype == torch.float32 and not shared_table:
            quantized.table = file.codes("embed_tokens", table.detach())
    by_gptq = {
        layer: scheme
        for layer, scheme in schemes.items()
        if spec.gptq and not (shared_table and layer == LM_HEAD)
    }
    ids = None
    if any(scheme.code_type == "int4" for scheme in by_gptq.values()):
        if calibration is not None:
            ids = file_ids(loaded.tokenizer, calibration)
        else:
            step = progress.phase("writing text to calibrate on")
            ids = own_ids(model, loaded.tokenizer, loaded.geometry.max_capacity, step)
        quantized.calibration = OWN_TEXT if calibration is None else FILE_TEXT
    elif calibration is not None:
        warnings.warn("--calibrate was not needed: the file's own codes are kept", stacklevel=2)
    step = progress.phase("quantizing")
    if ids is not None:
        rounded = gptq_model(model, by_gptq, ids, step)
        quantized.weights |= {weight_name(layer): weight for layer, weight in rounded.items()}
    round_weights(model, lookahead_weights.adapter, schemes, quantized, step)
    if shared_table and weight_name(LM_HEAD) in quantized.weights:
        set_weight(model.get_input_embeddings(), model.lm_head.weight.detach())
        quantized.table = quantized.weights.get(weight_name(LM_HEAD))
    make_groups_alike(model, quantized)
    return quantized


def _keep_codes(
    file: GgufCodes,
    model: PreTrainedModel,
    schemes: dict[str, WeightScheme],
    fine_head: WeightScheme,
    quantized: QuantizedModel,
    step: Step,
) -> dict[str, WeightScheme]:
    """Add the file's codes to `quantized`. Return the schemes of other layers."""
    modules, left = quantized_modules(model), {}
    with one_thread():
        for done, (layer, scheme) in enumerate(schemes.items()):
            fine = fine_head if layer == LM_HEAD else quantized.spec.fine
            codes = None
            if not file.is_finer(layer, fine):
                codes = file.codes(layer, modules[layer].get_parameter("weight").detach())
            if codes is None:
                left[layer] = file.scheme(layer, scheme, fine)
            else:
                quantized.weights[weight_name(layer)] = codes
                set_weight(modules[layer], codes.dequantized())
            step(done + 1, len(schemes))
    return left


@torch.no_grad()
def head_scheme(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, scheme: WeightScheme
) -> WeightScheme:
    """Return `scheme` if the LM head can be rounded to it, else INT8."""
    weight = model.lm_head.weight.detach()
    if scheme == INT8 or not fits(scheme, weight):
        return INT8
    weight, divergences = weight.float(), list[torch.Tensor]()
    with one_thread():
        rounded = round_to(scheme, weight).dequantized()
    for prompt in PROMPTS:
        ids = tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0].float()
        exact, changed = ((hidden @ each.T).log_softmax(-1) for each in (weight, rounded))
        divergences.append((exact.exp() * (exact - changed)).sum(-1))
    return scheme if float(torch.cat(divergences).mean()) <= MAX_DIVERGENCE else INT8
