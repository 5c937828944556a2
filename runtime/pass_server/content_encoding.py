"""Compressed bodies of requests: gzip and zstd, within a limit on what comes out of them."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable

import zstandard

from pass_server.api_error import ApiError

MAX_ZSTD_WINDOW = 1 << 23
"""What a decoder of zstd over HTTP has to support, in bytes (RFC 9659)."""


def expanded(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """The body behind the Content-Encoding `encoding`, at most `max_bytes`: no more than that is
    ever held. Raises ApiError if it is longer, is not in this encoding, or the encoding is another
    one."""
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
        found = DECODERS[name](body, max_bytes + 1)
    except (zlib.error, zstandard.ZstdError, EOFError):
        problem = f"the body is not {name}, or is cut off, but its Content-Encoding is {name}"
        raise ApiError(problem, code="invalid_encoding") from None
    if len(found) > max_bytes:
        raise too_large(max_bytes)
    return found


def too_large(max_bytes: int) -> ApiError:
    problem = f"the body has more than {max_bytes} bytes, the limit of this server; send less"
    return ApiError(problem, 413, code="body_too_large", headers={"Connection": "close"})


def _gzip(body: bytes, most: int) -> bytes:
    """Up to `most` bytes of all members."""
    parts: list[bytes] = []
    while body and most:
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        parts.append(member.decompress(body, most))
        most -= len(parts[-1])
        if most and not member.eof:
            raise EOFError
        body = member.unused_data
    return b"".join(parts)


def _zstd(body: bytes, most: int) -> bytes:
    """Up to `most` bytes of all frames."""
    decoder = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
    with decoder.stream_reader(io.BytesIO(body), read_across_frames=True) as frames:
        return frames.read(most)


DECODERS: dict[str, Callable[[bytes, int], bytes]] = {"gzip": _gzip, "x-gzip": _gzip, "zstd": _zstd}
