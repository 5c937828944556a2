"""Text for training: files, JSON lines, messages and excerpts. Unusable text is refused by name."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from conftest import EOS, make_tokenizer
from pass_runtime import PassError
from pass_trainer.config import Recipe
from pass_trainer.corpus import digest, read_sources
from pass_trainer.distill import Distiller


def refused(path: Path) -> str:
    with pytest.raises(PassError) as error:
        read_sources([path])
    assert path.name in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b" \n\n ", "empty"),
        (b"\x7fELF\x02\0\0\0 and more", "binary"),
        ("Straße".encode("latin-1"), "not UTF-8"),
        ("text".encode("utf-16"), "binary"),
    ],
)
def test_files_without_text_are_refused(tmp_path: Path, content: bytes, reason: str):
    (tmp_path / "text.txt").write_bytes(content)
    assert reason in refused(tmp_path / "text.txt")


@pytest.mark.parametrize("line", ["{", "[]", '"text"', '{"body": "x"}', "null"])
def test_a_wrong_json_line_is_refused_by_its_number(tmp_path: Path, line: str):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    assert "line 3" in refused(path)


@pytest.mark.parametrize("value", ["null", "7", '["a"]', "true", '{"a": 1}'])
@pytest.mark.parametrize("name", ["text", "prompt"])
def test_texts_and_prompts_must_be_strings(tmp_path: Path, name: str, value: str):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n{"' + name + '": ' + value + "}\n")
    assert f'line 2: "{name}" must be a string, not {value}' in refused(path)


def test_a_lone_surrogate_is_refused(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "\\ud83d"}\n')
    assert "line 1: not JSON" in refused(path)


def test_only_line_feeds_end_json_lines(tmp_path: Path):
    """JSON strings may contain U+2028, U+2029 and U+0085. A byte order mark is not part of the
    text."""
    texts = ["one\u2028two", "a\u2029b\x85c"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "data.jsonl").write_text("\r\n".join(lines), encoding="utf-8-sig", newline="")
    (source,) = read_sources([tmp_path / "data.jsonl"])
    assert source.documents == tuple(texts)


def test_files_that_are_missing_or_of_other_types_are_refused(tmp_path: Path):
    assert "No such file" in refused(tmp_path / "nothing.txt")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\x89PNG")
    assert ".txt" in refused(tmp_path / "pictures")
    with pytest.raises(PassError, match="--data"):
        read_sources([])


def test_a_directory_is_read_in_the_order_of_its_paths(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.py").write_text("code")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n{"prompt": "two"}\n')
    (tmp_path / "ignored.bin").write_bytes(b"\0")
    (source,) = read_sources([tmp_path])
    assert source.documents == ("text", "code", "one", "two")
    assert digest([source]) == digest(read_sources([tmp_path]))
    (tmp_path / "a.txt").write_text("other")
    assert digest([source]) != digest(read_sources([tmp_path]))


def test_the_digest_tells_two_sources_from_one_with_the_same_files(tmp_path: Path):
    """Each source gives as many excerpts, but the documents of one source by their length."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    apart = digest(read_sources([tmp_path / "a.txt", tmp_path / "b.txt"]))
    assert apart != digest(read_sources([tmp_path])) != digest(read_sources([tmp_path / "a.txt"]))


def test_longer_documents_give_more_excerpts_which_start_at_lines(tmp_path: Path):
    (tmp_path / "short.txt").write_text("short line\n" * 100)
    (tmp_path / "tall.txt").write_text("tall line\n" * 900)
    (source,) = read_sources([tmp_path])
    rng = random.Random(0)
    found = [source.excerpt(rng, 50) for _ in range(1000)]
    assert all(0 < len(text) <= 50 for text in found)
    first = Counter(text.split("\n")[0] for text in found)
    assert set(first) == {"short line", "tall line"}
    assert 50 < first["short line"] < 200  # 100 of 1000 expected


def messages(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"message": text}) + "\n" for text in texts))
    return path


def test_messages_are_kept_apart_from_text(tmp_path: Path):
    """A file with both is refused, and a file of the same words as text has another digest."""
    (source,) = read_sources([messages(tmp_path / "log.jsonl", "hello there", "what is a fox?")])
    assert source.messages and source.documents == ("hello there", "what is a fox?")
    (tmp_path / "text.jsonl").write_text('{"text": "hello there"}\n{"prompt": "what is a fox?"}\n')
    (text,) = read_sources([tmp_path / "text.jsonl"])
    assert not text.messages and digest([text]) != digest([source])
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"text": "an article"}\n')
    assert '"message" and other text' in refused(tmp_path / "log.jsonl")


class Silence:
    """A TextWriter that returns the prompts alone."""

    name = "silence"

    def write(
        self, prompts, _length: int, _temperature: float, _top_p: float, _seed: int
    ) -> list[list[int]]:
        return [list(prompt) for prompt in prompts]


@pytest.mark.parametrize("template", [True, False])
def test_a_message_is_a_prompt_as_a_whole(tmp_path: Path, template: bool):
    """It goes through the chat template, if there is one. A message that leaves no room for an
    answer is left out."""
    tokenizer = make_tokenizer()
    if not template:
        tokenizer.chat_template = None
    sources = read_sources([messages(tmp_path / "log.jsonl", "why is a fox red?", "brown " * 200)])
    distiller = Distiller(Silence(), tokenizer, (EOS,), sources, Recipe(sequences=8, length=80))
    distiller.check()
    distiller.write_missing(tmp_path / "shards", [0], lambda *_: None)
    found = distiller.read(tmp_path / "shards", [0])
    rows = zip(found.tokens, found.prompt_lengths, strict=True)
    text = "<bos>[user]why is a fox red?\n[assistant]" if template else "why is a fox red?"
    assert {tokenizer.decode(row[:size]) for row, size in rows} == {text}


def test_messages_of_which_none_fits_are_refused(tmp_path: Path):
    sources = read_sources([messages(tmp_path / "log.jsonl", "brown " * 200)])
    distiller = Distiller(
        Silence(), make_tokenizer(), (EOS,), sources, Recipe(sequences=8, length=80)
    )
    with pytest.raises(
        PassError, match="its messages are too long; use a larger --sequence-length"
    ):
        distiller.check()
