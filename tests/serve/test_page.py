"""The web page that a server has at `/`: its headers, content security policy, and colours. In a
browser it is tested by tests/page."""

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


def test_the_page_needs_no_key(session):
    """The page holds no key. The requests that it sends to the API need one."""
    http = client(session, keys=("k",))
    answer = http.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.text == HTML
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    head = http.head("/")
    assert head.status_code == 200
    assert head.headers == answer.headers
    assert http.get("/v1/models").status_code == 401
    assert http.post("/").status_code == 405


def test_the_page_can_be_turned_off(session):
    http = client(session, page=False)
    assert http.get("/").status_code == 404
    assert http.get("/v1/models").status_code == 200


def test_the_page_is_read_once(session, monkeypatch):
    http = client(session)
    monkeypatch.setattr("pass_server.page.PAGE", PAGE.with_name("no-such-file"))
    assert http.get("/").text == http.get("/").text == HTML


def test_only_the_scripts_and_styles_of_the_page_may_run(session):
    policy = dict(
        part.split(" ", 1)
        for part in client(session).get("/").headers["content-security-policy"].split("; ")
    )
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    forbidden = ("default-src", "base-uri", "form-action", "frame-ancestors")
    assert policy == dict.fromkeys(forbidden, "'none'") | {
        "connect-src": "'self'",
        "img-src": "data:",
        "require-trusted-types-for": "'script'",
    }
    changed = PAGE.read_bytes().replace(b"use strict", b"use other")
    assert content_policy(changed) != content_policy(PAGE.read_bytes())


def test_the_page_links_to_no_other_host_and_is_small():
    other_host = r"https?://(?!www\.w3\.org/2000/svg)|(?<![:\w])//[\w.]+/|@import|\burl\("
    assert re.findall(other_host, HTML) == []
    assert not re.search(r"\son\w+=|\sstyle=", HTML), "the policy would refuse it"
    assert len(HTML.splitlines()) < 600


def colours(block: str) -> dict[str, str]:
    """Return the colours in a block of CSS by name."""
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", block))


LIGHT, DARK = (colours(block) for block in re.findall(r":root \{(.*?)\}", HTML, re.DOTALL))


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, as WCAG 2 defines it: 0 to 1."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    channels = (int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, as WCAG 2 defines it: 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


TINTS = ("lookahead-tint", "ngram-tint", "grammar-tint")
TEXT_ON = [
    *(("text", ground) for ground in ("page", "card", "line", *TINTS)),
    *((name, ground) for name in ("quiet", "bad", "good") for ground in ("page", "card")),
    ("on-strong", "strong"),
]
"""Pairs of colours: of a text, and of its background."""


@pytest.mark.parametrize("theme", [LIGHT, LIGHT | DARK], ids=["light", "dark"])
def test_colours_have_contrast(theme):
    """As level AA of WCAG demands: 4.5 for text, 3 for other things that have to be seen."""
    marks = [(name, "card") for name in ("lookahead", "ngram", "grammar", "strong")]
    for pairs, min_contrast in ((TEXT_ON, 4.5), (marks, 3)):
        for front, ground in pairs:
            assert contrast(theme[front], theme[ground]) >= min_contrast, (front, ground)
