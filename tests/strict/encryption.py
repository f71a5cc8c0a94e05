"""Server-side encryption as clients see it: checks, stores and echoes headers. Encrypts nothing.

Source: S3 user guide, "Protecting data with server-side encryption".
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass

from .errors import S3Error
from .wire import Headers

_PREFIX = "x-amz-server-side-encryption"
_COPY_SOURCE_PREFIX = "x-amz-copy-source-server-side-encryption"
_KMS_KEY = _PREFIX + "-aws-kms-key-id"
_KMS_CONTEXT = _PREFIX + "-context"
_BUCKET_KEY = _PREFIX + "-bucket-key-enabled"
_MODES = ("AES256", "aws:kms", "aws:kms:dsse")
_DEFAULT_KMS_KEY = "arn:aws:kms:us-east-1:111122223333:key/00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True)
class Encryption:
    """The encryption of an object or upload; only mode SSE-C has `customer_key_md5`."""

    mode: str = "AES256"
    kms_key_id: str | None = None
    bucket_key: str | None = None
    customer_key_md5: str | None = None

    @property
    def hides_md5(self) -> bool:
        """Whether the ETag is not the MD5 of the content, as for every mode but SSE-S3."""
        return self.mode != "AES256"

    def response_headers(self) -> list[tuple[str, str]]:
        if self.customer_key_md5 is not None:
            return [
                (_PREFIX + "-customer-algorithm", "AES256"),
                (_PREFIX + "-customer-key-MD5", self.customer_key_md5),
            ]
        headers = [(_PREFIX, self.mode)]
        if self.kms_key_id is not None:
            headers.append((_KMS_KEY, self.kms_key_id))
        if self.bucket_key is not None:
            headers.append((_BUCKET_KEY, self.bucket_key))
        return headers


def customer_key_md5(headers: Headers, prefix: str = _PREFIX) -> str | None:
    """Returns the MD5 of a request's SSE-C key, or None; raises S3Error if key and MD5 do not match."""
    algorithm, key, md5 = (headers.get(f"{prefix}-customer-{name}") for name in ("algorithm", "key", "key-md5"))
    if algorithm is None and key is None and md5 is None:
        return None
    if algorithm is None or key is None or md5 is None:
        raise S3Error("InvalidArgument", "SSE-C needs the algorithm, the key and the key's MD5.")
    if algorithm != "AES256":
        raise S3Error("InvalidEncryptionAlgorithmError")
    try:
        secret = base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) != 32:
        raise S3Error("InvalidArgument", "The secret key was invalid for the specified algorithm.")
    if base64.b64encode(hashlib.md5(secret, usedforsecurity=False).digest()).decode() != md5:
        raise S3Error("InvalidArgument", "The calculated MD5 hash of the key did not match the hash that was provided.")
    return md5


def encryption_of_new(headers: Headers, *, requires_kms: bool) -> Encryption:
    """Returns the encryption of a new object with these headers; raises AccessDenied if the bucket requires SSE-KMS."""
    mode = headers.get(_PREFIX)
    if requires_kms and mode not in ("aws:kms", "aws:kms:dsse"):
        raise S3Error(
            "AccessDenied", "The bucket's policy denies uploads without x-amz-server-side-encryption: aws:kms"
        )
    customer = customer_key_md5(headers)
    if customer is not None:
        if mode is not None:
            raise S3Error("InvalidArgument", "SSE-C and another encryption exclude each other.")
        return Encryption("customer", customer_key_md5=customer)
    if mode is not None and mode not in _MODES:
        raise S3Error("InvalidEncryptionAlgorithmError")
    kms = mode is not None and mode.startswith("aws:kms")
    if not kms and any(headers.get(name) is not None for name in (_KMS_KEY, _KMS_CONTEXT)):
        raise S3Error("InvalidArgument", f"A KMS key or context needs {_PREFIX}: aws:kms.")
    key_id = (headers.get(_KMS_KEY) or _DEFAULT_KMS_KEY) if kms else None
    return Encryption(mode or "AES256", key_id, headers.get(_BUCKET_KEY) if kms else None)


def check_read(encryption: Encryption, headers: Headers, *, copy_source: bool = False) -> None:
    """Refuses a read without the object's SSE-C key, or with a key that the object does not have."""
    if not copy_source and headers.get(_PREFIX) is not None:
        raise S3Error("InvalidArgument", f"{_PREFIX} header is not supported for this operation.")
    sent = customer_key_md5(headers, _COPY_SOURCE_PREFIX if copy_source else _PREFIX)
    kept = encryption.customer_key_md5
    if kept is None and sent is not None:
        raise S3Error("InvalidRequest", "The encryption parameters are not applicable to this object.")
    if kept is not None and sent is None:
        message = "The object was stored using a form of Server Side Encryption. The correct parameters must be"
        raise S3Error("InvalidRequest", message + " provided to retrieve the object.")
    if kept != sent:
        raise S3Error("AccessDenied", "The SSE-C key is not the one the object was stored with.")


def check_part(encryption: Encryption, headers: Headers) -> None:
    """Refuses a part whose SSE-C key differs from its upload's; parts of other modes have no encryption headers."""
    if headers.get(_PREFIX) is not None:
        raise S3Error("InvalidArgument", f"{_PREFIX} header is not supported for this operation.")
    sent = customer_key_md5(headers)
    if encryption.customer_key_md5 is not None and sent is None:
        message = "The multipart upload initiate requested encryption. Subsequent part requests must include the"
        raise S3Error("InvalidRequest", message + " appropriate encryption parameters.")
    if encryption.customer_key_md5 != sent:
        raise S3Error("InvalidRequest", "The provided encryption parameters did not match the ones used originally.")
