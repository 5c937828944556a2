"""Expands compressed bodies of requests, gzip and zstd, up to a limit."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable

import zstandard

from pass_server.api_error import ApiError

MAX_ZSTD_WINDOW = 1 << 23
"""The largest window, in bytes, that decoders of zstd over HTTP must support (RFC 9659)."""


def expanded(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """The expanded body; never more than `max_bytes` are in memory. encoding: its Content-Encoding.
    Raises ApiError if it is longer, is not in this encoding, or the encoding is not supported."""
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
    problem = f"the body has more than {max_bytes} bytes, the limit of this server; send less"
    return ApiError(problem, 413, code="body_too_large", headers={"Connection": "close"})


def _gzip(body: bytes, max_bytes: int) -> bytes:
    """Up to `max_bytes` bytes of all members."""
    parts: list[bytes] = []
    while body and max_bytes:
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        parts.append(member.decompress(body, max_bytes))
        max_bytes -= len(parts[-1])
        if max_bytes and not member.eof:
            raise EOFError
        body = member.unused_data
    return b"".join(parts)


def _zstd(body: bytes, max_bytes: int) -> bytes:
    """Up to `max_bytes` bytes of all frames."""
    decoder = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
    with decoder.stream_reader(io.BytesIO(body), read_across_frames=True) as frames:
        return frames.read(max_bytes)


DECODERS: dict[str, Callable[[bytes, int], bytes]] = {"gzip": _gzip, "x-gzip": _gzip, "zstd": _zstd}
