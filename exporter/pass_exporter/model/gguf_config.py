"""Reads a model's configuration from a .gguf file. Every key becomes a setting, must have a value
that changes nothing, or is refused: transformers ignores some. Meanings and defaults are
llama.cpp's."""

from __future__ import annotations

import math
from typing import Any

from transformers import PretrainedConfig

from pass_exporter.model.families import FULL_ATTENTION, SLIDING_ATTENTION
from pass_exporter.model.gguf_reader import ARCHITECTURE, GgufReader
from pass_runtime.errors import PassError

ORIGINAL_ADVICE = "take the original checkpoint of this model"

ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "gemma3")

SIZE_SETTINGS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Required keys."""

TOKEN_KEYS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
"""Settings -> names in keys `tokenizer.ggml.<name>_token_id`."""

READ_KEYS = (
    *SIZE_SETTINGS,
    "vocab_size",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.scale",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
READ_GEMMA3_KEYS = ("attention.sliding_window_pattern", "rope.freq_base_swa")

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "swin_norm": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys that no supported model needs, and their values that change nothing."""

GEMMA3_LOCAL_ROPE_BASE, GEMMA3_SLIDING_PATTERN = 10000.0, 6
"""Of layers with a sliding window; every 6th layer has none."""
GEMMA3_27B_LAYERS = 62
"""Gemma 3 27B scales attention by 1/sqrt(hidden size / heads). Only its number of layers tells, as
in llama.cpp."""
DEFAULT_ROPE_BASE = 10000.0


class _Keys(dict[str, Any]):
    """Keys `<architecture>.*` without their prefix, and names of tensors."""

    def __init__(self, reader: GgufReader) -> None:
        self.arch = str(reader.key(ARCHITECTURE))
        self.tensors = {tensor.name for tensor in reader.tensors}
        prefix = f"{self.arch}."
        for key in reader.fields:
            if key.startswith(prefix):
                self[key.removeprefix(prefix)] = reader.key(key)

    def refusal(self, key: str, problem: str = "is not supported") -> PassError:
        return PassError(f"{self.arch}.{key} = {self.get(key)!r} {problem}: {ORIGINAL_ADVICE}")


def gguf_settings(reader: GgufReader) -> dict[str, Any]:
    """Return the settings that a .gguf file states, by transformers' names. Raises PassError if a
    key is missing, unknown, or has a value that is not supported."""
    keys = _Keys(reader)
    if keys.arch not in ARCHITECTURES:
        raise PassError(
            f"GGUF architecture {keys.arch!r} is not supported (only "
            f"{', '.join(ARCHITECTURES)}): {ORIGINAL_ADVICE}"
        )
    _check_keys(keys)
    settings = {setting: keys[key] for key, setting in SIZE_SETTINGS.items()}
    for token, name in TOKEN_KEYS.items():
        settings[token] = reader.key(f"tokenizer.ggml.{name}_token_id")
    hidden_size, heads = settings["hidden_size"], settings["num_attention_heads"]
    rotated_dim = keys.get("rope.dimension_count")
    # Files of Llamas that state no key length may have it as the number of rotated dimensions.
    head_dim = (
        keys.get("attention.key_length")
        or (rotated_dim if keys.arch == "llama" else None)
        or hidden_size // heads
    )
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise keys.refusal("attention.value_length", f"is not the length of a key, {head_dim}")
    settings |= {
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in keys.tensors,
        "rope_parameters": _rope_parameters(keys, rotated_dim or head_dim, head_dim),
    }
    if keys.arch in ("llama", "qwen3", "gemma3"):
        settings["attention_bias"] = "blk.0.attn_q.bias" in keys.tensors
    if keys.arch == "llama":
        settings["mlp_bias"] = "blk.0.ffn_up.bias" in keys.tensors
    return settings | _attention_settings(keys, settings)


def check_settings(name: str, settings: dict[str, Any], config: PretrainedConfig) -> None:
    """Raise PassError if `config`, which transformers uses, lacks one of the file's `settings`."""
    for setting, value in settings.items():
        used = getattr(config, setting, None)
        if used != value and not (isinstance(value, dict) and _contains(used, value)):
            raise PassError(
                f"{setting} of {name} is {value!r} in the file, but transformers would use "
                f"{used!r}: {ORIGINAL_ADVICE}"
            )


def _contains(used: Any, stated: dict[str, Any]) -> bool:
    return isinstance(used, dict) and all(
        _contains(used.get(key), value) if isinstance(value, dict) else used.get(key) == value
        for key, value in stated.items()
    )


def _check_keys(keys: _Keys) -> None:
    is_gemma3 = keys.arch == "gemma3"
    read_keys = (*READ_KEYS, *READ_GEMMA3_KEYS) if is_gemma3 else READ_KEYS
    for key, value in keys.items():
        if key in NEUTRAL_VALUES:
            if value not in NEUTRAL_VALUES[key]:
                raise keys.refusal(key)
        elif key not in read_keys:
            raise keys.refusal(key, "is not known")
        elif isinstance(value, list) and key != "attention.sliding_window_pattern":
            raise keys.refusal(key, "has a value for each layer, which is not supported")
    required_keys = (*SIZE_SETTINGS, "rope.freq_base") if is_gemma3 else SIZE_SETTINGS
    for key in required_keys:
        if keys.get(key) is None:
            raise PassError(
                f"the file has no {keys.arch}.{key}: it is damaged or very old, get it again"
            )


def _rope_parameters(keys: _Keys, rotated_dim: int, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": keys.get("rope.freq_base", DEFAULT_ROPE_BASE),
    }
    if keys.arch == "phi3":
        ratio = rotated_dim / head_dim
        # transformers computes int(head_dim * ratio), which must not round below `rotated_dim`.
        rope["partial_rotary_factor"] = (
            ratio if int(head_dim * ratio) == rotated_dim else math.nextafter(ratio, 1)
        )
    elif rotated_dim != head_dim:
        raise keys.refusal(
            "rope.dimension_count", f"is not the size of a head, {head_dim}, which is not supported"
        )
    factor, scaling = keys.get("rope.scaling.factor", 0.0), keys.get("rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn") or (scaling == "yarn" and keys.arch == "gemma3"):
        raise keys.refusal("rope.scaling.type")
    if factor and scaling != "none":
        if keys.arch == "phi3":
            raise keys.refusal(
                "rope.scaling.factor", "is not supported by transformers for this architecture"
            )
        rope |= {"rope_type": scaling, "factor": factor}
        if scaling == "yarn":
            length = keys.get("rope.scaling.original_context_length", keys.get("context_length"))
            rope["original_max_position_embeddings"] = length
            for key in ("attn_factor", "beta_fast", "beta_slow"):
                if (value := keys.get(f"rope.scaling.yarn_{key}")) is not None:
                    rope["attention_factor" if key == "attn_factor" else key] = value
    if keys.arch != "gemma3":
        return rope
    sliding_rope = {
        "rope_type": "default",
        "rope_theta": keys.get("rope.freq_base_swa", GEMMA3_LOCAL_ROPE_BASE),
    }
    return {FULL_ATTENTION: rope, SLIDING_ATTENTION: sliding_rope}


def _attention_settings(keys: _Keys, settings: dict[str, Any]) -> dict[str, Any]:
    window = keys.get("attention.sliding_window") or None
    layers, head_dim = settings["num_hidden_layers"], settings["head_dim"]
    scale = keys.get("attention.scale") or head_dim**-0.5
    if keys.arch == "gemma3":
        if not keys.get("attention.scale") and layers == GEMMA3_27B_LAYERS:
            scale = (settings["hidden_size"] // settings["num_attention_heads"]) ** -0.5
        pattern = keys.get("attention.sliding_window_pattern", GEMMA3_SLIDING_PATTERN)
        # A list says for each layer whether it has a window. A number n: every n-th layer has none.
        has_window = (
            pattern
            if isinstance(pattern, list)
            else [bool((layer + 1) % pattern) for layer in range(layers)]
        )
        return {
            "query_pre_attn_scalar": round(scale**-2),
            # transformers needs a number, even if no layer has a window.
            "sliding_window": window or settings["max_position_embeddings"],
            "layer_types": [
                SLIDING_ATTENTION if slides and window else FULL_ATTENTION for slides in has_window
            ],
        }
    if not math.isclose(scale, head_dim**-0.5, rel_tol=1e-5):
        raise keys.refusal("attention.scale", f"is not 1/sqrt({head_dim}), which is not supported")
    if keys.arch == "phi3":
        return {"sliding_window": window}
    if window is not None and window < settings["max_position_embeddings"]:
        raise keys.refusal("attention.sliding_window", "is not supported for this architecture")
    return {"sliding_window": None}
