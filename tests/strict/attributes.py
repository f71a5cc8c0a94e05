"""The attributes of an object besides its content: content headers, metadata, storage class, tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from .errors import S3Error
from .wire import Headers

CONTENT_HEADERS = (
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-type",
    "expires",
)
STORAGE_CLASSES = (
    "STANDARD",
    "REDUCED_REDUNDANCY",
    "STANDARD_IA",
    "ONEZONE_IA",
    "INTELLIGENT_TIERING",
    "GLACIER",
    "DEEP_ARCHIVE",
    "GLACIER_IR",
    "EXPRESS_ONEZONE",
)
# Objects of these classes must be restored before a read; this server restores none.
ARCHIVED_CLASSES = ("GLACIER", "DEEP_ARCHIVE")
# S3 user guide, "Working with object metadata".
METADATA_LIMIT_BYTES = 2 * 1024
# S3 user guide, "Categorizing your storage using tags".
TAGS_LIMIT = 10
METADATA_PREFIX = "x-amz-meta-"


@dataclass(frozen=True)
class Attributes:
    """The stored attributes; header names are in lower case, metadata names without their prefix."""

    content: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    storage_class: str = "STANDARD"
    tags: tuple[tuple[str, str], ...] = ()

    def response_headers(self) -> list[tuple[str, str]]:
        """Returns the headers of a read's response; S3 omits the class STANDARD there."""
        headers = [(name, value) for name, value in self.content.items()]
        headers += [(METADATA_PREFIX + name, value) for name, value in self.metadata.items()]
        if self.storage_class != "STANDARD":
            headers.append(("x-amz-storage-class", self.storage_class))
        if self.tags:
            headers.append(("x-amz-tagging-count", str(len(self.tags))))
        return headers


def _content_of(headers: Headers) -> dict[str, str]:
    content = {name: value for name in CONTENT_HEADERS if (value := headers.get(name)) is not None}
    encodings = [word.strip() for word in content.pop("content-encoding", "").split(",")]
    # aws-chunked is the framing of one request, removed on arrival, and not an encoding of the object.
    kept = [word for word in encodings if word and word != "aws-chunked"]
    if kept:
        content["content-encoding"] = ",".join(kept)
    content.setdefault("content-type", "binary/octet-stream")
    return content


def _tags_of(tagging: str) -> tuple[tuple[str, str], ...]:
    tags = tuple(parse_qsl(tagging, keep_blank_values=True))
    names = {name for name, _ in tags}
    too_long = any(len(name) > 128 or len(value) > 256 for name, value in tags)
    if len(names) != len(tags) or len(tags) > TAGS_LIMIT or too_long:
        raise S3Error("InvalidTag")
    return tags


def attributes_of(headers: Headers) -> Attributes:
    """Reads the attributes of a new object."""
    metadata = {
        name.removeprefix(METADATA_PREFIX): headers.get(name) or ""
        for name, _ in headers
        if name.startswith(METADATA_PREFIX)
    }
    if sum(len(name) + len(value) for name, value in metadata.items()) > METADATA_LIMIT_BYTES:
        raise S3Error("MetadataTooLarge")
    storage_class = headers.get("x-amz-storage-class") or "STANDARD"
    if storage_class not in STORAGE_CLASSES:
        raise S3Error("InvalidStorageClass")
    return Attributes(_content_of(headers), metadata, storage_class, _tags_of(headers.get("x-amz-tagging") or ""))
