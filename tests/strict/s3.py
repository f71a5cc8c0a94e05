"""The S3 protocol: signed requests, XML documents. `operations` performs, `connection` does what it shares with GCS."""

from __future__ import annotations

import base64
from dataclasses import replace

from .access import check_access, headers_of_every_answer
from .control_s3 import HANDLERS
from .errors import RequestError, S3Error, error_document, usual_code
from .exchange import Request
from .faults import Action
from .operations import PERFORM
from .payload import open_payload
from .protocol import Admitted, Protocol
from .response import Response
from .routing import operation_of
from .signature import verify_head
from .state import RequestRecord, State
from .target import parse_target
from .wire import Headers, RequestHead, is_chunked

DEFAULT_BASE_DOMAIN = "s3.localhost"
# S3 accepts a copy without a length, since it has no body.
_NEED_LENGTH = ("PutObject", "UploadPart")


class AdmittedS3(Admitted):
    """A signed and authorised request."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def receive(self, body: bytes) -> None:
        request = self._request
        payload = open_payload(request.headers, request.identity, body)
        self._request = replace(request, body=payload.body, trailers=payload.trailers)

    def perform(self, action: Action) -> Response:
        request = self._request
        if action.ignore_range:
            request = replace(request, headers=request.headers.without("range"))
        return PERFORM[request.operation](request)


class S3(Protocol):
    """S3 as `target`, `routing`, `signature` and `access` verify it."""

    control = HANDLERS

    def __init__(self, base_domain: str) -> None:
        # A Host of `<bucket>.<base_domain>` addresses that bucket.
        self._base_domain = base_domain

    def accepts_chunks(self, headers: Headers) -> bool:
        # S3 takes chunks only where it is told the length of what they hold; SDKs send aws-chunked bodies so over TLS.
        streamed = (headers.get("x-amz-content-sha256") or "").startswith("STREAMING-")
        return streamed and headers.get("x-amz-decoded-content-length") is not None and is_chunked(headers)

    def request_id(self, number: int) -> str:
        return f"STRICT{number:010X}"

    def admit(self, state: State, head: RequestHead, record: RequestRecord) -> Admitted:
        target = parse_target(head.target, head.headers.get("host") or "", self._base_domain)
        record.bucket, record.key = target.bucket, target.key
        copies = head.headers.get("x-amz-copy-source") is not None
        record.operation = operation_of(head.method, target, copies=copies)
        if record.operation in _NEED_LENGTH and not head.has_framing:
            raise S3Error("MissingContentLength", closes=True)
        identity = verify_head(head, state.accounts, state.clock.now_s())
        request = Request(state, record.operation, target, dict(target.query), head.headers, identity)
        check_access(request)
        return AdmittedS3(request)

    def scripted_error(self, status: int, code: str | None, headers: list[tuple[str, str]]) -> RequestError:
        return S3Error(code or usual_code(status), status=status, headers=headers)

    def error_response(self, error: RequestError, record: RequestRecord, *, has_body: bool) -> Response:
        body = error_document(error, record.target, record.request_id, _host_id(record)) if has_body else b""
        described = [("Content-Type", "application/xml")] if error.status != 304 else []
        return Response(error.status, [*described, *error.headers], body)

    def common_headers(self, state: State, record: RequestRecord) -> list[tuple[str, str]]:
        headers = [("x-amz-id-2", _host_id(record)), ("x-amz-request-id", record.request_id), ("Server", "AmazonS3")]
        return headers + headers_of_every_answer(state, record)


def _host_id(record: RequestRecord) -> str:
    """Returns the second of the two ids that S3 assigns to each request."""
    return base64.b64encode(f"strict host id {record.request_id}".encode()).decode()
