"""A server in the process of the tests, over a session that they open."""

from __future__ import annotations

from openai import OpenAI
from running import Api
from starlette.testclient import TestClient

from pass_server.app import make_app
from pass_server.request import ParsedRequest, RequestParser, constraint_errors
from pass_server.serve_options import ServeOptions


class App(Api):
    """options: of ServeOptions."""

    def __init__(self, session, **options) -> None:
        self.session, self.model = session, options.setdefault("model_name", "m")
        self.app = make_app(session, ServeOptions(**options))
        self.service = self.app.state.service
        self.http = TestClient(self.app, follow_redirects=False)

    def post(self, path, content=None, **options):
        return self.http.post(path, json=content, **options)

    def post_body(self, path, body):
        return self.http.post(path, content=body, headers={"Content-Type": "application/json"})

    def metrics(self) -> str:
        return self.http.get("/metrics").text

    def client(self) -> OpenAI:
        return OpenAI(
            base_url="http://testserver/v1", api_key="none", http_client=self.http, max_retries=0
        )


def parse(session, serve_options, request) -> ParsedRequest:
    """Tokenize a request, wait until its constraints are compiled, and return it parsed."""
    parser = RequestParser(session, serve_options)
    tokenized = parser.tokenize(request, arrived=0.0)
    for future, param in tokenized.compiling:
        with constraint_errors(param):
            future.result()
    return parser.finish(tokenized)
