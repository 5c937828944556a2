"""`/`: who gets the page, and what it may do. tests/page looks at it in a browser."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from reciting import reciting_session
from starlette.testclient import TestClient

from pass_server.app import make_app
from pass_server.page import PAGE, content_policy
from pass_server.serve_options import ServeOptions

HTML = PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def session(tiny_bundle):
    with reciting_session(tiny_bundle) as session:
        yield session


def client(session, **options: object) -> TestClient:
    return TestClient(make_app(session, ServeOptions(**options)))


def test_everybody_gets_it(session):
    """Without a key: it holds none, and its requests need one."""
    http = client(session, keys=("k",))
    answer = http.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.text == HTML
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    asked = http.head("/")
    assert asked.status_code == 200
    assert asked.headers == answer.headers
    assert http.get("/v1/models").status_code == 401
    assert http.post("/").status_code == 405


def test_it_can_be_left_out(session):
    http = client(session, page=False)
    assert http.get("/").status_code == 404
    assert http.get("/v1/models").status_code == 200


def test_it_is_read_once(session, monkeypatch):
    http = client(session)
    monkeypatch.setattr("pass_server.page.PAGE", PAGE.with_name("no-such-file"))
    assert http.get("/").text == http.get("/").text == HTML


def test_no_other_script_and_style_than_its_own_may_run(session):
    policy = dict(
        part.split(" ", 1)
        for part in client(session).get("/").headers["content-security-policy"].split("; ")
    )
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    assert content_policy(PAGE.read_bytes().replace(b"use strict", b"use other")) != content_policy(
        PAGE.read_bytes()
    )


def test_it_names_nothing_elsewhere_and_stays_small():
    assert (
        re.findall(r"https?://(?!www\.w3\.org/2000/svg)|(?<![:\w])//[\w.]+/|@import|\burl\(", HTML)
        == []
    )
    assert not re.search(r"\son\w+=|\sstyle=", HTML), "the policy would refuse it"
    assert len(HTML.splitlines()) < 600


def colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", block))


LIGHT, DARK = (colours(block) for block in re.findall(r":root \{(.*?)\}", HTML, re.DOTALL))


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    channels = (int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


TEXT_ON = [
    *(
        ("text", under)
        for under in ("page", "card", "line", "lookahead-tint", "ngram-tint", "grammar-tint")
    ),
    *((name, under) for name in ("quiet", "bad", "good") for under in ("page", "card")),
    ("on-strong", "strong"),
]


@pytest.mark.parametrize("theme", [LIGHT, LIGHT | DARK], ids=["light", "dark"])
def test_text_can_be_read(theme):
    """4.5 for text, 3 for what else has to be seen: WCAG's level AA."""

    def too_close(pairs: list[tuple[str, str]], least: float) -> dict[tuple[str, str], float]:
        found = {(one, other): contrast(theme[one], theme[other]) for one, other in pairs}
        return {pair: value for pair, value in found.items() if value < least}

    assert too_close(TEXT_ON, 4.5) == {}
    assert (
        too_close([(name, "card") for name in ("lookahead", "ngram", "grammar", "strong")], 3) == {}
    )
