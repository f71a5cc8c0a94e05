"""Listings, page by page: objects, multipart uploads, parts. Changes nothing."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass, field

from ..documents import document, group, tag, timestamp, url_encoder
from ..errors import S3Error
from ..exchange import Request, xml_response
from ..response import Response
from ..store import ObjectTable, StoredObject
from ..target import KEY_LIMIT_BYTES
from .buckets import owner

# S3 API reference, ListParts and ListMultipartUploads: pages of at most 1000.
_PAGE_LIMIT = 1000
# Makes every token begin with "+//+": a client that does not encode tokens in its query cannot get the next page.
_TOKEN_MARK = b"\xfb\xff\xfe"
_KEY, _PREFIX = "k", "p"


@dataclass(frozen=True)
class _PageEnd:
    """The end of a page: a key, or a common prefix, after which all keys of that prefix are skipped."""

    kind: str
    name: str

    def token(self) -> str:
        # Reversed, so that no client reads a key from it.
        return base64.b64encode(_TOKEN_MARK + self.name.encode()[::-1] + self.kind.encode()).decode()

    def position_after(self, table: ObjectTable[StoredObject]) -> int:
        if self.kind == _PREFIX:
            # No key sorts after its prefix followed by as many of the last code point as a key can hold.
            return table.position_of(self.name + "\U0010ffff" * KEY_LIMIT_BYTES)
        position = table.position_of(self.name)
        return position + (table.key_at(position) == self.name)


def _page_end_of(token: str) -> _PageEnd:
    try:
        decoded = base64.b64decode(token, validate=True)
        end = _PageEnd(decoded[-1:].decode(), decoded[len(_TOKEN_MARK) : -1][::-1].decode())
        if not decoded.startswith(_TOKEN_MARK) or end.kind not in (_KEY, _PREFIX):
            raise ValueError(token)
        return end
    except (binascii.Error, ValueError):
        raise S3Error("InvalidArgument", "The continuation token provided is incorrect") from None


@dataclass
class _Page:
    """A page of a listing; `next_token` is set if there is another."""

    objects: list[tuple[str, StoredObject]] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    next_token: str | None = None


def _page_of(table: ObjectTable[StoredObject], start: int, prefix: str, delimiter: str | None, max_keys: int) -> _Page:
    page = _Page()
    last = _PageEnd(_KEY, "")
    position = max(start, table.position_of(prefix))
    while (key := table.key_at(position)) is not None and key.startswith(prefix):
        if len(page.objects) + len(page.prefixes) == max_keys:
            # S3 responds to max-keys=0 with an empty page that is not truncated.
            page.next_token = last.token() if max_keys else None
            return page
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        if found:
            last = _PageEnd(_PREFIX, prefix + head + found)
            page.prefixes.append(last.name)
        else:
            last = _PageEnd(_KEY, key)
            page.objects.append((key, table[key]))
        position = last.position_after(table)
    return page


def _contents(key: str, stored: StoredObject, encode: Callable[[str], str], fetch_owner: bool) -> str:
    return group(
        "Contents",
        tag("Key", encode(key)),
        tag("LastModified", timestamp(stored.modified_s)),
        tag("ETag", f'"{stored.etag}"'),
        tag("ChecksumAlgorithm", stored.checksum.algorithm.upper()),
        tag("ChecksumType", stored.checksum.type),
        tag("Size", len(stored.body)),
        owner() if fetch_owner else "",
        tag("StorageClass", stored.attributes.storage_class),
    )


def list_objects_v2(request: Request) -> Response:
    """Lists objects in the order of their keys' UTF-8 bytes; a common prefix counts as one key."""
    query = request.query
    if query["list-type"] != "2":
        raise S3Error("InvalidArgument", "list-type must be 2.")
    table = request.bucket.objects
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter") or None
    token, start_after = query.get("continuation-token"), query.get("start-after")
    encoding_type = request.encoding_type()
    encode = url_encoder(encoding_type)
    max_keys = request.count_parameter("max-keys", 1000, request.state.limits.max_keys)
    if token is not None:
        start = _page_end_of(token).position_after(table)
    else:
        start = _PageEnd(_KEY, start_after or "").position_after(table)
    page = _page_of(table, start, prefix, delimiter, max_keys)
    fetch_owner = query.get("fetch-owner") == "true"
    body = document(
        "ListBucketResult",
        tag("Name", request.bucket.name),
        tag("Prefix", encode(prefix)),
        tag("StartAfter", encode(start_after)) if start_after is not None else "",
        tag("ContinuationToken", token) if token is not None else "",
        tag("NextContinuationToken", page.next_token) if page.next_token else "",
        tag("KeyCount", len(page.objects) + len(page.prefixes)),
        tag("MaxKeys", max_keys),
        tag("Delimiter", encode(delimiter)) if delimiter else "",
        tag("EncodingType", encoding_type) if encoding_type else "",
        tag("IsTruncated", "true" if page.next_token else "false"),
        *(_contents(key, stored, encode, fetch_owner) for key, stored in page.objects),
        *(group("CommonPrefixes", tag("Prefix", encode(common))) for common in page.prefixes),
    )
    return xml_response(body)


def list_multipart_uploads(request: Request) -> Response:
    """Lists the uploads in progress by key and then by start time."""
    bucket, query = request.bucket, request.query
    prefix, key_marker = query.get("prefix", ""), query.get("key-marker", "")
    id_marker = query.get("upload-id-marker", "")
    encoding_type = request.encoding_type()
    encode = url_encoder(encoding_type)
    max_uploads = request.count_parameter("max-uploads", _PAGE_LIMIT, _PAGE_LIMIT)
    # Ids increase with time (see `multipart`), so their order is that of the start times.
    uploads = sorted(bucket.uploads.values(), key=lambda upload: (upload.key, upload.upload_id))
    after = [
        upload
        for upload in uploads
        if (upload.key == prefix if prefix and bucket.lists_uploads_of_keys else upload.key.startswith(prefix))
        and (upload.key > key_marker or (bool(id_marker) and (upload.key, upload.upload_id) > (key_marker, id_marker)))
    ]
    page, truncated = after[:max_uploads], len(after) > max_uploads > 0
    body = document(
        "ListMultipartUploadsResult",
        tag("Bucket", bucket.name),
        tag("KeyMarker", encode(key_marker)),
        tag("UploadIdMarker", id_marker),
        tag("NextKeyMarker", encode(page[-1].key)) if truncated else "",
        tag("NextUploadIdMarker", page[-1].upload_id) if truncated else "",
        tag("Prefix", encode(prefix)),
        tag("EncodingType", encoding_type) if encoding_type else "",
        tag("MaxUploads", max_uploads),
        tag("IsTruncated", "true" if truncated else "false"),
        *(
            group(
                "Upload",
                tag("Key", encode(upload.key)),
                tag("UploadId", upload.upload_id),
                owner("Initiator"),
                owner(),
                tag("StorageClass", upload.attributes.storage_class),
                tag("Initiated", timestamp(upload.initiated_s)),
            )
            for upload in page
        ),
    )
    return xml_response(body)


def list_parts(request: Request) -> Response:
    """Lists an upload's parts by number."""
    upload = request.bucket.upload(request.key, request.query["uploadId"])
    marker = request.count_parameter("part-number-marker", 0, 2**31 - 1)
    max_parts = request.count_parameter("max-parts", _PAGE_LIMIT, _PAGE_LIMIT)
    after = sorted((number, part) for number, part in upload.parts.items() if number > marker)
    page, truncated = after[:max_parts], len(after) > max_parts > 0
    body = document(
        "ListPartsResult",
        tag("Bucket", request.bucket.name),
        tag("Key", upload.key),
        tag("UploadId", upload.upload_id),
        owner("Initiator"),
        owner(),
        tag("StorageClass", upload.attributes.storage_class),
        tag("PartNumberMarker", marker),
        tag("NextPartNumberMarker", page[-1][0]) if page else "",
        tag("MaxParts", max_parts),
        tag("IsTruncated", "true" if truncated else "false"),
        *(
            group(
                "Part",
                tag("PartNumber", number),
                tag("LastModified", timestamp(part.modified_s)),
                tag("ETag", f'"{part.etag}"'),
                tag("Size", len(part.body)),
                tag(part.checksum.element, part.checksum.value) if part.checksum is not None else "",
            )
            for number, part in page
        ),
    )
    return xml_response(body)
