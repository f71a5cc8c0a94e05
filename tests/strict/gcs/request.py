"""The input of an operation: an authorised request. `..response` has its output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..state import State
from ..wire import Headers
from .errors import GcsError
from .names import check_object_name
from .routing import Target
from .store import Bucket, Project

_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Request:
    """A request with a verified head and a complete body.

    persist_bytes: a fault; the maximum number of bytes of a chunk that are persisted.
    """

    state: State
    target: Target
    headers: Headers
    body: bytes = b""
    persist_bytes: int | None = None

    @property
    def operation(self) -> str:
        return self.target.operation

    @property
    def query(self) -> Mapping[str, str]:
        return self.target.query

    @property
    def project(self) -> Project:
        return self.state.gcs

    @property
    def now_s(self) -> float:
        return self.state.clock.now_s()

    @property
    def bucket(self) -> Bucket:
        return self.bucket_named(self.target.names["bucket"])

    @property
    def name(self) -> str:
        """The object of the path."""
        return check_object_name(self.target.names["object"])

    def bucket_named(self, name: str) -> Bucket:
        bucket = self.project.buckets.get(name)
        if bucket is None:
            raise GcsError("notFound", "The specified bucket does not exist.")
        return bucket

    def number(self, name: str) -> int | None:
        """Returns a query parameter that is a number of at most 63 bits, or None if it is absent."""
        return number_of(name, self.query.get(name))

    def flag(self, name: str) -> bool:
        text = self.query.get(name, "false")
        if text.lower() not in ("true", "false"):
            raise GcsError("invalid", f"Invalid value for: {name}={text!r} is not a boolean", parameter=name)
        return text.lower() == "true"

    def json(self) -> dict[str, Any]:
        """Returns the JSON object of the body; {} if there is no body."""
        if not self.body:
            return {}
        kind = (self.headers.get("content-type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise GcsError("invalid", f"Unsupported content with type: {kind!r}, not application/json")
        return json_object(self.body)


def number_of(name: str, text: str | None) -> int | None:
    """Returns the number of a parameter; raises GcsError if it is none."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) > _LARGEST:
        raise GcsError("invalid", f"Invalid unsigned integer value: {text!r}.", parameter=name)
    return int(text)


def json_object(content: bytes) -> dict[str, Any]:
    """Parses a JSON object; raises parseError if the content is none."""
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise GcsError("parseError", f"Parse Error: {error}") from None
    if not isinstance(parsed, dict):
        raise GcsError("parseError", "Parse Error: the body is not a JSON object.")
    return parsed
