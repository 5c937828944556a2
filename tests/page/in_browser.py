"""The server's page in headless Chromium. Only `scripts/test.sh page` runs these tests.

PASS_PAGE_BUNDLE: a bundle to serve (default: a tiny random model). PASS_PAGE_SHOTS: where
screenshots go (default: build/page).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from running import Server

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: scripts/test.sh page"
)
expect = playwright.expect
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed: scripts/test.sh page", allow_module_level=True)

SHOTS = Path(os.environ.get("PASS_PAGE_SHOTS", "build/page"))
QUESTION = (
    "Write a Python function that checks whether a number is prime, and one that lists the primes "
    "up to n."
)
WIDE, NARROW = {"width": 1240, "height": 760}, {"width": 390, "height": 844}
MILLISECONDS = 120_000
"""How long a test waits for the end of a text; a busy machine is slow."""
SOURCES = {"model", "lookahead", "ngram", "grammar"}
"""The classes of a token's element, by what proposed the token."""


@pytest.fixture(scope="session")
def served(request, tmp_path_factory) -> Iterator[Server]:
    bundle = os.environ.get("PASS_PAGE_BUNDLE") or request.getfixturevalue("random_bundle")
    threads = ("--threads", os.cpu_count() or 1) if "PASS_PAGE_BUNDLE" in os.environ else ()
    with Server(
        bundle, tmp_path_factory.mktemp("page") / "log", "--max-batch-size", 1, *threads
    ) as server:
        yield server


@pytest.fixture(scope="session")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield chromium
        chromium.close()


class Page:
    """An open page, used as a person does. problems: errors in its console. posted: path and body
    of its API requests. run: the index of an answer."""

    def __init__(self, page, url: str) -> None:
        self.page, self.problems, self.posted, self.hosts = page, [], [], set()
        page.set_default_timeout(MILLISECONDS / 4)
        page.on("console", self._note_message)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", self._note_request)
        page.goto(url)

    def _note_message(self, message) -> None:
        if message.type == "error":
            self.problems.append(message.text)

    def _note_request(self, request) -> None:
        address = urlsplit(request.url)
        self.hosts.add(address.netloc)
        if request.method == "POST":
            self.posted.append((address.path, json.loads(request.post_data)))

    def set(self, **fields: object) -> None:
        """Fill in values by label, with "_" for a space."""
        for label, value in fields.items():
            self.page.get_by_label(label.replace("_", " ")).fill(str(value))

    def pick(self, name: str) -> None:
        self.page.get_by_role("radio", name=name).check()

    def send(self, text: str = QUESTION) -> None:
        self.page.get_by_label("Prompt").fill(text)
        self.page.get_by_role("button", name="Send").click()

    def wait(self, start: str = "Done") -> str:
        """Wait until the status line begins with `start`, and return it."""
        status = self.page.get_by_role("status")
        expect(status).to_have_text(re.compile(f"^{start}"), timeout=MILLISECONDS)
        return status.inner_text()

    @property
    def runs(self):
        return self.page.get_by_role("article")

    def tokens(self, run: int = -1):
        return self.runs.nth(run).locator(".tok")

    def text(self, run: int = -1) -> str:
        return self.runs.nth(run).locator(".text").text_content()

    def number(self, name: str, run: int = -1) -> str:
        """name: tokens, speed, tau or first."""
        return self.runs.nth(run).locator(f".{name} dd").inner_text()

    def expect_error(self, words: str) -> None:
        expect(self.page.get_by_role("alert")).to_contain_text(words)

    def shot(self, name: str, *, whole: bool = False) -> None:
        """whole: in a window as high as the page, whose head and foot stick to the window."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        size = self.page.viewport_size
        if whole:
            height = self.page.evaluate("document.documentElement.scrollHeight")
            self.page.set_viewport_size({"width": size["width"], "height": height})
        self.page.screenshot(path=SHOTS / f"{name}.png")
        self.page.set_viewport_size(size)


@pytest.fixture
def open_page(browser):
    """A function that opens a server's page. In the end, no page had errors or sent requests to
    another host."""
    pages: list[tuple[Page, Server]] = []

    def opened(server: Server, **options: object) -> Page:
        context = browser.new_context(viewport=WIDE, **options)
        pages.append((Page(context.new_page(), server.url), server))
        return pages[-1][0]

    yield opened
    for page, server in pages:
        page.page.context.close()
        assert page.problems == []
        assert page.hosts == {urlsplit(server.url).netloc}


def test_a_chat_shows_what_the_api_answers(served, open_page):
    page = open_page(served)
    page.set(**{"Temperature": 0.8, "Seed": 7, "Top-p": 0.9, "Max tokens": 48})
    page.send()
    status = page.wait()
    path, body = page.posted[0]
    assert path == "/v1/chat/completions"
    fields = {"temperature": 0.8, "seed": 7, "top_p": 0.9, "max_tokens": 48}
    assert fields.items() <= body.items()
    choice = served.post(path, body | {"stream": False}).json()["choices"][0]
    tokens = page.tokens()
    assert page.text() == choice["message"]["content"]
    assert tokens.all_text_contents() == [token["text"] for token in choice["pass"]["tokens"]]
    classes = " ".join(tokens.evaluate_all("all => all.map(token => token.className)"))
    assert set(classes.split()) - {"tok"} <= SOURCES
    assert int(page.number("tokens")) == tokens.count() == len(choice["pass"]["tokens"])
    assert float(page.number("speed")) > 0
    assert float(page.number("tau")) >= 1
    assert page.number("first").endswith(" ms")
    assert f"{tokens.count()} tokens" in status
    page.set(Temperature=0)
    page.send("And in C?")
    page.wait()
    roles = [message["role"] for message in page.posted[-1][1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert page.posted[-1][1]["messages"][1]["content"] == page.text(0)
    page.shot("chat")
    page.page.get_by_role("button", name="Clear").click()
    page.send("Hello")
    page.wait()
    assert len(page.posted[-1][1]["messages"]) == 1


def test_alternatives_of_a_completion_with_the_keyboard(served, open_page):
    page = open_page(served)
    page.page.get_by_label("Probabilities and alternatives").press("Space")
    page.page.get_by_role("radio", name="Chat").press("ArrowRight")
    page.set(Max_tokens=12)
    page.page.get_by_label("Prompt").fill("The quick brown")
    page.page.get_by_label("Prompt").press("Enter")
    page.wait()
    path, body = page.posted[0]
    assert (path, body["prompt"]) == ("/v1/completions", "The quick brown")
    (choice,) = served.post(path, body | {"stream": False}).json()["choices"]
    page.tokens().first.press("ArrowRight")
    focused, tip = page.tokens().nth(1), page.page.get_by_role("tooltip")
    expect(focused).to_be_focused()
    expect(focused).to_have_accessible_description(re.compile(r"pass \d+, token \d+ of \d+"))
    alternatives, token = (choice["logprobs"][name][1] for name in ("top_logprobs", "tokens"))
    expect(tip.locator("tr")).to_have_count(len(alternatives), timeout=MILLISECONDS)
    expect(tip.locator(".written")).to_have_count(1)
    expect(tip.locator(".written")).to_contain_text(json.dumps(token, ensure_ascii=False))
    page.page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    page.tokens().nth(3).hover()
    expect(tip).to_be_visible()
    page.shot("alternatives")


def test_the_stop_button_keeps_the_text_so_far(slow_server, open_page):
    page = open_page(slow_server)
    page.set(Max_tokens=600)
    page.send()
    expect(page.tokens().nth(2)).to_be_attached()
    page.page.get_by_role("button", name="Stop").click()
    status = page.wait("Stopped")
    count = page.tokens().count()
    assert 3 <= count < 600
    assert f"{count} tokens" in status

    page.set(Max_tokens=2)
    page.send("Again")
    page.wait()
    assert page.posted[-1][1]["messages"][1] == {"role": "assistant", "content": page.text(0)}


def test_a_comparison_shows_both_texts_and_speeds(served, open_page):
    page = open_page(served)
    page.set(Max_tokens=64)
    page.pick("compare")
    page.send()
    page.wait()
    assert page.text(0) == page.text(1) != ""
    assert page.tokens(0).all_text_contents() == page.tokens(1).all_text_contents()
    *warm_ups, (_, plain), (_, auto) = page.posted
    assert [(body["max_tokens"], body.get("plan")) for _, body in warm_ups] == [
        (16, "ar"),
        (16, None),
    ]
    assert plain.pop("cache_salt") != auto.pop("cache_salt")
    assert plain.pop("plan") == "ar"
    assert plain == auto
    count = page.tokens(0).count()
    expect(page.page.locator(".verdict")).to_have_text(
        re.compile(rf"^The same {count} tokens; auto is [\d.]+ times as fast as plain decoding\.$")
    )
    assert page.number("tau", 0) == "1.00"
    assert float(page.number("speed", 0)) > 0 < float(page.number("speed", 1))
    expect(page.page.locator(".differs")).to_have_count(0)
    page.shot("compare", whole=True)
    page.page.emulate_media(color_scheme="dark")
    page.shot("dark", whole=True)
    page.page.set_viewport_size(NARROW)
    page.page.emulate_media(color_scheme="light")
    page.page.get_by_text("Settings").click()
    page.page.evaluate("scrollTo(0, 0)")
    page.shot("narrow")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


def test_a_comparison_marks_texts_that_differ(served, open_page):
    page = open_page(served)

    def answer(route) -> None:
        if "plan" in route.request.post_data_json:
            route.continue_()
            return
        response = route.fetch()  # a request without a plan is for `auto`: change its token ids
        other = re.sub(r'"id":(\d+)', lambda token: f'"id":{int(token[1]) + 1}', response.text())
        route.fulfill(response=response, body=other)

    page.page.route("**/v1/completions", answer)
    page.set(Max_tokens=4)
    page.pick("compare")
    page.pick("Completion")
    page.send()
    assert "Not the same text: token 1 is the first that differs" in page.wait()
    expect(page.page.locator(".differs")).to_have_count(2 * page.tokens(0).count())


def test_a_json_schema_constrains_the_answer(served, open_page):
    page = open_page(served)
    schema = {"type": "object", "properties": {"prime": {"type": "boolean"}}, "required": ["prime"]}
    page.set(JSON_schema=json.dumps(schema | {"additionalProperties": False}))
    page.send("Is 7 a prime?")
    page.wait()
    assert set(json.loads(page.text())) == {"prime"}


def test_errors_are_shown(served, open_page):
    page = open_page(served)
    page.set(JSON_schema='{"type": ')
    page.send("Hello")
    page.expect_error("The JSON schema is not JSON")
    assert page.posted == []
    page.set(JSON_schema='{"type": "nonsense"}')
    page.send("Hello")
    page.expect_error("nonsense")
    expect(page.runs).to_have_count(0)
    expect(page.page.get_by_label("Prompt")).to_have_value("Hello")
    page.page.context.set_offline(True)
    page.send("Hello")
    page.expect_error("The server does not answer")
    page.page.context.set_offline(False)
    page.set(JSON_schema="", Max_tokens=3)
    page.send("Hello")
    page.wait()
    expect(page.page.get_by_role("alert")).to_have_count(0)
    assert len(page.problems) == 2  # Chromium's own lines about the 400 and the lost connection
    assert all("Failed to load resource" in problem for problem in page.problems)
    page.problems.clear()


def test_an_api_key_is_needed_and_not_stored(random_bundle, tmp_path, open_page):
    (tmp_path / "keys").write_text("ours\n")
    with Server(random_bundle, tmp_path / "log", "--api-key-file", tmp_path / "keys") as server:
        page = open_page(server)
        page.expect_error("needs a valid API key")
        page.problems.clear()  # Chromium's own line about the 401
        page.set(API_key="ours", Max_tokens=3)
        page.send("Hello")
        page.wait()
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie])"
        assert page.page.evaluate(kept) == '[{},{},""]'
        page.page.reload()
        page.expect_error("needs a valid API key")
        page.problems.clear()


def test_a_foreign_script_does_not_run(served, open_page):
    page = open_page(served)
    page.page.evaluate(
        "() => { const s = document.createElement('script'); s.append('window.ran = 1'); "
        "document.body.append(s); }"
    )
    assert page.page.evaluate("window.ran") is None
    assert any("TrustedScript" in problem for problem in page.problems)
    page.problems.clear()
