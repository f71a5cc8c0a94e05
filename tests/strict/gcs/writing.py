"""The steps by which all operations store, overwrite and delete objects: permissions, conditions, retention, keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import conditions
from .access import require
from .attributes import DEFAULT_CONTENT_TYPE, Attributes
from .errors import GcsError
from .request import Request
from .resources import timestamp
from .store import Bucket, StoredObject, crc32c_of, md5_of

ENCRYPT = "cloudkms.cryptoKeyVersions.useToEncrypt"
DECRYPT = "cloudkms.cryptoKeyVersions.useToDecrypt"


def check_key(bucket: Bucket, permission: str, key: str | None) -> None:
    """Raises forbidden if an object has a key of Cloud KMS and the bucket's flag `denied` names the key's permission."""
    if key is not None and permission in bucket.denied:
        raise GcsError(
            "forbidden",
            f"Permission denied on Cloud KMS key. Please ensure that your Cloud Storage service account has been "
            f"authorized to use this key: {key}.",
        )


def check_removable(request: Request, bucket: Bucket, stored: StoredObject) -> None:
    """Raises an error if an object may not be deleted or overwritten: a hold, or the bucket's retention."""
    what = f"Object '{bucket.name}/{stored.name}'"
    attributes = stored.attributes
    if attributes.temporary_hold or attributes.event_based_hold:
        kind = "Temporary" if attributes.temporary_hold else "Event-Based"
        message = f"{what} is under active {kind} hold and cannot be deleted, overwritten or archived until hold is "
        raise GcsError("objectUnderActiveHold", message + "removed.")
    if bucket.retention_s is not None and request.now_s < stored.created_s + bucket.retention_s:
        until = timestamp(stored.created_s + bucket.retention_s)
        message = f"{what} is subject to bucket's retention policy and cannot be deleted or overwritten until {until}"
        raise GcsError("retentionPolicyNotMet", message)


def check_replaceable(request: Request, bucket: Bucket, name: str, query: Mapping[str, str]) -> None:
    """Checks conditions, permissions and retention of the object that a write would replace."""
    live = bucket.objects.get(name)
    conditions.check(query, live)
    if live is not None:
        require(bucket, "storage.objects.delete")
        check_removable(request, bucket, live)


def check_declared(resource: Mapping[str, Any], crc32c: str, md5: str | None) -> None:
    """Compares the checksums that a resource declares with those of the content; raises GcsError if one differs."""
    for name, label, actual in (("crc32c", "CRC32C", crc32c), ("md5Hash", "MD5 hash", md5)):
        declared = resource.get(name)
        if declared is not None and declared != actual:
            message = f'Provided {label} "{declared}" doesn\'t match calculated {label} "{actual}".'
            raise GcsError("invalid", message)


def hashes_of(header: str | None) -> dict[str, str]:
    """Returns the checksums of an X-Goog-Hash header, by the names of the resource."""
    names = {"crc32c": "crc32c", "md5": "md5Hash"}
    declared = {}
    for entry in (header or "").split(","):
        algorithm, _, value = entry.strip().partition("=")
        if entry.strip():
            if algorithm not in names:
                raise GcsError("invalid", f"Invalid value for: X-Goog-Hash: {entry.strip()!r}")
            declared[names[algorithm]] = value
    return declared


def _completed(request: Request, bucket: Bucket, attributes: Attributes, key: str | None) -> Attributes:
    """Returns the attributes of a new object, with the defaults of its bucket."""
    hold = attributes.event_based_hold
    if hold is None and bucket.default_event_based_hold:
        hold = True
    key = key or bucket.kms
    check_key(bucket, ENCRYPT, key)
    return replace(
        attributes,
        content={"contentType": DEFAULT_CONTENT_TYPE, **attributes.content},
        storage_class=attributes.storage_class or bucket.storage_class,
        event_based_hold=hold,
        kms_key=f"{key}/cryptoKeyVersions/1" if key is not None else None,
    )


def store(
    request: Request,
    bucket: Bucket,
    name: str,
    body: bytes,
    attributes: Attributes,
    *,
    query: Mapping[str, str],
    kms_key: str | None = None,
    like: StoredObject | None = None,
    component_count: int | None = None,
) -> StoredObject:
    """Makes a new live object, if the conditions of `query` hold.

    like: the object that this one is a copy of, whose checksums it has.
    component_count: that of a composed object, which has no MD5.
    """
    check_replaceable(request, bucket, name, query)
    now_s = request.now_s
    composed = component_count is not None
    stored = StoredObject(
        name,
        body,
        request.project.next_generation(now_s),
        now_s,
        _completed(request, bucket, attributes, kms_key),
        like.crc32c if like is not None else crc32c_of(body),
        like.md5 if like is not None else None if composed else md5_of(body),
        like.component_count if like is not None else component_count,
        updated_s=now_s,
    )
    bucket.put(stored)
    return stored
