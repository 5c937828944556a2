"""`suffix` in /v1/completions: the answer is what stands between the prompt and the suffix, as
editors ask for it."""

from __future__ import annotations

import pytest
from in_process import App
from reciting import reciting_session
from running import expect_error
from tool_models import HERMES, with_template

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
GAP = "a + b"


@pytest.fixture(scope="module")
def session(random_bundle, tmp_path_factory):
    """A session with Qwen's tokens, whose model writes GAP and then <|fim_pad|>, and a client of
    its server."""
    output = tmp_path_factory.mktemp("infill") / "bundle"
    bundle = with_template(random_bundle, output, HERMES, QWEN)
    answers: list[int] = []
    start = 0

    def script(position: int) -> int:
        return answers[min(max(position - start, 0), len(answers) - 1)]

    session = reciting_session(bundle, script, slots=2)
    answers += session.encode(f"{GAP}<|fim_pad|>")
    start = len(session.encode_infill(PREFIX, SUFFIX))
    return session


@pytest.fixture
def client(session):
    return App(session)


def complete(client, **fields):
    return client.complete(**{"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 32} | fields)


@pytest.mark.parametrize("n", [1, 2])
def test_the_answer_is_the_text_in_the_gap(session, client, n):
    answer = complete(client, n=n).json()
    for choice in answer["choices"]:
        assert (choice["text"], choice["finish_reason"]) == (GAP, "stop")
        assert choice["pass"]["stop_reason"] == session.vocabulary.special("<|fim_pad|>")
    before, after, gap, _ = QWEN
    prompt = session.encode(f"{before}{PREFIX}{after}{SUFFIX}{gap}")
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert complete(client, echo=True).json()["choices"][0]["text"] == PREFIX + GAP


def test_a_stream(client):
    content = complete(client, stream=True).text
    assert '"finish_reason":"stop"' in content
    assert "".join(part.split('"', 1)[0] for part in content.split('"text":"')[1:]) == GAP


def test_every_prompt_of_a_list_has_the_suffix(session, client):
    answer = complete(client, prompt=[PREFIX, ""], max_tokens=1).json()
    expected = [len(session.encode_infill(each, SUFFIX)) for each in (PREFIX, "")]
    assert answer["usage"]["prompt_tokens"] == sum(expected)


def test_without_end_tokens_the_text_goes_on(client):
    (choice,) = complete(client, ignore_eos=True).json()["choices"]
    assert choice["finish_reason"] == "length" and choice["text"].startswith(GAP)


@pytest.mark.parametrize("suffix", [None, ""])
def test_an_empty_suffix_is_none(session, client, suffix):
    answer = complete(client, suffix=suffix, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == len(session.encode(PREFIX))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": [5, 6]}, "prompt", "must be text"),
        ({"echo": True, "logprobs": 1}, "echo", "leave out echo or logprobs"),
        ({"suffix": "x " * 5000}, "prompt", "shorten it"),
        ({"suffix": 5}, "suffix", ""),
    ],
)
def test_what_is_refused(client, fields, param, message):
    problem = expect_error(complete(client, **fields), 400)
    assert problem["param"] == param and message in problem["message"]
