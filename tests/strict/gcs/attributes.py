"""The attributes of an object that a client may set: content headers, metadata, storage class, holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import GcsError

# Fields of the resource, with the headers of a media response.
CONTENT_FIELDS: Mapping[str, str] = {
    "contentType": "Content-Type",
    "contentEncoding": "Content-Encoding",
    "contentDisposition": "Content-Disposition",
    "contentLanguage": "Content-Language",
    "cacheControl": "Cache-Control",
}
STORAGE_CLASSES = ("STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE", "MULTI_REGIONAL", "REGIONAL")
# Clients return resources that they have received; GCS ignores these fields of them.
OUTPUT_FIELDS = frozenset(
    [
        "kind",
        "id",
        "selfLink",
        "mediaLink",
        "name",
        "bucket",
        "generation",
        "metageneration",
        "size",
        "etag",
        "timeCreated",
        "updated",
        "timeDeleted",
        "timeFinalized",
        "timeStorageClassUpdated",
        "componentCount",
        "owner",
        "acl",
        "crc32c",
        "md5Hash",
        "kmsKeyName",
        "softDeleteTime",
        "hardDeleteTime",
        "retentionExpirationTime",
    ]
)
HOLDS = ("temporaryHold", "eventBasedHold")
# GCS documentation, "Object metadata": custom metadata of an object is limited to 8 KiB.
METADATA_LIMIT_BYTES = 8 * 1024
DEFAULT_CONTENT_TYPE = "application/octet-stream"


@dataclass(frozen=True)
class Attributes:
    """The stored attributes; `content` is by the names of the resource, `storage_class` None before it is stored."""

    content: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    storage_class: str | None = None
    custom_time: str | None = None
    temporary_hold: bool = False
    event_based_hold: bool | None = None
    kms_key: str | None = None

    def response_headers(self) -> list[tuple[str, str]]:
        """Returns the headers of a media response."""
        headers = [(header, self.content[name]) for name, header in CONTENT_FIELDS.items() if name in self.content]
        return headers + [(f"x-goog-meta-{name}", value) for name, value in self.metadata.items()]

    def resource(self) -> dict[str, Any]:
        """Returns the fields of the JSON resource."""
        fields: dict[str, Any] = {**self.content}
        if self.metadata:
            fields["metadata"] = dict(self.metadata)
        fields["storageClass"] = self.storage_class
        optional = {"customTime": self.custom_time, "eventBasedHold": self.event_based_hold, "kmsKeyName": self.kms_key}
        fields |= {name: value for name, value in optional.items() if value is not None}
        if self.temporary_hold:
            fields["temporaryHold"] = True
        return fields


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise GcsError("invalid", f"Invalid value for: {name}={value!r} is not a string", parameter=name)
    return value


def _patched_metadata(current: Mapping[str, str], given: object) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise GcsError("invalid", "Invalid value for: metadata is not an object")
    changed = {**current, **{name: _text("metadata", value) for name, value in given.items() if value is not None}}
    metadata = {name: value for name, value in changed.items() if name not in given or given[name] is not None}
    if sum(len(name.encode()) + len(value.encode()) for name, value in metadata.items()) > METADATA_LIMIT_BYTES:
        raise GcsError("invalid", f"The metadata has more than {METADATA_LIMIT_BYTES} bytes.")
    return metadata


def patched(current: Attributes, resource: Mapping[str, Any]) -> Attributes:
    """Returns the attributes with the fields of a resource; null removes one. Unknown fields raise GcsError."""
    content = dict(current.content)
    changes: dict[str, Any] = {}
    for name, value in resource.items():
        if name in CONTENT_FIELDS:
            content.pop(name, None)
            if value is not None:
                content[name] = _text(name, value)
        elif name == "metadata":
            changes["metadata"] = _patched_metadata(current.metadata, value)
        elif name == "storageClass":
            if value is not None and value not in STORAGE_CLASSES:
                raise GcsError("invalid", f"Invalid value for: storageClass={value!r}")
            changes["storage_class"] = value
        elif name == "customTime":
            changes["custom_time"] = _text(name, value) if value is not None else None
        elif name in HOLDS:
            if not isinstance(value, bool):
                raise GcsError("invalid", f"Invalid value for: {name}={value!r} is not a boolean")
            changes["temporary_hold" if name == "temporaryHold" else "event_based_hold"] = value
        elif name not in OUTPUT_FIELDS:
            raise GcsError("parseError", f"Unknown name {name!r}: an object has no such field.")
    return replace(current, content=content, **changes)
