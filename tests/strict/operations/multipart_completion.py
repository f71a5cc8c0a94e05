"""CompleteMultipartUpload: checks the list of parts and creates the object. `multipart` handles parts and aborts.

A completed upload is gone: completing it again is NoSuchUpload, which a client whose response was lost must expect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .. import checksums
from ..checksums import Checksum
from ..documents import MalformedDocument, Node, document, parse, tag
from ..errors import S3Error
from ..exchange import Request, xml_response
from ..response import Response
from ..store import Part, StoredObject, Upload
from .multipart import PARTS_LIMIT
from .writing import keep


@dataclass(frozen=True)
class _Listed:
    """A part in the client's list."""

    number: int
    etag: str
    checksums: dict[str, str]


def _listed(node: Node) -> _Listed:
    number = node.require("PartNumber")
    if not (number.isascii() and number.isdecimal()):
        raise MalformedDocument(f"PartNumber {number!r}")
    values = {child.name: child.text for child in node if child.name.startswith("Checksum")}
    return _Listed(int(number), node.require("ETag").strip('"'), values)


def _list_of(body: bytes) -> list[_Listed]:
    try:
        listed = [_listed(node) for node in parse(body, "CompleteMultipartUpload").all("Part")]
    except MalformedDocument as error:
        raise S3Error("MalformedXML", str(error)) from error
    if not 1 <= len(listed) <= PARTS_LIMIT:
        raise S3Error("MalformedXML", f"{len(listed)} parts, 1..{PARTS_LIMIT} are allowed.")
    if any(later.number <= earlier.number for earlier, later in pairwise(listed)):
        raise S3Error("InvalidPartOrder")
    return listed


def _check_checksums(listed: _Listed, part: Part, upload: Upload) -> None:
    if upload.checksum_type == "COMPOSITE" and not listed.checksums:
        message = f"The upload was created using a {upload.algorithm} checksum. The complete request must include the"
        raise S3Error("InvalidRequest", f"{message} checksum for each part. It was missing for part {listed.number}.")
    for element, value in listed.checksums.items():
        if part.checksum is None or (element, value) != (part.checksum.element, part.checksum.value):
            raise S3Error("InvalidPart", details={"PartNumber": str(listed.number)})


def _parts_of(request: Request, upload: Upload, listed: Sequence[_Listed]) -> list[Part]:
    """Returns the listed parts in their order; raises S3Error for the first that differs or is too small."""
    parts = []
    for entry in listed:
        part = upload.parts.get(entry.number)
        if part is None or part.etag != entry.etag:
            details = {"UploadId": upload.upload_id, "PartNumber": str(entry.number), "ETag": entry.etag}
            raise S3Error("InvalidPart", details=details)
        _check_checksums(entry, part, upload)
        parts.append(part)
    least_bytes = request.state.limits.min_part_bytes
    for entry, part in zip(listed[:-1], parts[:-1], strict=True):
        if len(part.body) < least_bytes:
            details = {
                "ProposedSize": str(len(part.body)),
                "MinSizeAllowed": str(least_bytes),
                "PartNumber": str(entry.number),
                "ETag": part.etag,
            }
            raise S3Error("EntityTooSmall", details=details)
    return parts


def _checksum_of(upload: Upload, parts: Sequence[Part], body: bytes) -> Checksum:
    if upload.algorithm is not None and upload.checksum_type == "COMPOSITE":
        # keep_part refuses a part without a checksum if the upload's checksum is composed from the parts'.
        return checksums.compose(upload.algorithm, [part.checksum for part in parts if part.checksum is not None])
    return checksums.compute(upload.algorithm or checksums.DEFAULT_ALGORITHM, body)


def _check_whole(request: Request, upload: Upload, checksum: Checksum, size_bytes: int) -> None:
    """Compares what the request declares for the whole object: type and value of its checksum, and its size."""
    wanted_type = request.headers.get("x-amz-checksum-type")
    if wanted_type is not None and wanted_type != upload.checksum_type:
        raise S3Error("InvalidRequest", f"The upload's checksum type is {upload.checksum_type}, not {wanted_type}.")
    claimed = checksums.claimed(request.headers, {})
    if claimed is not None:
        if claimed.algorithm != checksum.algorithm:
            raise S3Error("InvalidRequest", f"The upload's checksum is a {checksum.algorithm}.")
        # S3 accepts a composite checksum with and without the "-N" at its end.
        if claimed.value not in (checksum.value, checksum.value.partition("-")[0]):
            raise S3Error("BadDigest")
    size = request.headers.get("x-amz-mp-object-size")
    if size is not None and size != str(size_bytes):
        raise S3Error("InvalidRequest", f"x-amz-mp-object-size is {size}, the parts have {size_bytes} bytes.")


def complete_multipart_upload(request: Request) -> Response:
    upload = request.bucket.upload(request.key, request.query["uploadId"])
    parts = _parts_of(request, upload, _list_of(request.body))
    body = b"".join(part.body for part in parts)
    checksum = _checksum_of(upload, parts, body)
    _check_whole(request, upload, checksum, len(body))
    md5s = b"".join(bytes.fromhex(part.etag) for part in parts)
    etag = f"{hashlib.md5(md5s, usedforsecurity=False).hexdigest()}-{len(parts)}"
    now_s = request.state.clock.now_s()
    keep(request, StoredObject(body, etag, now_s, upload.attributes, upload.encryption, checksum))
    del request.bucket.uploads[upload.upload_id]
    document_body = document(
        "CompleteMultipartUploadResult",
        tag("Location", f"http://{request.headers.get('host')}/{request.bucket.name}/{upload.key}"),
        tag("Bucket", request.bucket.name),
        tag("Key", upload.key),
        tag("ETag", f'"{etag}"'),
        tag(checksum.element, checksum.value),
        tag("ChecksumType", checksum.type),
    )
    return xml_response(document_body, upload.encryption.response_headers())
