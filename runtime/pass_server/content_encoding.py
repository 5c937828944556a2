"""Expands request bodies that are compressed with gzip or zstd, up to a limit."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable

import zstandard

from pass_server.api_error import ApiError

MAX_ZSTD_WINDOW = 1 << 23
"""The bytes of the largest zstd window that a client may use over HTTP (RFC 9659)."""


def expand(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the expanded body. encoding: its Content-Encoding. Raises ApiError if the encoding is
    not supported, if the body is not in it or is cut off, or if the body expands to more than
    `max_bytes`; no more than that is expanded."""
    name = encoding.strip().lower()
    if name in ("", "identity") or not body:
        return body
    if name not in DECODERS:
        raise ApiError(
            f"Content-Encoding {encoding!r} is not supported by this server: send gzip, zstd "
            "or no encoding",
            415,
            code="unsupported_encoding",
            headers={"Accept-Encoding": "gzip, zstd"},
        )
    try:
        content = DECODERS[name](body, max_bytes + 1)
    except (zlib.error, zstandard.ZstdError, EOFError):
        problem = f"the body is not {name}, or is cut off, but its Content-Encoding is {name}"
        raise ApiError(problem, code="invalid_encoding") from None
    if len(content) > max_bytes:
        raise too_large(max_bytes)
    return content


def too_large(max_bytes: int) -> ApiError:
    """Return the error for a body of more than `max_bytes` bytes."""
    problem = f"the body has more than {max_bytes} bytes, the limit of this server; send less"
    return ApiError(problem, 413, code="body_too_large", headers={"Connection": "close"})


def _gzip(body: bytes, max_bytes: int) -> bytes:
    """Expand up to `max_bytes` bytes. A body may consist of several gzip members."""
    parts: list[bytes] = []
    while body and max_bytes:
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # 16: with gzip's header
        parts.append(member.decompress(body, max_bytes))
        max_bytes -= len(parts[-1])
        if max_bytes and not member.eof:
            raise EOFError
        body = member.unused_data
    return b"".join(parts)


def _zstd(body: bytes, max_bytes: int) -> bytes:
    """Expand up to `max_bytes` bytes. A body may consist of several zstd frames."""
    decoder = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
    with decoder.stream_reader(io.BytesIO(body), read_across_frames=True) as frames:
        return frames.read(max_bytes)


DECODERS: dict[str, Callable[[bytes, int], bytes]] = {"gzip": _gzip, "x-gzip": _gzip, "zstd": _zstd}
