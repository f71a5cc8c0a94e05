"""The checksums that S3 verifies and stores: Content-MD5 and x-amz-checksum-*. `store` holds them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from awscrt import checksums as crt

from .errors import S3Error
from .wire import Headers


def _crc(function: Callable[[bytes], int], size_bytes: int) -> Callable[[bytes], bytes]:
    return lambda body: function(body).to_bytes(size_bytes, "big")


ALGORITHMS: Mapping[str, Callable[[bytes], bytes]] = {
    "crc32": _crc(zlib.crc32, 4),
    "crc32c": _crc(crt.crc32c, 4),
    "crc64nvme": _crc(crt.crc64nvme, 8),
    "sha1": lambda body: hashlib.sha1(body, usedforsecurity=False).digest(),
    "sha256": lambda body: hashlib.sha256(body).digest(),
}
# S3's default checksum (user guide, "Checking object integrity").
DEFAULT_ALGORITHM = "crc64nvme"
# Same source: the types that each algorithm of a multipart upload supports, the default first.
MULTIPART_TYPES: Mapping[str, Sequence[str]] = {
    "crc32": ("COMPOSITE", "FULL_OBJECT"),
    "crc32c": ("COMPOSITE", "FULL_OBJECT"),
    "crc64nvme": ("FULL_OBJECT",),
    "sha1": ("COMPOSITE",),
    "sha256": ("COMPOSITE",),
}
_HEADER_PREFIX = "x-amz-checksum-"
_NO_ALGORITHM = {"x-amz-checksum-mode", "x-amz-checksum-algorithm", "x-amz-checksum-type"}


@dataclass(frozen=True)
class Checksum:
    """A checksum as S3 shows it: base64 of the big-endian digest, with "-N" if it is composed from N parts."""

    algorithm: str
    value: str
    type: str = "FULL_OBJECT"

    @property
    def header(self) -> str:
        return _HEADER_PREFIX + self.algorithm

    @property
    def element(self) -> str:
        return "Checksum" + self.algorithm.upper()


def md5_hex(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def compute(algorithm: str, body: bytes) -> Checksum:
    return Checksum(algorithm, base64.b64encode(ALGORITHMS[algorithm](body)).decode())


def compose(algorithm: str, parts: Sequence[Checksum]) -> Checksum:
    """Returns the checksum of the parts' checksums, as for a COMPOSITE upload."""
    digests = b"".join(base64.b64decode(part.value) for part in parts)
    return Checksum(algorithm, f"{compute(algorithm, digests).value}-{len(parts)}", "COMPOSITE")


def algorithm_of(name: str) -> str:
    """Returns our name of an algorithm in a header; raises InvalidRequest if it is unknown."""
    if name.lower() not in ALGORITHMS:
        raise S3Error("InvalidRequest", f"Checksum algorithm {name!r} is not one of {', '.join(ALGORITHMS)}.")
    return name.lower()


def _is_base64_of(value: str, size_bytes: int) -> bool:
    try:
        return len(base64.b64decode(value, validate=True)) == size_bytes
    except (binascii.Error, ValueError):
        return False


def claimed(headers: Headers, trailers: Mapping[str, str]) -> Checksum | None:
    """Returns the checksum that a request declares for its body, in a header or a trailer."""
    found = [(name, value) for name, value in [*headers, *trailers.items()] if name.startswith(_HEADER_PREFIX)]
    values = {name.removeprefix(_HEADER_PREFIX): value for name, value in found if name not in _NO_ALGORITHM}
    if len(values) > 1:
        raise S3Error("InvalidRequest", "Expecting a single x-amz-checksum- header.")
    wanted = headers.get("x-amz-sdk-checksum-algorithm")
    if wanted is not None and {algorithm_of(wanted)} != set(values):
        raise S3Error("InvalidRequest", "x-amz-sdk-checksum-algorithm has no corresponding x-amz-checksum-* header.")
    if not values:
        return None
    name, value = values.popitem()
    algorithm = algorithm_of(name)
    if not _is_base64_of(value.partition("-")[0], len(ALGORITHMS[algorithm](b""))):
        raise S3Error("InvalidRequest", f"Value for {_HEADER_PREFIX}{algorithm} header is invalid.")
    return Checksum(algorithm, value)


def check_content_md5(headers: Headers, body: bytes) -> bool:
    """Returns whether a Content-MD5 was sent; raises BadDigest if it is wrong."""
    sent = headers.get("content-md5")
    if sent is None:
        return False
    if not _is_base64_of(sent, 16):
        raise S3Error("InvalidDigest")
    if base64.b64decode(sent) != hashlib.md5(body, usedforsecurity=False).digest():
        raise S3Error("BadDigest", details={"ExpectedDigest": sent})
    return True


def check_body(headers: Headers, trailers: Mapping[str, str], body: bytes) -> Checksum | None:
    """Verifies Content-MD5 and the declared checksum; returns the latter, or None."""
    check_content_md5(headers, body)
    checksum = claimed(headers, trailers)
    if checksum is not None and compute(checksum.algorithm, body) != checksum:
        message = f"The {checksum.algorithm.upper()} you specified did not match the calculated checksum."
        raise S3Error("BadDigest", message)
    return checksum
