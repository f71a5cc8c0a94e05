"""Checks a body against x-amz-content-sha256 and removes aws-chunked framing. `checksums` verifies checksums.

Source: S3 API reference, "Signature Calculations for the Authorization Header: Transferring Payload in Multiple
Chunks" and "... Including Trailing Headers".
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import S3Error
from .signature import ALGORITHM, Identity, sign
from .wire import Headers

# Same source: every chunk but the last must hold at least 8 KB.
MIN_CHUNK_BYTES = 8192
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_CHUNK_HEAD = re.compile(rb"([0-9a-fA-F]{1,16})(?:;chunk-signature=([0-9a-f]{64}))?")
# mode: (chunks are signed, a trailer follows)
_STREAMING = {
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD": (True, False),
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER": (True, True),
    "STREAMING-UNSIGNED-PAYLOAD-TRAILER": (False, True),
}


@dataclass(frozen=True)
class Payload:
    """A request's content without framing, and its trailers."""

    body: bytes
    trailers: Mapping[str, str] = field(default_factory=dict)


def _check_sha256(body: bytes, expected: str) -> None:
    computed = hashlib.sha256(body).hexdigest()
    if computed != expected:
        details = {"ClientComputedContentSHA256": expected, "S3ComputedContentSHA256": computed}
        raise S3Error("XAmzContentSHA256Mismatch", details=details)


def open_payload(headers: Headers, identity: Identity | None, body: bytes) -> Payload:
    """Returns the content of a complete body; raises S3Error if it contradicts the headers."""
    promised = headers.get("x-amz-content-sha256")
    if promised is None or promised == "UNSIGNED-PAYLOAD":
        return Payload(body)
    if promised in _STREAMING:
        return _open_chunks(headers, identity, body, *_STREAMING[promised])
    if not re.fullmatch(r"[0-9a-f]{64}", promised):
        raise S3Error("InvalidArgument", "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, STREAMING-... or a SHA-256.")
    _check_sha256(body, promised)
    return Payload(body)


def _open_chunks(headers: Headers, identity: Identity | None, body: bytes, signed: bool, trailed: bool) -> Payload:
    decoded_length = headers.get("x-amz-decoded-content-length")
    if decoded_length is None or not decoded_length.isdecimal():
        raise S3Error("InvalidArgument", "x-amz-decoded-content-length is missing or no number.")
    announced = [name.strip().lower() for name in (headers.get("x-amz-trailer") or "").split(",") if name.strip()]
    if bool(announced) != trailed:
        raise S3Error("InvalidRequest", "x-amz-trailer and x-amz-content-sha256 disagree about a trailer.")
    chain = _SignatureChain(identity) if signed else None
    chunks = _Chunks(body, chain)
    content = chunks.read_content()
    trailers = chunks.read_trailers(announced)
    if len(content) != int(decoded_length):
        raise S3Error("IncompleteBody", f"{len(content)} bytes in chunks, {decoded_length} announced.")
    return Payload(content, trailers)


class _SignatureChain:
    """Each chunk's signature covers the previous one, beginning with the head's."""

    def __init__(self, identity: Identity | None) -> None:
        if identity is None:
            raise S3Error("AccessDenied", "Signed chunks need a signed head.")
        self._identity = identity
        self._previous = identity.signature

    def check(self, kind: str, content_hashes: str, signature: str) -> None:
        identity = self._identity
        text = f"{ALGORITHM}-{kind}\n{identity.timestamp}\n{identity.scope}\n{self._previous}\n{content_hashes}"
        if not hmac.compare_digest(sign(identity.signing_key, text), signature):
            details = {"StringToSign": text, "SignatureProvided": signature}
            raise S3Error(
                "SignatureDoesNotMatch", f"The signature of a {kind.lower()} chunk is wrong.", details=details
            )
        self._previous = signature


class _Chunks:
    """Reads an aws-chunked body from its first chunk to its last trailer."""

    def __init__(self, body: bytes, chain: _SignatureChain | None) -> None:
        self._body = body
        self._position = 0
        self._chain = chain

    def _line(self, code: str) -> bytes:
        end = self._body.find(b"\r\n", self._position)
        if end < 0:
            raise S3Error(code, "A line of the aws-chunked body has no CRLF.")
        line, self._position = self._body[self._position : end], end + 2
        return line

    def read_content(self) -> bytes:
        content = bytearray()
        previous_bytes = MIN_CHUNK_BYTES
        while True:
            found = _CHUNK_HEAD.fullmatch(self._line("IncompleteBody"))
            if found is None or (found[2] is None) != (self._chain is None):
                raise S3Error("IncompleteBody", "The head of a chunk is malformed.")
            size_bytes = int(found[1], 16)
            if size_bytes and previous_bytes < MIN_CHUNK_BYTES:
                raise S3Error("InvalidChunkSizeError")
            chunk = self._body[self._position : self._position + size_bytes]
            if self._chain is not None:
                hashes = f"{_EMPTY_SHA256}\n{hashlib.sha256(chunk).hexdigest()}"
                self._chain.check("PAYLOAD", hashes, found[2].decode())
            if size_bytes == 0:
                return bytes(content)
            self._position += size_bytes
            if self._line("IncompleteBody"):
                raise S3Error("IncompleteBody", "A chunk is longer than its head says.")
            content += chunk
            previous_bytes = size_bytes

    def read_trailers(self, announced: list[str]) -> dict[str, str]:
        """Reads the trailing headers, which must be exactly those that x-amz-trailer announces."""
        trailers: dict[str, str] = {}
        signature: str | None = None
        while line := self._line("MalformedTrailerError"):
            name, separator, value = line.decode("latin-1").partition(":")
            if not separator or name.lower() in trailers or signature is not None:
                raise S3Error("MalformedTrailerError")
            if name.lower() == "x-amz-trailer-signature" and self._chain is not None:
                signature = value.strip()
            else:
                trailers[name.lower()] = value.strip()
        if self._position != len(self._body) or sorted(trailers) != sorted(announced):
            raise S3Error("MalformedTrailerError", f"Trailers {sorted(trailers)}, announced {sorted(announced)}.")
        if self._chain is not None and announced:
            text = "".join(f"{name}:{trailers[name]}\n" for name in sorted(trailers))
            self._chain.check("TRAILER", hashlib.sha256(text.encode("latin-1")).hexdigest(), signature or "")
        return trailers
