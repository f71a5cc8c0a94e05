"""DeleteObject and DeleteObjects. `buckets` and `multipart` delete buckets and uploads."""

from __future__ import annotations

from .. import checksums, conditions
from ..documents import MalformedDocument, Node, document, group, parse, tag
from ..errors import S3Error
from ..exchange import Request, xml_response
from ..response import Response
from ..target import check_key

# S3 API reference, DeleteObjects.
_KEYS_LIMIT = 1000


def delete_object(request: Request) -> Response:
    """Deletes a key; deleting a missing key succeeds, unless If-Match requires it to exist."""
    objects = request.bucket.objects
    conditions.check_write(objects.get(request.key), request.headers, request.key)
    objects.delete(request.key)
    return Response(204)


def _keys_of(body: bytes) -> tuple[list[Node], bool]:
    try:
        root = parse(body, "Delete")
        entries = root.all("Object")
        for entry in entries:
            entry.require("Key")
    except MalformedDocument as error:
        raise S3Error("MalformedXML", str(error)) from error
    if not 1 <= len(entries) <= _KEYS_LIMIT:
        raise S3Error("MalformedXML", f"{len(entries)} keys, 1..{_KEYS_LIMIT} are allowed.")
    return entries, root.find("Quiet") == "true"


def delete_objects(request: Request) -> Response:
    """Deletes up to 1000 keys; the response has status 200 and lists the errors of single keys."""
    if request.bucket.no_bulk_delete:
        raise S3Error("NotImplemented")
    if request.bucket.needs_content_md5 and request.headers.get("content-md5") is None:
        raise S3Error("InvalidRequest", "Missing required header for this request: Content-MD5")
    claimed = checksums.check_body(request.headers, request.trailers, request.body)
    if claimed is None and request.headers.get("content-md5") is None:
        raise S3Error("InvalidRequest", "Missing required header for this request: Content-MD5 OR x-amz-checksum-*")
    entries, quiet = _keys_of(request.body)
    results = []
    for entry in entries:
        key = entry.require("Key")
        try:
            check_key(key)
            unknown = [child.name for child in entry if child.name != "Key"]
            if unknown:
                raise S3Error("NotImplemented", f"{', '.join(unknown)} of an Object is not implemented.")
            request.bucket.objects.delete(key)
            if not quiet:
                results.append(group("Deleted", tag("Key", key)))
        except S3Error as error:
            results.append(group("Error", tag("Key", key), tag("Code", error.code), tag("Message", error.message)))
    return xml_response(document("DeleteResult", *results))
