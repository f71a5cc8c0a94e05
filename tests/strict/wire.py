"""Reads HTTP/1.1 requests from a stream, strictly. Other modules handle targets, signatures and responses.

Everything that a lenient server would repair is refused with 400 and a closed connection: a bare LF, a folded header,
a second Host, a Content-Length that is not digits, a character that a target may not contain.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .errors import S3Error

# S3 allows 8 KB of request headers (user guide, "Working with object metadata"); the request line must hold more than
# a
# percent-encoded key of 1024 bytes, since a listing carries a prefix, a start and a token.
HEADERS_LIMIT_BYTES = 8 * 1024
LINE_LIMIT_BYTES = 16 * 1024
# The largest object of one PUT (user guide, "Uploading objects").
BODY_LIMIT_BYTES = 5 * 1024**3
READ_BYTES = 1024 * 1024

_REQUEST_LINE = re.compile(rb"([A-Z]+) ([^ ]+) (HTTP/[0-9]\.[0-9])")
_TARGET = re.compile(rb"/(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?]|%[0-9A-Fa-f]{2})*")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*(.*?)[ \t]*", re.DOTALL)
_FORBIDDEN_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class Headers:
    """A request's headers: names in lower case, values as Latin-1 text, so that every byte is preserved."""

    def __init__(self, items: list[tuple[str, str]]) -> None:
        self.items = items

    def get(self, name: str) -> str | None:
        """Returns the value, or those of a repeated header joined by commas, or None."""
        values = [value for known, value in self.items if known == name]
        return ",".join(values) if values else None

    def without(self, dropped: str) -> Headers:
        return Headers([(name, value) for name, value in self.items if name != dropped])

    def count(self, name: str) -> int:
        return sum(known == name for known, _ in self.items)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.items)


@dataclass(frozen=True)
class RequestHead:
    """The head of a request; the target is exactly as sent."""

    method: str
    target: str
    headers: Headers

    @staticmethod
    def empty() -> RequestHead:
        """Returns what is known of a head that cannot be read."""
        return RequestHead("", "", Headers([]))

    @property
    def content_length(self) -> int:
        return int(self.headers.get("content-length") or 0)

    @property
    def has_framing(self) -> bool:
        """Whether the head determines the end of the body, which S3 requires of every upload."""
        return self.headers.get("content-length") is not None or is_chunked(self.headers)

    @property
    def expects_continue(self) -> bool:
        return (self.headers.get("expect") or "").lower() == "100-continue"

    @property
    def wants_close(self) -> bool:
        return "close" in [word.strip().lower() for word in (self.headers.get("connection") or "").split(",")]


def is_chunked(headers: Headers) -> bool:
    """Returns whether the body's framing is Transfer-Encoding: chunked."""
    return headers.get("transfer-encoding") == "chunked"


def _malformed(why: str) -> S3Error:
    return S3Error("BadRequest", f"malformed request head: {why}", closes=True)


async def _read_line(reader: asyncio.StreamReader) -> bytes | None:
    """Returns a line without its CRLF, or None if the stream ended before its first byte."""
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise _malformed("the stream ended inside it") from None
        return None
    except asyncio.LimitOverrunError:
        raise _malformed("a line has no end") from None
    if not line.endswith(b"\r\n"):
        raise _malformed("a line ends with LF and no CR")
    if len(line) > LINE_LIMIT_BYTES:
        raise _malformed("a line is too long")
    return line[:-2]


def _parse_header(line: bytes) -> tuple[str, str]:
    if line[:1] in (b" ", b"\t"):
        raise _malformed("a header is folded over two lines")
    found = _HEADER.fullmatch(line)
    if found is None:
        raise _malformed(f"no header: {line[:80]!r}")
    if _FORBIDDEN_IN_VALUE.search(found[2]):
        raise _malformed(f"a control character in the value of {found[1].decode('ascii')}")
    return found[1].decode("ascii").lower(), found[2].decode("latin-1")


def _check_framing(headers: Headers, accepts_chunks: Callable[[Headers], bool]) -> None:
    if headers.count("host") != 1:
        raise _malformed("exactly one Host is needed")
    length = headers.get("content-length")
    if headers.get("transfer-encoding") is not None:
        if length is not None:
            raise _malformed("both Content-Length and Transfer-Encoding")
        if not is_chunked(headers) or not accepts_chunks(headers):
            raise S3Error("NotImplemented", "Transfer-Encoding of this request is not implemented.", closes=True)
    if length is None:
        return
    if not re.fullmatch(r"[0-9]{1,18}", length):
        raise _malformed(f"Content-Length is {length!r}")
    if int(length) > BODY_LIMIT_BYTES:
        raise S3Error("EntityTooLarge", closes=True)


async def read_head(
    reader: asyncio.StreamReader, *, accepts_chunks: Callable[[Headers], bool] = lambda _: False
) -> RequestHead | None:
    """Reads one request's head.

    accepts_chunks: whether a request with these headers may have Transfer-Encoding: chunked.
    Returns: the head; None where the client closed the connection between two requests.
    Errors: S3Error with `closes` set where the head is malformed, since nothing after it can be trusted.
    """
    line = await _read_line(reader)
    if line is None:
        return None
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise _malformed(f"no request line: {line[:80]!r}")
    method, target, version = found.groups()
    if version != b"HTTP/1.1":
        raise S3Error("HTTPVersionNotSupported", closes=True)
    if not _TARGET.fullmatch(target):
        raise S3Error("InvalidURI", "The request target holds a character that must be encoded.", closes=True)
    items: list[tuple[str, str]] = []
    size_bytes = 0
    while True:
        line = await _read_line(reader)
        if line is None:
            raise _malformed("the stream ended inside it")
        if not line:
            break
        size_bytes += len(line) + 2
        if size_bytes > HEADERS_LIMIT_BYTES:
            raise S3Error("RequestHeaderSectionTooLarge", closes=True)
        items.append(_parse_header(line))
    headers = Headers(items)
    _check_framing(headers, accepts_chunks)
    return RequestHead(method.decode("ascii"), target.decode("ascii"), headers)


async def read_body(reader: asyncio.StreamReader, head: RequestHead) -> bytes:
    """Reads the body that belongs to a head.

    Errors: IncompleteReadError where the client closes before its end; S3Error where its chunks are malformed.
    """
    if not is_chunked(head.headers):
        return bytes(await _read_exactly(reader, head.content_length))
    body = bytearray()
    while True:
        line = await _read_line(reader)
        if line is None or not re.fullmatch(rb"[0-9A-Fa-f]{1,12}", line):
            raise S3Error("BadRequest", "The head of an HTTP chunk is malformed.", closes=True)
        chunk = await _read_exactly(reader, int(line, 16))
        if await _read_line(reader) != b"":
            raise S3Error("BadRequest", "An HTTP chunk is longer than its head says.", closes=True)
        if not chunk:
            return bytes(body)
        body += chunk
        if len(body) > BODY_LIMIT_BYTES:
            raise S3Error("EntityTooLarge", closes=True)


async def _read_exactly(reader: asyncio.StreamReader, length_bytes: int) -> bytearray:
    body = bytearray()
    while len(body) < length_bytes:
        block = await reader.read(min(READ_BYTES, length_bytes - len(body)))
        if not block:
            raise asyncio.IncompleteReadError(bytes(body), length_bytes)
        body += block
    return body
