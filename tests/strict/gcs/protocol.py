"""The JSON API of GCS: bearer tokens, JSON documents. `..connection` does what it shares with S3."""

from __future__ import annotations

from dataclasses import replace

from ..errors import RequestError
from ..faults import Action
from ..protocol import Admitted, Protocol
from ..response import Response
from ..state import RequestRecord, State
from ..wire import Headers, RequestHead
from .access import check_access
from .control_gcs import HANDLERS
from .errors import GcsError, error_document, usual_reason
from .metadata_server import check_flavor
from .names import check_object_name
from .operations import PERFORM
from .related import named_resource
from .request import Request
from .routing import METADATA_OPERATIONS, Target, parse_target

_NAMED_IN_BODY = ("InsertObject", "StartResumable")
_BODY_METHODS = ("POST", "PUT", "PATCH")


class AdmittedGcs(Admitted):
    """An authorised request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.key_is_in_body = request.operation in _NAMED_IN_BODY and "name" not in request.query

    def key_in(self, body: bytes) -> str | None:
        try:
            name = named_resource(self._request.headers, body).get("name")
        except GcsError:
            return None
        return name if isinstance(name, str) else None

    def receive(self, body: bytes) -> None:
        self._request = replace(self._request, body=body)

    def perform(self, action: Action) -> Response:
        request = replace(self._request, persist_bytes=action.persist_bytes)
        if action.ignore_range:
            request = replace(request, headers=request.headers.without("range"))
        return PERFORM[request.operation](request)


class Gcs(Protocol):
    """The JSON API as `routing` and `access` verify it."""

    control = HANDLERS

    def accepts_chunks(self, headers: Headers) -> bool:
        # Clients send uploads of unknown length in chunks.
        return True

    def request_id(self, number: int) -> str:
        return f"ABStrict-{number:010d}_{'x' * 60}"

    def admit(self, state: State, head: RequestHead, record: RequestRecord) -> Admitted:
        if any(name.startswith("x-goog-encryption-") for name, _ in head.headers):
            raise GcsError("notImplemented", "Customer-supplied encryption keys are not implemented.")
        target = parse_target(head.method, head.target, head.headers)
        record.operation, record.bucket = target.operation, target.names.get("bucket")
        record.key = _key_of(state, target)
        if head.method in _BODY_METHODS and not head.has_framing:
            raise GcsError("required", "POST requests require a Content-Length header.", status=411, closes=True)
        request = Request(state, target, head.headers)
        if target.operation in METADATA_OPERATIONS:
            check_flavor(request)
        check_access(request)
        if record.key is not None:
            check_object_name(record.key)
        for name in target.query:
            if name.endswith("Match"):
                request.number(name)
        return AdmittedGcs(request)

    def scripted_error(self, status: int, code: str | None, headers: list[tuple[str, str]]) -> RequestError:
        return GcsError(code or usual_reason(status), status=status, headers=headers)

    def error_response(self, error: RequestError, record: RequestRecord, *, has_body: bool) -> Response:
        described = [("Content-Type", "application/json; charset=UTF-8")] if has_body else []
        return Response(error.status, [*described, *error.headers], error_document(error) if has_body else b"")

    def common_headers(self, state: State, record: RequestRecord) -> list[tuple[str, str]]:
        if record.operation in METADATA_OPERATIONS:
            return [("Server", "Metadata Server for VM"), ("Metadata-Flavor", "Google")]
        return [("x-guploader-uploadid", record.request_id), ("Server", "UploadServer")]


def _key_of(state: State, target: Target) -> str | None:
    """Returns the object that a request writes or reads, as far as its head tells."""
    upload_id = target.query.get("upload_id")
    if upload_id is not None:
        session = state.gcs.sessions.get(upload_id)
        return session.name if session is not None else None
    return target.names.get("object2") or target.names.get("object") or target.query.get("name")
