"""Tiny models of every supported family, with random configurations and tokenizers, as directories
and as .gguf files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from conftest import CORPUS, make_model, randomize_vectors
from pass_exporter.model.families import SUPPORTED_FAMILIES

TOKENIZERS = ("byte-level", "byte-fallback", "metaspace", "wordpiece")
GGUF_TOKENIZERS = TOKENIZERS[:2]
"""Kinds of tokenizers that an export reads from .gguf files."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
GGUF_NAMES = {"mistral": "llama", "gemma3_text": "gemma3"}
"""Names of families in .gguf files, if they differ."""
NO_GGUF = ("gemma", "olmo2")
"""Families whose .gguf files transformers does not read (refused: tests/exporter/test_gguf.py)."""
FREE_HEAD_DIM = ("llama", "mistral", "qwen3", "gemma", "gemma3_text")
"""Families whose `head_dim` is free; in the others it is hidden_size / num_attention_heads."""
WITH_ATTENTION_BIAS = ("llama", "qwen3", "gemma", "gemma3_text", "olmo2")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu", "relu")
ACTIVATION_KEYS = {"gemma3_text": "hidden_activation"}
"""The setting of the activation function, if it is not `hidden_act`."""


@dataclass(frozen=True)
class Case:
    family: str
    config: dict[str, Any]
    tokenizer: str
    prefix_space: bool
    as_gguf: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(SUPPORTED_FAMILIES))
    as_gguf = family not in NO_GGUF and draw(st.booleans())
    heads, positions = draw(st.sampled_from((2, 4))), draw(st.sampled_from((64, 128, 256)))
    layers = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from((8, 16, 24))) if family in FREE_HEAD_DIM else None
    eps = draw(st.sampled_from((1e-6, 1e-5, 1e-3)))
    config: dict[str, Any] = {
        "hidden_size": draw(st.sampled_from((32, 64))),
        "intermediate_size": draw(st.sampled_from((48, 96))),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])),
        "max_position_embeddings": positions,
        "rms_norm_eps": float(np.float32(eps)),
        "tie_word_embeddings": draw(st.booleans()),
        "head_dim": head_dim,
    }
    if family in WITH_ATTENTION_BIAS:
        config["attention_bias"] = draw(st.booleans())
    if family == "llama":
        config["mlp_bias"] = draw(st.booleans())
    if not as_gguf:  # a .gguf file does not name the activation function
        config[ACTIVATION_KEYS.get(family, "hidden_act")] = draw(st.sampled_from(ACTIVATIONS))
    window = draw(st.sampled_from((None, 8, 24)))
    if family in ("mistral", "phi3"):
        config["sliding_window"] = window
    if family in ("qwen2", "qwen3"):
        max_window_layers = draw(st.integers(0, layers))
        config |= {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": max_window_layers,
        }
    if family == "gemma3_text":
        layers_slide = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
        config |= {
            "sliding_window": window or 24,
            "layer_types": [
                "sliding_attention" if slides else "full_attention" for slides in layers_slide
            ],
            "query_pre_attn_scalar": draw(st.sampled_from((head_dim, 20))),
            "final_logit_softcapping": draw(st.sampled_from((None, None, None, 30.0))),
        }
    config["rope_parameters"] = draw(rotations(family, positions))
    kinds = TOKENIZERS
    if as_gguf:  # mostly such as are not refused
        kinds += GGUF_TOKENIZERS * 3
    return Case(family, config, draw(st.sampled_from(kinds)), draw(st.booleans()), as_gguf)


@st.composite
def rotations(draw: st.DrawFn, family: str, positions: int) -> dict[str, Any]:
    theta = draw(st.sampled_from((100.0, 10000.0, 500000.0)))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if family == "phi3":
        return rope | {"partial_rotary_factor": draw(st.sampled_from((1.0, 0.5, 0.75)))}
    kind = draw(st.sampled_from(("default", "default", "linear", "yarn", "llama3", "dynamic")))
    if kind != "default":
        rope |= {"rope_type": kind, "factor": draw(st.sampled_from((2.0, 4.0)))}
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = positions // 4
    if kind == "yarn" and draw(st.booleans()):
        rope |= {"beta_fast": 16.0, "beta_slow": 2.0}
        rope |= {"attention_factor": 1.5} if draw(st.booleans()) else {}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if family != "gemma3_text":
        return rope
    local = {"rope_type": "default", "rope_theta": draw(st.sampled_from((100.0, 10000.0)))}
    return {"full_attention": rope, "sliding_attention": local}


def tokenizer_of(case: Case) -> Any:
    """Return a tokenizer with the special tokens SPECIAL, which begins a text with <s>, and with a
    chat template."""
    kind = case.tokenizer
    options = {"vocab_size": 360, "special_tokens": list(SPECIAL), "show_progress": False}
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
    elif kind == "byte-fallback":
        # Letters that have no token of their own are written as bytes.
        letters = sorted(set("▁" + "".join(CORPUS).replace(" ", "▁")) - set("ÜßäéÜ12345"))
        words = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256))]
        words += ["▁t", "he", "▁the", "in", *letters, *SPECIAL[3:]]
        vocab = {word: token for token, word in enumerate(words)}
        merges = generate_merges(vocab, {word: -float(token) for word, token in vocab.items()})
        tokenizer = LlamaTokenizer(
            vocab=vocab, merges=merges, add_prefix_space=case.prefix_space
        ).backend_tokenizer
        tokenizer.add_special_tokens(list(SPECIAL))
        if (
            case.family == "phi3" and case.prefix_space
        ):  # as published ones do, it adds a space after special tokens
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
            tokenizer.pre_tokenizer = None
    elif kind == "metaspace":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.train_from_iterator(CORPUS, trainers.UnigramTrainer(unk_token="<unk>", **options))
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(**options))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    )


def save(case: Case, directory: Path) -> Path:
    tokenizer = tokenizer_of(case)
    config = {
        name: value
        for name, value in case.config.items()
        if value is not None or name == "sliding_window"
    }
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    make_model(directory, case.family, vocab_size=len(tokenizer), **ids, **config)
    randomize_vectors(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_gguf(case: Case, model: Path, path: Path) -> Path:
    """Write a model that `save` has saved into a .gguf file: in float32, with the metadata keys and
    tensor names of llama.cpp's converter."""
    config, arch = case.config, GGUF_NAMES.get(case.family, case.family)
    writer = gguf.GGUFWriter(path, arch)
    heads = config["num_attention_heads"]
    size = config["head_dim"] or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["head_dim"]:
        writer.add_key_length(size)
        writer.add_value_length(size)
    rope = config["rope_parameters"]
    if case.family == "gemma3_text":
        writer.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        writer.add_array(
            "gemma3.attention.sliding_window_pattern",
            [kind == "sliding_attention" for kind in config["layer_types"]],
        )
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)
        if config["final_logit_softcapping"]:
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        rope = rope["full_attention"]
    _add_rotation(writer, arch, rope, size)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    _add_tokenizer(writer, case, model)
    names = gguf.get_tensor_name_map(
        next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == arch),
        config["num_hidden_layers"],
    )
    for name, tensor in load_file(model / "model.safetensors").items():
        stem, _, part = name.rpartition(".")
        values = tensor.float().numpy()
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            values = _interleaved(
                values, heads if stem.endswith("q_proj") else config["num_key_value_heads"]
            )
        if arch == "gemma3" and stem.endswith("norm"):
            values = values + 1
        writer.add_tensor(f"{names.get_name(stem)}.{part}", np.ascontiguousarray(values))
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", np.ones(size // 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rotation(writer: gguf.GGUFWriter, arch: str, rope: dict[str, Any], size: int) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch in ("llama", "phi3"):
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "dynamic":  # llama.cpp's converter leaves this key out
        writer.add_string(f"{arch}.rope.scaling.type", "dynamic")
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key in ("attention_factor", "beta_fast", "beta_slow"):
            if key in rope:
                name = key.replace("attention_factor", "attn_factor")
                writer.add_float32(f"{arch}.rope.scaling.yarn_{name}", rope[key])


def _add_tokenizer(writer: gguf.GGUFWriter, case: Case, model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, list):  # a unigram model: pairs of a word and its score
        scores = dict(vocab)
        ids = {word: token for token, (word, _) in enumerate(vocab)}
    else:
        scores = {word: -float(token) for word, token in vocab.items()}
        ids = dict(vocab)
    control = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids |= control
    words = sorted(ids, key=ids.__getitem__)
    types = dict.fromkeys(words, gguf.TokenType.NORMAL)
    types |= {word: gguf.TokenType.BYTE for word in words if word.startswith("<0x")}
    types |= dict.fromkeys(control, gguf.TokenType.CONTROL)
    kinds = {"byte-level": "gpt2", "byte-fallback": "llama", "metaspace": "t5", "wordpiece": "bert"}
    writer.add_tokenizer_model(kinds[case.tokenizer])
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types(list(types.values()))
    if case.tokenizer == "byte-level":
        writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    else:
        writer.add_token_scores([scores.get(word, 0.0) for word in words])
        writer.add_add_space_prefix(case.prefix_space)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def _interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
