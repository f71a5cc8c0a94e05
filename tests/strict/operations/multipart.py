"""Multipart uploads from their creation to their last part. `multipart_completion` completes them."""

from __future__ import annotations

from .. import checksums
from ..attributes import attributes_of
from ..documents import document, tag
from ..encryption import check_part, encryption_of_new
from ..errors import S3Error
from ..exchange import Request, xml_response
from ..response import Response
from ..store import Part, Upload
from .writing import etag_of

# S3 user guide, "Amazon S3 multipart upload limits".
PARTS_LIMIT = 10_000


def _new_upload_id(request: Request) -> str:
    """Returns an id with the characters of S3's ids, which some clients put into a query without encoding.

    Later ids sort after earlier ones, which is the order of a listing of uploads.
    """
    return f"Strict_upload-{request.state.next_number():013d}.{'x' * 40}"


def _checksum_plan(request: Request) -> tuple[str | None, str]:
    """Returns the algorithm and type of an upload's checksum, as requested at its creation."""
    name, wanted_type = (request.headers.get(f"x-amz-checksum-{word}") for word in ("algorithm", "type"))
    if name is None:
        if wanted_type is not None:
            raise S3Error("InvalidRequest", "x-amz-checksum-type needs x-amz-checksum-algorithm.")
        return None, "FULL_OBJECT"
    algorithm = checksums.algorithm_of(name)
    allowed = checksums.MULTIPART_TYPES[algorithm]
    if wanted_type is not None and wanted_type not in allowed:
        raise S3Error("InvalidRequest", f"The {wanted_type} checksum type cannot be used with {algorithm}.")
    return algorithm, wanted_type or allowed[0]


def create_multipart_upload(request: Request) -> Response:
    bucket = request.bucket
    algorithm, checksum_type = _checksum_plan(request)
    kept = encryption_of_new(request.headers, requires_kms=bucket.requires_sse_kms)
    upload = Upload(
        request.key,
        _new_upload_id(request),
        request.state.clock.now_s(),
        attributes_of(request.headers),
        kept,
        algorithm,
        checksum_type,
    )
    bucket.uploads[upload.upload_id] = upload
    headers = kept.response_headers()
    if algorithm is not None:
        headers += [("x-amz-checksum-algorithm", algorithm.upper()), ("x-amz-checksum-type", checksum_type)]
    body = document(
        "InitiateMultipartUploadResult",
        tag("Bucket", bucket.name),
        tag("Key", upload.key),
        tag("UploadId", upload.upload_id),
    )
    return xml_response(body, headers)


def part_number_of(request: Request) -> int:
    number = request.count_parameter("partNumber", 0, 2**31 - 1)
    if not 1 <= number <= PARTS_LIMIT:
        raise S3Error("InvalidArgument", f"Part number must be an integer between 1 and {PARTS_LIMIT}, inclusive")
    return number


def keep_part(request: Request, upload: Upload, body: bytes, claimed: checksums.Checksum | None) -> Part:
    """Adds a part to its upload, where it replaces one with the same number.

    Errors: InvalidRequest where its checksum is of another algorithm than the upload's, or where it has none although
    the upload's is to be composed of the parts'.
    """
    checksum = claimed
    if upload.algorithm is not None:
        actual = claimed.algorithm if claimed is not None else None
        needed = upload.checksum_type == "COMPOSITE"
        if actual != upload.algorithm and (needed or actual is not None):
            message = f"Checksum Type mismatch occurred, expected: {upload.algorithm}, actual: {actual or 'null'}"
            raise S3Error("InvalidRequest", message)
        checksum = claimed or checksums.compute(upload.algorithm, body)
    part = Part(body, etag_of(request, body, upload.encryption), request.state.clock.now_s(), checksum)
    upload.parts[part_number_of(request)] = part
    return part


def upload_part(request: Request) -> Response:
    upload = request.bucket.upload(request.key, request.query["uploadId"])
    part_number_of(request)
    check_part(upload.encryption, request.headers)
    claimed = checksums.check_body(request.headers, request.trailers, request.body)
    part = keep_part(request, upload, request.body, claimed)
    headers = [("ETag", f'"{part.etag}"'), *upload.encryption.response_headers()]
    if part.checksum is not None:
        headers.append((part.checksum.header, part.checksum.value))
    return Response(headers=headers)


def abort_multipart_upload(request: Request) -> Response:
    upload = request.bucket.upload(request.key, request.query["uploadId"])
    del request.bucket.uploads[upload.upload_id]
    return Response(204)
