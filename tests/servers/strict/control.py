"""A typed client of the control API, for tests. Leaves everything that tests check by S3 itself to their S3 client."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict
from urllib.parse import urlsplit

_TIMEOUT_S = 10.0


class FaultAction(TypedDict, total=False):
    """What happens to a chosen request; see `faults.Action`, whose fields these are."""

    early_response: int
    reset: bool | Literal["before_head", "after_request"]
    no_answer: bool
    status: int
    code: str
    headers: dict[str, str]
    body: str
    error_in_200: str
    redirect_to: str
    ignore_range: bool
    lose_response: bool
    informational: int
    delay_first_byte_s: float
    wrong_content_range: bool
    wrong_etag: bool
    chunked: bool
    no_length: bool
    http_1_0: bool
    garbage_head: bool
    cut_head: int
    replace_body: str
    gzip: bool
    white_space_s: float
    corrupt_byte_at: int
    shorter_length: int
    cut_body: int | float
    longer_body: int
    stall_body_at: int
    stall_s: float
    slow_drip: float
    close_after: bool


class FaultRule(TypedDict, total=False):
    """Which requests meet the action: all that match where only `action` is given."""

    operation: str | None
    key: str | None
    skip: int
    times: int | None
    probability: float
    seed: int
    action: FaultAction


class Place(TypedDict):
    """Where a bucket is to be found that lives elsewhere."""

    region: str
    endpoint: str


class BucketFlags(TypedDict, total=False):
    """The flags of a bucket that a test may set; those not given stay as they are."""

    region: str
    public: bool
    requester_pays: bool
    requires_sse_kms: bool
    elsewhere: Place | None


@dataclass(frozen=True)
class LoggedRequest:
    """One request of the log; `status` None says that no answer was begun, `fault` is the index of its rule."""

    connection: int
    method: str
    target: str
    headers: dict[str, str]
    received_s: float
    operation: str | None
    bucket: str | None
    key: str | None
    status: int | None
    code: str | None
    fault: int | None
    request_id: str
    bytes_received: int
    bytes_sent: int


@dataclass(frozen=True)
class Traffic:
    """Counts of connections and requests of the S3 port."""

    open: int
    idle: int
    total_accepted: int
    in_flight: int
    most_in_flight: int


class ControlRefused(Exception):
    """The server refused a control request; the message says why."""


class Control:
    """The control API of one server, at the URL that its `control` names."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = parts.hostname or "", parts.port, parts.path

    def _call(self, method: str, name: str, body: object = None) -> Any:
        # A connection per call: what a test holds on to must not depend on its threads or forks.
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            content = json.dumps(body).encode() if body is not None else b""
            connection.request(method, f"{self._path}/{name}", content)
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise ControlRefused(f"{method} {name}: {answer['error']}")
        return answer

    def faults(self, *rules: FaultRule) -> None:
        """Replaces the script; the first rule that chooses a request decides its fault."""
        self._call("POST", "faults", list(rules))

    def fault_report(self) -> list[dict[str, Any]]:
        """Returns the rules in force, each with how many requests it `matched` and for how many it `fired`."""
        report: list[dict[str, Any]] = self._call("GET", "faults")
        return report

    def clear_faults(self) -> None:
        self._call("DELETE", "faults")

    def clock(self, offset_s: float) -> float:
        """Shifts the server's clock from the true time; returns its time now, in seconds since the Unix epoch."""
        return float(self._call("POST", "clock", {"offset_s": offset_s})["now_s"])

    def account(
        self, access_key: str, secret_key: str, *, token: str | None = None, expires_in_s: float | None = None
    ) -> None:
        """Adds an account or replaces it; with a token it is temporary, and may expire by the server's clock."""
        account = {"access_key": access_key, "secret_key": secret_key, "token": token, "expires_in_s": expires_in_s}
        self._call("POST", "accounts", account)

    def forget_accounts(self) -> None:
        """Leaves only the long-lived account that the server began with."""
        self._call("DELETE", "accounts")

    def bucket(self, name: str, flags: BucketFlags | None = None) -> dict[str, Any]:
        """Creates the bucket if needed and sets these flags; returns all of them, with its counts."""
        report: dict[str, Any] = self._call("POST", "buckets", {"name": name, **(flags or {})})
        return report

    def buckets(self) -> list[dict[str, Any]]:
        report: list[dict[str, Any]] = self._call("GET", "buckets")
        return report

    def limits(self, *, min_part_bytes: int | None = None, max_keys: int | None = None) -> dict[str, int]:
        """Sets the limits that are given; returns all."""
        given = {"min_part_bytes": min_part_bytes, "max_keys": max_keys}
        changed = {name: value for name, value in given.items() if value is not None}
        limits: dict[str, int] = self._call("PUT", "limits", changed) if changed else self._call("GET", "limits")
        return limits

    def requests(self, operation: str | None = None) -> Sequence[LoggedRequest]:
        """Returns the requests since the log was last forgotten, oldest first; of one operation where one is named."""
        names = [spec.name for spec in fields(LoggedRequest)]
        logged = [LoggedRequest(**{name: entry[name] for name in names}) for entry in self._call("GET", "requests")]
        return [entry for entry in logged if operation in (None, entry.operation)]

    def forget_requests(self) -> None:
        self._call("DELETE", "requests")

    def connections(self) -> Traffic:
        return Traffic(**self._call("GET", "connections"))

    def close_idle(self) -> int:
        """Closes all connections that no request is under way on; returns how many."""
        return int(self._call("POST", "close_idle")["closed"])

    def reset(self) -> None:
        """Makes the server new: no buckets, faults or log, its own account and limits, the true time."""
        self._call("POST", "reset")
