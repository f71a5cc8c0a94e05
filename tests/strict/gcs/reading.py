"""GetMedia and GetObject. `..sending` injects faults into their responses."""

from __future__ import annotations

import gzip
import zlib
from email.utils import formatdate

from ..conditions import parse_range
from ..errors import S3Error
from ..response import Response
from . import conditions
from .errors import GcsError
from .request import Request
from .resources import object_response
from .store import StoredObject
from .writing import DECRYPT, check_key


def addressed_object(request: Request) -> StoredObject:
    """Returns the live object, or that of `generation`; raises notFound, or an error of a condition."""
    bucket, name, generation = request.bucket, request.name, request.number("generation")
    if request.query.get("softDeleted") is not None and request.flag("softDeleted"):
        if generation is None:
            raise GcsError("required", "softDeleted needs a generation.", parameter="generation")
        stored = bucket.soft_deleted_version(name, generation)
    else:
        stored = bucket.version(name, generation)
    if stored is None:
        raise GcsError("notFound", f"No such object: {bucket.name}/{name}")
    reads = request.operation in ("GetMedia", "GetObject")
    conditions.check(request.query, bucket.objects.get(name), addressed=stored, reads=reads)
    return stored


def get_object(request: Request) -> Response:
    return object_response(request, request.bucket, addressed_object(request))


def _headers_of(stored: StoredObject) -> list[tuple[str, str]]:
    hashes = f"crc32c={stored.crc32c}" + (f",md5={stored.md5}" if stored.md5 is not None else "")
    headers = [
        ("x-goog-generation", str(stored.generation)),
        ("x-goog-metageneration", str(stored.metageneration)),
        ("x-goog-hash", hashes),
        ("x-goog-storage-class", stored.attributes.storage_class or ""),
        ("x-goog-stored-content-encoding", stored.attributes.content.get("contentEncoding", "identity")),
        ("x-goog-stored-content-length", str(len(stored.body))),
        ("ETag", stored.etag),
        ("Last-Modified", formatdate(stored.updated_s, usegmt=True)),
        ("Accept-Ranges", "bytes"),
    ]
    if stored.component_count is not None:
        headers.append(("x-goog-component-count", str(stored.component_count)))
    return headers + stored.attributes.response_headers()


def _accepts_gzip(request: Request) -> bool:
    for entry in (request.headers.get("accept-encoding") or "").replace(" ", "").lower().split(","):
        coding, _, quality = entry.partition(";q=")
        if coding in ("gzip", "*") and quality.strip("0.") + ("1" if not quality else ""):
            return True
    return False


def _decompressed(request: Request, stored: StoredObject) -> bytes | None:
    """Returns the decompressed content if GCS decompresses it for this request ("Transcoding of gzip-compressed files")."""
    content = stored.attributes.content
    if content.get("contentEncoding") != "gzip" or "no-transform" in content.get("cacheControl", ""):
        return None
    if _accepts_gzip(request):
        return None
    try:
        return gzip.decompress(stored.body)
    except (OSError, EOFError, zlib.error):
        return None


def get_media(request: Request) -> Response:
    """Returns the content or a range of it; a decompressed response ignores the range and has no length."""
    stored = addressed_object(request)
    check_key(request.bucket, DECRYPT, stored.attributes.kms_key)
    headers = _headers_of(stored)
    plain = _decompressed(request, stored)
    if plain is not None:
        headers = [(name, value) for name, value in headers if name not in ("Content-Encoding", "Accept-Ranges")]
        headers.append(("Warning", "214 UploadServer gunzipped"))
        return Response(200, headers, plain, chunked=True)
    range_header = request.headers.get("range")
    if range_header is None:
        return Response(200, headers, stored.body)
    size_bytes = len(stored.body)
    try:
        wanted = parse_range(range_header, size_bytes)
    except S3Error as error:
        if error.status == 416:
            raise GcsError(
                "requestedRangeNotSatisfiable", headers=[("Content-Range", f"bytes */{size_bytes}")]
            ) from None
        raise GcsError("invalid", error.message) from None
    headers.append(("Content-Range", f"bytes {wanted.start}-{wanted.stop - 1}/{size_bytes}"))
    return Response(206, headers, memoryview(stored.body)[wanted.start : wanted.stop])
