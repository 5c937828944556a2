"""Parses a request as the server does, in one call."""

from __future__ import annotations

from pass_server.parsed_request import ParsedRequest, constraint_errors, tokenize_request


def parse(session, limits, request, arrived=None) -> ParsedRequest:
    found = tokenize_request(session, limits, request, arrived)
    for future, param in found.compiling:
        with constraint_errors(param):
            future.result()
    return found.finish()
