"""Names of buckets and objects, and the percent-encoding of paths and queries.

Source: GCS documentation, "About Cloud Storage objects", "Object names", and "About buckets".
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from .errors import GcsError

NAME_LIMIT_BYTES = 1024
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._\-]{1,61}[a-z0-9]")


def decode(raw: str, *, plus_is_space: bool = False) -> str:
    """Percent-decodes text once; + is a space in queries, and itself in paths."""
    try:
        return unquote_to_bytes(raw.replace("+", "%20") if plus_is_space else raw).decode("utf-8")
    except UnicodeDecodeError:
        raise GcsError("invalid", "The percent-decoded text is not UTF-8.") from None


def is_bucket_name(name: str) -> bool:
    return _BUCKET_NAME.fullmatch(name) is not None and ".." not in name and not name.startswith("goog")


def check_object_name(name: str) -> str:
    """Returns the name of an object; raises GcsError if no object may have it."""
    if not name:
        raise GcsError("required", "Required")
    if (
        len(name.encode("utf-8")) > NAME_LIMIT_BYTES
        or "\r" in name
        or "\n" in name
        or name in (".", "..")
        or name.startswith(".well-known/acme-challenge/")
    ):
        raise GcsError("invalid", f"Invalid object name: {name[:80]!r}")
    return name
