"""CopyObject and UploadPartCopy. `writing` and `multipart` store the copied bytes."""

from __future__ import annotations

from .. import checksums, conditions, encryption
from ..attributes import Attributes, attributes_of
from ..documents import document, tag, timestamp
from ..errors import S3Error
from ..exchange import Request, xml_response
from ..response import Response
from ..store import StoredObject
from ..target import parse_copy_source
from .multipart import keep_part, part_number_of
from .writing import etag_of, keep

_DIRECTIVES = ("COPY", "REPLACE")


def _source_of(request: Request) -> tuple[str, str, StoredObject]:
    """Returns bucket, key and object of a copy's source, after checking the request's conditions on it."""
    bucket_name, key = parse_copy_source(request.headers.get("x-amz-copy-source") or "")
    bucket = request.state.buckets.get(bucket_name)
    if bucket is None:
        raise S3Error("NoSuchBucket", details={"BucketName": bucket_name})
    stored = bucket.stored(key)
    encryption.check_read(stored.encryption, request.headers, copy_source=True)
    conditions.check_read(stored, request.headers, prefix="x-amz-copy-source-")
    return bucket_name, key, stored


def _directive(request: Request, header: str) -> str:
    directive = request.headers.get(header) or "COPY"
    if directive not in _DIRECTIVES:
        raise S3Error("InvalidArgument", f"Unknown {header}: {directive}.")
    return directive


def _attributes_of_copy(request: Request, source: StoredObject) -> Attributes:
    """Returns the copy's attributes: the request's storage class, and the rest as its directives require."""
    own = attributes_of(request.headers)
    metadata_from = own if _directive(request, "x-amz-metadata-directive") == "REPLACE" else source.attributes
    tags_from = own if _directive(request, "x-amz-tagging-directive") == "REPLACE" else source.attributes
    return Attributes(metadata_from.content, metadata_from.metadata, own.storage_class, tags_from.tags)


def copy_object(request: Request) -> Response:
    source_bucket, source_key, source = _source_of(request)
    attributes = _attributes_of_copy(request, source)
    kept = encryption.encryption_of_new(request.headers, requires_kms=request.bucket.requires_sse_kms)
    onto_itself = (source_bucket, source_key) == (request.bucket.name, request.key)
    replaces = request.headers.get("x-amz-metadata-directive") == "REPLACE"
    same_kind = kept == source.encryption and attributes.storage_class == source.attributes.storage_class
    if onto_itself and same_kind and not replaces:
        raise S3Error(
            "InvalidRequest",
            "This copy request is illegal because it is trying to copy an object to itself without changing the"
            " object's metadata, storage class, website redirect location or encryption attributes.",
        )
    algorithm = request.headers.get("x-amz-checksum-algorithm")
    # A composite checksum is computed over parts, which a copy does not have.
    usual = source.checksum.algorithm if source.checksum.type == "FULL_OBJECT" else checksums.DEFAULT_ALGORITHM
    checksum = checksums.compute(checksums.algorithm_of(algorithm) if algorithm else usual, source.body)
    etag, now_s = etag_of(request, source.body, kept), request.state.clock.now_s()
    keep(request, StoredObject(source.body, etag, now_s, attributes, kept, checksum))
    body = document(
        "CopyObjectResult",
        tag("LastModified", timestamp(now_s)),
        tag("ETag", f'"{etag}"'),
        tag(checksum.element, checksum.value),
        tag("ChecksumType", checksum.type),
    )
    return xml_response(body, kept.response_headers())


def upload_part_copy(request: Request) -> Response:
    upload = request.bucket.upload(request.key, request.query["uploadId"])
    part_number_of(request)
    encryption.check_part(upload.encryption, request.headers)
    _, _, source = _source_of(request)
    content = source.body
    wanted = request.headers.get("x-amz-copy-source-range")
    if wanted is not None:
        bounds = conditions.parse_range(wanted, len(content))
        content = content[bounds.start : bounds.stop]
    claimed = checksums.compute(upload.algorithm, content) if upload.algorithm is not None else None
    part = keep_part(request, upload, content, claimed)
    body = document(
        "CopyPartResult",
        tag("LastModified", timestamp(part.modified_s)),
        tag("ETag", f'"{part.etag}"'),
        tag(part.checksum.element, part.checksum.value) if part.checksum is not None else "",
    )
    return xml_response(body, upload.encryption.response_headers())
