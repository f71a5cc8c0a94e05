"""Parses a raw request target and Host into bucket, key and query. `routing` determines the operation.

Nothing is normalised: dot segments and double slashes are kept, and every part is percent-decoded exactly once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes

from .errors import S3Error

# S3 user guide, "Naming Amazon S3 objects": at most 1024 bytes of UTF-8.
KEY_LIMIT_BYTES = 1024
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")


@dataclass(frozen=True)
class Target:
    """What a target addresses; the service if bucket is None, the bucket if key is None."""

    bucket: str | None
    key: str | None
    query: tuple[tuple[str, str], ...]


def decode(raw: str) -> str:
    """Percent-decodes text once; + is a space, as in S3's paths, queries and copy sources."""
    try:
        return unquote_to_bytes(raw.replace("+", "%20")).decode("utf-8")
    except UnicodeDecodeError:
        raise S3Error("InvalidURI", "The percent-decoded text is not UTF-8.") from None


def encode(text: str, *, keep_slash: bool = False) -> str:
    """Percent-encodes text as SigV4 requires: all but A-Z a-z 0-9 - . _ ~, and / as a path separator."""
    return quote(text.encode("utf-8"), safe="/" if keep_slash else "")


def is_bucket_name(name: str) -> bool:
    return _BUCKET_NAME.fullmatch(name) is not None and ".." not in name


def check_key(key: str) -> str:
    """Returns the key; raises KeyTooLongError over 1024 bytes."""
    size_bytes = len(key.encode("utf-8"))
    if size_bytes > KEY_LIMIT_BYTES:
        raise S3Error("KeyTooLongError", details={"Size": str(size_bytes), "MaxSizeAllowed": str(KEY_LIMIT_BYTES)})
    return key


def split_query(target: str) -> tuple[tuple[str, str], ...]:
    """Returns the decoded (name, value) pairs in the order sent; a name without = has an empty value."""
    _, _, query = target.partition("?")
    pairs = (segment.partition("=") for segment in query.split("&") if segment)
    return tuple((decode(name), decode(value)) for name, _, value in pairs)


def _bucket_of_host(host: str, base_domain: str) -> str | None:
    name = re.sub(r":[0-9]*$", "", host).lower()
    return name.removesuffix("." + base_domain) if name.endswith("." + base_domain) else None


def parse_target(target: str, host: str, base_domain: str) -> Target:
    """Finds bucket and key: virtual-host style where Host is `<bucket>.<base_domain>`, path style otherwise."""
    path = target.partition("?")[0][1:]
    bucket = _bucket_of_host(host, base_domain)
    if bucket is not None:
        key = decode(path)
    else:
        bucket_raw, _, key_raw = path.partition("/")
        if not path:
            return Target(None, None, split_query(target))
        bucket, key = decode(bucket_raw), decode(key_raw)
    if not is_bucket_name(bucket):
        raise S3Error("InvalidBucketName", details={"BucketName": bucket})
    return Target(bucket, check_key(key) if key else None, split_query(target))


def parse_copy_source(raw: str) -> tuple[str, str]:
    """Returns bucket and key of an x-amz-copy-source, which is `[/]bucket/key`, percent-encoded."""
    path, _, version = raw.partition("?")
    if version:
        raise S3Error("NotImplemented", "Versions are not implemented.")
    bucket, separator, key = path.removeprefix("/").partition("/")
    if not separator or not key:
        raise S3Error("InvalidArgument", "Copy Source must mention the source bucket and key: sourcebucket/sourcekey")
    return decode(bucket), check_key(decode(key))
