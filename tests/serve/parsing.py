from __future__ import annotations

from pass_server.request import ParsedRequest, RequestParser, constraint_errors


def parse(session, serve_options, request) -> ParsedRequest:
    """Tokenize a request, wait until its constraints are compiled, and return it parsed."""
    parser = RequestParser(session, serve_options)
    tokenized = parser.tokenize(request, arrived=0.0)
    for future, param in tokenized.compiling:
        with constraint_errors(param):
            future.result()
    return parser.finish(tokenized)
