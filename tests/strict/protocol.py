"""What differs between S3 and GCS: admitting, performing and refusing requests. `connection` has what they share.

`s3` and `gcs.protocol` implement it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from .control_fields import Handlers
from .errors import RequestError
from .faults import Action
from .response import Response
from .state import RequestRecord, State
from .wire import Headers, RequestHead


class Admitted(ABC):
    """A request whose head is verified and authorised."""

    # Whether only the body has the key, as where GCS takes an object's name from the JSON of an upload.
    key_is_in_body = False

    def key_in(self, body: bytes) -> str | None:
        """Returns the key that the body has, or None if the body is malformed."""
        del body
        return None

    @abstractmethod
    def receive(self, body: bytes) -> None:
        """Verifies the request's body; raises RequestError if it is invalid."""

    @abstractmethod
    def perform(self, action: Action) -> Response:
        """Performs the operation, with those faults of the action that change it; raises RequestError."""


class Protocol(ABC):
    """One protocol; `connection` calls the methods of a request in their order here."""

    # The control requests that only servers of this protocol have.
    control: Handlers

    @abstractmethod
    def accepts_chunks(self, headers: Headers) -> bool:
        """Returns whether a request with these headers may have Transfer-Encoding: chunked."""

    @abstractmethod
    def request_id(self, number: int) -> str:
        """Returns the id of a request that has this number."""

    @abstractmethod
    def admit(self, state: State, head: RequestHead, record: RequestRecord) -> Admitted:
        """Verifies and authorises a request; sets operation, bucket and key of its record as far as they are known.

        Errors: RequestError if the request is refused.
        """

    @abstractmethod
    def scripted_error(self, status: int, code: str | None, headers: list[tuple[str, str]]) -> RequestError:
        """Returns the error of a fault rule; without a code, the usual one of this status."""

    @abstractmethod
    def error_response(self, error: RequestError, record: RequestRecord, *, has_body: bool) -> Response:
        """Returns an error as a response."""

    @abstractmethod
    def common_headers(self, state: State, record: RequestRecord) -> list[tuple[str, str]]:
        """Returns the headers that every response to this request has, including errors."""
