"""PutObject, and the step by which all operations store a complete object. `multipart` handles parts."""

from __future__ import annotations

from .. import checksums, conditions
from ..attributes import attributes_of
from ..checksums import Checksum
from ..encryption import Encryption, encryption_of_new
from ..errors import S3Error
from ..exchange import Request
from ..response import Response
from ..store import StoredObject


def etag_of(request: Request, body: bytes, kept: Encryption) -> str:
    """Returns the ETag of a body; an encryption that hides the MD5 gives an ETag that cannot be computed."""
    if not kept.hides_md5:
        return checksums.md5_hex(body)
    return checksums.md5_hex(b"%d:" % request.state.next_number() + body[:64])


def checksum_headers(checksum: Checksum) -> list[tuple[str, str]]:
    return [(checksum.header, checksum.value), ("x-amz-checksum-type", checksum.type)]


def keep(request: Request, stored: StoredObject) -> None:
    """Puts an object at the request's key, if the request's conditions on the existing object hold."""
    objects = request.bucket.objects
    if request.bucket.refuses_if_match and request.headers.get("if-match") is not None:
        raise S3Error("PreconditionFailed")
    if not request.bucket.ignores_conditions:
        conditions.check_write(objects.get(request.key), request.headers, request.key)
    objects.put(request.key, stored)


def put_object(request: Request) -> Response:
    claimed = checksums.check_body(request.headers, request.trailers, request.body)
    kept = encryption_of_new(request.headers, requires_kms=request.bucket.requires_sse_kms)
    stored = StoredObject(
        request.body,
        etag_of(request, request.body, kept),
        request.state.clock.now_s(),
        attributes_of(request.headers),
        kept,
        claimed or checksums.compute(checksums.DEFAULT_ALGORITHM, request.body),
    )
    keep(request, stored)
    headers = [("ETag", f'"{stored.etag}"'), *kept.response_headers(), *checksum_headers(stored.checksum)]
    return Response(headers=headers)
