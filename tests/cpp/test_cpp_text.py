"""In C++, the ids of a text and the text of ids are those of the Python runtime."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from cpp_programs import ROOT, program_at
from tokenizer_kinds import BYTES, TOKENIZERS, whole
from tokenizers import Tokenizer

from pass_runtime.text.detokenizer import TextStream

ALPHABETS = [
    range(0x20, 0x7F),
    range(0xA1, 0x250),
    range(0x400, 0x500),
    range(0x4E00, 0x4F00),
    range(0x1F300, 0x1F700),
    [0x09, 0x0A, 0x0D, 0x20, 0x20, 0xA0, 0x200D, 0x301, 0xFE0F],
    [c for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000],
]


@pytest.fixture(scope="session")
def program() -> Path:
    return program_at("text")


def answers(program: Path, bundle: Path, questions: list, **environment: str) -> list:
    """Skip the test without onnxruntime-genai, unless `environment` names another library."""
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    run = subprocess.run(
        [program, bundle],
        input=lines,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )
    if "onnxruntime-genai" in run.stderr and "cannot be opened" in run.stderr and not environment:
        pytest.skip("onnxruntime-genai is not installed (extra peers)")
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def refusal_of(program: Path, bundle: Path, questions: str = "", **environment: str) -> str:
    run = subprocess.run(
        [program, bundle],
        input=questions,
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1)
    return run.stderr


def random_texts(count: int) -> list[str]:
    generator = random.Random(0)
    return [
        "".join(
            chr(generator.choice(generator.choice(ALPHABETS)))
            for _ in range(generator.randint(0, 24))
        )
        for _ in range(count)
    ]


def pieces(
    tokenizer: Tokenizer,
    ids: list[int],
    stop: list[str],
    prompt: Sequence[int] = (),
    min_tokens: int = 0,
) -> dict:
    stream, answer = TextStream(tokenizer, prompt, stop, min_tokens), {"pieces": []}
    for token in ids:
        text, stop_string = stream.read(token)
        answer["pieces"].append(text)
        if stop_string is not None:
            answer["stop"] = stop_string
            break
    return answer | {"rest": stream.flush(), "text": tokenizer.decode(ids)}


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name.startswith("byte-")])
def test_text_is_that_of_python_after_any_prompt(program: Path, tmp_path: Path, name: str):
    """With tokens and stop strings of every kind, and prompts that end within a character."""
    tokenizer, generator = TOKENIZERS[name], random.Random(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # A byte-level tokenizer has no such tokens: its first ids are those of bytes.
    tokens_of_bytes = [
        t for byte in BYTES if (t := tokenizer.token_to_id(f"<0x{byte:02X}>")) is not None
    ] or BYTES

    def tokens() -> list[int]:
        """About half stand for bytes, and some ids have no token."""
        any_tokens = range(tokenizer.get_vocab_size() + 2)
        sources = generator.choices([any_tokens, tokens_of_bytes], k=generator.randint(0, 14))
        return [generator.choice(source) for source in sources]

    cases = [
        {
            "ids": tokens(),
            "prompt": tokens(),
            "stop": generator.sample(
                ["a", " a", "aa", "</s>", "x\ufffd", "\ufffd\ufffd\ufffd"], k=2
            ),
            "min_tokens": generator.choice([0, 0, 3]),
        }
        for _ in range(3000)
    ]
    cpp_answers = answers(program, tmp_path, cases)
    for case, answer in zip(cases, cpp_answers, strict=True):
        expected = pieces(tokenizer, **case) | {"text": whole(name, case["ids"], cut=False)}
        assert answer == expected, case
    assert len({answer.get("stop") for answer in cpp_answers}) == 7  # none, and each stop string


def test_texts_for_a_tokenizer_with_byte_fallback_are_refused(program: Path, tmp_path: Path):
    """The library would compute other ids than Python. Tokens become text without the library."""
    TOKENIZERS["byte-fallback"].save(str(tmp_path / "tokenizer.json"))
    answers(program, tmp_path, [{"ids": [3], "stop": []}], PASS_ONNXRUNTIME_GENAI="/nowhere.so")
    reason = "only the Python runtime turns text into the ids of a tokenizer with byte fallback"
    assert reason in refusal_of(program, tmp_path, '"a"\n')


@pytest.mark.parametrize(
    "saved",
    [
        {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst",
                        "stride": 0}},
        {"padding": {"strategy": {"Fixed": 64}, "direction": "Right",
                     "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                     "pad_token": "<bos>"}},
    ],
    ids=lambda saved: next(iter(saved)),
)  # fmt: skip
def test_saved_truncation_and_padding_are_ignored(
    program: Path, tiny_bundle: Path, tmp_path: Path, saved: dict
):
    """Hugging Face ignores them by default, too."""
    document = json.loads((tiny_bundle / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(document | saved), encoding="utf-8")
    text = "The quick brown fox jumps over the lazy dog"
    (ids,) = answers(program, tmp_path, [text])
    assert ids == Tokenizer.from_file(str(tiny_bundle / "tokenizer.json")).encode(text).ids
    assert len(ids) > 8
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids != ids


def differences(program: Path, bundle: Path) -> tuple[list[str], list[str]]:
    """Return the texts whose ids differ from Python's, and Python's texts of ids that differ."""
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    prompts = [
        json.loads(line)["prompt"]
        for line in (ROOT / "tests/parity/prompts.jsonl").read_text().splitlines()
    ]
    special = ["<eos>12 <eos", "<|im_start|>user\n1<|im_end|>", "a\n    12  3.5\u0663"]
    texts = prompts + random_texts(1000) + special
    ids = [tokenizer.encode(text).ids for text in texts]
    cpp_ids = answers(program, bundle, texts)
    other_ids = [text for text, a, b in zip(texts, cpp_ids, ids, strict=True) if a != b]
    generator = random.Random(1)
    any_tokens, stop = range(tokenizer.get_vocab_size() + 2), ["e", "th", " a", "<eos>"]
    cases = [{"ids": row, "stop": []} for row in ids]
    cases += [{"ids": generator.choices(any_tokens, k=20), "stop": stop} for _ in texts]
    cpp_answers = answers(program, bundle, cases)
    expected = [pieces(tokenizer, **case) for case in cases]
    return other_ids, [b["text"] for a, b in zip(cpp_answers, expected, strict=True) if a != b]


def test_ids_and_text_are_those_of_python(program: Path, tiny_bundle: Path):
    assert differences(program, tiny_bundle) == ([], [])


@pytest.mark.parametrize("individual", [True, False])
def test_texts_are_split_at_digits(
    program: Path, tiny_bundle: Path, tmp_path: Path, individual: bool
):
    """SmolLM2's tokenizer does so: whitespace before a digit is encoded as at a text's end."""
    document = json.loads((tiny_bundle / "tokenizer.json").read_text(encoding="utf-8"))
    steps = [{"type": "Digits", "individual_digits": individual}, document["pre_tokenizer"]]
    document |= {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    assert differences(program, tmp_path) == ([], [])


def test_missing_files_and_other_tokenizers_are_refused(
    program: Path, tiny_bundle: Path, tmp_path: Path
):
    refusal = partial(refusal_of, program)
    assert "tokenizer.json is missing" in refusal(tmp_path)
    assert "set PASS_ONNXRUNTIME_GENAI" in refusal(
        tiny_bundle, PASS_ONNXRUNTIME_GENAI="/nowhere.so"
    )
    document = json.loads((tiny_bundle / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(document | {"decoder": {"type": "Metaspace"}})
    )
    assert "a decoder of type Metaspace" in refusal(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is no tokenizer" in refusal(tmp_path)
