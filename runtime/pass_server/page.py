"""Serves `page.html` at `/`: a page to try the model, which shows the source of every token."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI, Response

PAGE = Path(__file__).with_name("page.html")


def add_page(app: FastAPI) -> None:
    """Answer `/` with the page. Its file is read now, and not for every request."""
    html = PAGE.read_bytes()
    headers = {
        "Content-Security-Policy": content_policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(html, headers=headers, media_type="text/html")


def content_policy(html: bytes) -> str:
    """Return the Content-Security-Policy: the page may use its own parts and this server alone."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(html, b'script')}'",
            f"style-src '{_hash(html, b'style')}'",
            "connect-src 'self'",
            "img-src data:",  # the icon
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    )


def _hash(html: bytes, tag: bytes) -> str:
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
