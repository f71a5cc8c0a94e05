"""The input of an S3 operation: a verified request. `response` has its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import S3Error
from .response import Response
from .signature import Identity
from .state import State
from .store import Bucket
from .target import Target
from .wire import Headers


@dataclass(frozen=True)
class Request:
    """A request with a verified head and a complete body without framing."""

    state: State
    operation: str
    target: Target
    query: Mapping[str, str]
    headers: Headers
    identity: Identity | None
    body: bytes = b""
    trailers: Mapping[str, str] = field(default_factory=dict)

    @property
    def bucket_name(self) -> str:
        if self.target.bucket is None:
            raise S3Error("InvalidBucketName")
        return self.target.bucket

    @property
    def bucket(self) -> Bucket:
        bucket = self.state.buckets.get(self.bucket_name)
        if bucket is None:
            raise S3Error("NoSuchBucket", details={"BucketName": self.bucket_name})
        return bucket

    @property
    def key(self) -> str:
        if self.target.key is None:
            raise S3Error("InvalidURI")
        return self.target.key

    def count_parameter(self, name: str, default: int, most: int) -> int:
        """Returns a numeric query parameter, capped at `most`; raises InvalidArgument if it is not a number."""
        text = self.query.get(name)
        if text is None:
            return min(default, most)
        if not (text.isascii() and text.isdecimal()) or int(text) > 2**31 - 1:
            details = {"ArgumentName": name, "ArgumentValue": text}
            raise S3Error(
                "InvalidArgument", f"Argument {name} must be an integer between 0 and 2147483647", details=details
            )
        return min(int(text), most)

    def encoding_type(self) -> str | None:
        encoding_type = self.query.get("encoding-type")
        if encoding_type not in (None, "url"):
            raise S3Error("InvalidArgument", "Invalid Encoding Method specified in Request")
        return encoding_type


def xml_response(body: bytes, headers: list[tuple[str, str]] | None = None) -> Response:
    return Response(200, [("Content-Type", "application/xml"), *(headers or [])], body)
