"""The web page at `/`: its headers and content security policy. tests/page has a browser."""

from __future__ import annotations

import base64
import hashlib
import re

from in_process import App

from pass_server.page import PAGE, content_policy

HTML = PAGE.read_text(encoding="utf-8")


def test_the_page_needs_no_key(session):
    http = App(session, keys=("k",)).http
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
    http = App(session, page=False).http
    assert http.get("/").status_code == 404
    assert http.get("/v1/models").status_code == 200


def test_only_the_scripts_and_styles_of_the_page_may_run(session):
    policy = dict(
        part.split(" ", 1)
        for part in App(session).http.get("/").headers["content-security-policy"].split("; ")
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
