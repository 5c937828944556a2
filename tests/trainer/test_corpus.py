"""What `--data` reads."""

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
from pass_trainer.text import Distiller


def refused(path: Path) -> str:
    """Return the one line, which names the file."""
    with pytest.raises(PassError) as error:
        read_sources([path])
    assert path.name in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


FINE = '{"text": "fine"}\n\n'


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"", "empty"),
        ("a.txt", b" \n\n ", "empty"),
        ("a.txt", b"\x7fELF\x02\0\0\0 and more", "binary"),
        ("a.txt", "text".encode("utf-16"), "binary"),
        ("a.txt", "Straße".encode("latin-1"), "not UTF-8"),
        ("a.txt", None, "No such file"),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', "line 1: not JSON"),
        *(
            ("a.jsonl", f"{FINE}{line}\n".encode(), "line 3")
            for line in ("{", "[]", '"text"', '{"body": "x"}', "null")
        ),
        *(
            (
                "a.jsonl",
                f'{FINE}{{"{key}": {value}}}\n'.encode(),
                f'"{key}" must be a string, not {value}',
            )
            for key in ("text", "prompt")
            for value in ("null", "7", '["a"]', "true", '{"a": 1}')
        ),
    ],
)
def test_files_without_text_are_refused(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert reason in refused(tmp_path / name)


def test_only_line_feeds_end_json_lines(tmp_path: Path):
    """JSON strings may contain what `str.splitlines` splits at."""
    texts = ["one\u2028two", "a\u2029b\x85c"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "data.jsonl").write_text("\r\n".join(lines), encoding="utf-8-sig", newline="")
    (source,) = read_sources([tmp_path / "data.jsonl"])
    assert source.documents == tuple(texts)


def test_directories_without_text_are_refused(tmp_path: Path):
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


def test_the_digest_depends_on_how_files_are_divided_into_sources(tmp_path: Path):
    a, b = (tmp_path / name for name in ("a.txt", "b.txt"))
    for path in (a, b):
        path.write_text(path.name)
    assert len({digest(read_sources(paths)) for paths in ([a, b], [tmp_path], [a])}) == 3


def test_longer_documents_give_more_excerpts_which_start_at_lines(tmp_path: Path):
    (tmp_path / "short.txt").write_text("short line\n" * 100)
    (tmp_path / "tall.txt").write_text("tall line\n" * 900)
    (source,) = read_sources([tmp_path])
    rng = random.Random(0)
    excerpts = [source.excerpt(rng, 50) for _ in range(1000)]
    assert all(0 < len(text) <= 50 for text in excerpts)
    first_lines = Counter(text.split("\n")[0] for text in excerpts)
    assert set(first_lines) == {"short line", "tall line"}
    # short.txt has 1100 of the 10,100 characters, so about 109 of the 1000 excerpts.
    assert 50 < first_lines["short line"] < 200


def write_messages(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"message": text}) + "\n" for text in texts))
    return path


def test_a_file_of_messages_differs_from_a_file_of_text_and_must_not_contain_text(tmp_path: Path):
    (source,) = read_sources(
        [write_messages(tmp_path / "log.jsonl", "hello there", "what is a fox?")]
    )
    assert source.messages and source.documents == ("hello there", "what is a fox?")
    (tmp_path / "text.jsonl").write_text('{"text": "hello there"}\n{"prompt": "what is a fox?"}\n')
    (text,) = read_sources([tmp_path / "text.jsonl"])
    assert not text.messages and digest([text]) != digest([source])
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"text": "an article"}\n')
    assert '"message" and other text' in refused(tmp_path / "log.jsonl")


class NoAnswers:
    name = "no answers"

    def write(
        self, prompts, _length: int, _temperature: float, _top_p: float, _seed: int
    ) -> list[list[int]]:
        return [list(prompt) for prompt in prompts]


@pytest.mark.parametrize("template", [True, False])
def test_a_whole_message_becomes_a_prompt(tmp_path: Path, template: bool):
    """A sequence of 80 tokens has no room for the second one."""
    tokenizer = make_tokenizer()
    if not template:
        tokenizer.chat_template = None
    path = write_messages(tmp_path / "log.jsonl", "why is a fox red?", "brown " * 200)
    sources = read_sources([path])
    distiller = Distiller(
        NoAnswers(), tokenizer, (EOS,), sources, Recipe(sequences=8, sequence_length=80)
    )
    distiller.check()
    distiller.write_missing(tmp_path / "shards", [0])
    data = distiller.read(tmp_path / "shards", [0])
    rows = zip(data.tokens, data.prompt_lengths, strict=True)
    prompts = {tokenizer.decode(tokens[:prompt_length]) for tokens, prompt_length in rows}
    text = "<bos>[user]why is a fox red?\n[assistant]" if template else "why is a fox red?"
    assert prompts == {text}


def test_a_source_whose_messages_are_all_too_long_is_refused(tmp_path: Path):
    sources = read_sources([write_messages(tmp_path / "log.jsonl", "brown " * 200)])
    recipe = Recipe(sequences=8, sequence_length=80)
    distiller = Distiller(NoAnswers(), make_tokenizer(), (EOS,), sources, recipe)
    with pytest.raises(
        PassError, match="its messages are too long; use a larger --sequence-length"
    ):
        distiller.check()
