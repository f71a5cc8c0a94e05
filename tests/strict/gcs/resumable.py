"""Resumable uploads: start, chunks, status, cancellation.

Source: GCS documentation, "Resumable uploads" and "Perform resumable uploads". One rule is stricter: a chunk that
begins before the first byte that is not persisted is refused, where GCS ignores the bytes that it has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote

from ..response import Response
from .errors import GcsError
from .inserting import kms_key_of, new_attributes, object_name
from .request import Request, number_of
from .resources import object_response
from .store import Session, crc32c_of, md5_of
from .writing import check_declared, check_replaceable, hashes_of, store

CHUNK_MULTIPLE_BYTES = 256 * 1024
_CONTENT_RANGE = re.compile(r"bytes (?:\*|([0-9]{1,18})-([0-9]{1,18}|\*))/([0-9]{1,18}|\*)")


def start_resumable(request: Request) -> Response:
    """Starts a session; its URL authorises the rest of the upload."""
    resource, bucket = dict(request.json()), request.bucket
    content_type = request.headers.get("x-upload-content-type")
    if content_type and resource.get("contentType") is None:
        resource["contentType"] = content_type
    name = object_name(request.query, resource)
    new_attributes(request.query, resource, None)
    check_replaceable(request, bucket, name, request.query)
    upload_id = f"Strict_upload-{request.state.next_number():013d}{'x' * 100}"
    total_bytes = number_of("X-Upload-Content-Length", request.headers.get("x-upload-content-length"))
    session = Session(upload_id, bucket.name, name, resource, request.query, total_bytes)
    request.project.sessions[upload_id] = session
    query = f"uploadType=resumable&name={quote(name, safe='')}&upload_id={upload_id}"
    location = f"{request.state.endpoint}/upload/storage/v1/b/{bucket.name}/o?{query}"
    return Response(200, [("Location", location)])


def session_of(request: Request) -> Session:
    """Returns the session of a request; raises notFound if it does not exist, gone if it was cancelled."""
    session = request.project.sessions.get(request.query.get("upload_id", ""))
    if session is None or session.bucket != request.target.names["bucket"]:
        raise GcsError("notFound", "The upload session does not exist.")
    if session.cancelled:
        raise GcsError("gone")
    return session


@dataclass(frozen=True)
class _Chunk:
    """The bytes start..end of an object (end excluded) of this length, which is None if it is not known yet."""

    start: int
    end: int
    total_bytes: int | None


def _invalid(message: str) -> GcsError:
    return GcsError("invalid", f"Invalid request. {message}")


def _total_of(session: Session, declared: str) -> int | None:
    if declared == "*":
        return session.total_bytes
    if session.total_bytes not in (None, int(declared)):
        raise _invalid(f"The total size is {declared}, earlier it was {session.total_bytes}.")
    return int(declared)


def _chunk_of(session: Session, content_range: str | None, size_bytes: int) -> _Chunk:
    """Returns where the body of a PUT belongs; without Content-Range it is the whole object."""
    found = _CONTENT_RANGE.fullmatch(content_range if content_range is not None else f"bytes 0-*/{size_bytes}")
    if found is None or found[1] is None:
        raise _invalid(f"Failed to parse Content-Range header {content_range!r}.")
    start, total_bytes = int(found[1]), _total_of(session, found[3])
    end = start + size_bytes
    if found[2] == "*" and total_bytes is None:
        # The object ends where the request does.
        total_bytes = end
    if found[2] != "*" and int(found[2]) + 1 != end:
        raise _invalid(f"Content-Range is {content_range!r}, the request has {size_bytes} bytes.")
    return _Chunk(start, end, total_bytes)


def _check_chunk(session: Session, chunk: _Chunk) -> None:
    persisted_bytes = len(session.persisted)
    if chunk.start > persisted_bytes:
        message = f"According to the Content-Range header, the upload offset is {chunk.start} byte(s), which exceeds "
        message += f"already uploaded size of {persisted_bytes} byte(s)."
        raise GcsError("backendError", f"Invalid request. {message}")
    if chunk.start < persisted_bytes:
        raise _invalid(f"The upload offset is {chunk.start}, {persisted_bytes} byte(s) are persisted.")
    if chunk.total_bytes is not None and chunk.end > chunk.total_bytes:
        raise _invalid(f"The chunk ends at {chunk.end}, the object at {chunk.total_bytes}.")
    size_bytes = chunk.end - chunk.start
    if chunk.end != chunk.total_bytes and (size_bytes == 0 or size_bytes % CHUNK_MULTIPLE_BYTES):
        raise _invalid(f"The chunk has {size_bytes} bytes; all but the last must be multiples of 256 KiB.")


def resumable_chunk(request: Request) -> Response:
    session = session_of(request)
    if session.finished is not None:
        return object_response(request, request.bucket, session.finished)
    chunk = _chunk_of(session, request.headers.get("content-range"), len(request.body))
    _check_chunk(session, chunk)
    session.total_bytes = chunk.total_bytes
    session.persisted += request.body[: request.persist_bytes]
    return _progress(request, session)


def resumable_status(request: Request) -> Response:
    """Returns how much is persisted; a status query with the total size finishes an upload of that size."""
    session = session_of(request)
    if session.finished is not None:
        return object_response(request, request.bucket, session.finished)
    found = _CONTENT_RANGE.fullmatch(request.headers.get("content-range") or "")
    if found is None or request.body:
        raise _invalid("A status query has Content-Range: bytes */* or bytes */total, and no body.")
    total_bytes = _total_of(session, found[3])
    if total_bytes is not None and total_bytes < len(session.persisted):
        raise _invalid(f"The total size is {total_bytes}, {len(session.persisted)} byte(s) are persisted.")
    session.total_bytes = total_bytes
    return _progress(request, session)


def _progress(request: Request, session: Session) -> Response:
    """Finishes an upload that has all its bytes; otherwise returns how many are persisted."""
    size_bytes = len(session.persisted)
    if size_bytes == session.total_bytes:
        return _finish(request, session)
    headers = [("Range", f"bytes=0-{size_bytes - 1}")] if size_bytes else []
    return Response(308, headers)


def _finish(request: Request, session: Session) -> Response:
    bucket, content = request.bucket, bytes(session.persisted)
    # A session that fails at its end cannot be continued.
    del request.project.sessions[session.upload_id]
    crc32c, md5 = crc32c_of(content), md5_of(content)
    check_declared(session.resource, crc32c, md5)
    check_declared(hashes_of(request.headers.get("x-goog-hash")), crc32c, md5)
    attributes = new_attributes(session.query, session.resource, None)
    key = kms_key_of(session.query, session.resource)
    session.finished = store(request, bucket, session.name, content, attributes, query=session.query, kms_key=key)
    session.persisted = bytearray()
    request.project.sessions[session.upload_id] = session
    return object_response(request, bucket, session.finished)


def cancel_resumable(request: Request) -> Response:
    session = session_of(request)
    if session.finished is not None:
        raise GcsError("notFound", "The upload session is finished.")
    session.cancelled = True
    session.persisted = bytearray()
    return Response(499)
