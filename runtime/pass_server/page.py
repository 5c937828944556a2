"""`/`: a static page that shows where tokens come from. It loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI, Response

PAGE = Path(__file__).with_name("page.html")


def add_page(app: FastAPI) -> None:
    """Answer `/` with the page. Its file is read once, now."""
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
    """The Content-Security-Policy: only the page's script and style, and this server."""
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
    """The hash of the content of the only element `tag`, in the form that the policy takes."""
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
