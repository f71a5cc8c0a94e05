"""A typed client of the control API, for tests. What S3 itself can show is checked with an S3 client."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict
from urllib.parse import urlsplit

_TIMEOUT_S = 10.0


class FaultAction(TypedDict, total=False):
    """The effect of a fault on a request; see `faults.Action`, which has these fields."""

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
    persist_bytes: int
    lose_response: bool
    informational: int
    delay_first_byte_s: float
    wrong_content_range: bool
    wrong_etag: bool
    wrong_generation: bool
    wrong_checksum: bool
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
    """Selects the requests that have the fault: all requests if only `action` is given."""

    operation: str | None
    key: str | None
    skip: int
    times: int | None
    probability: float
    seed: int
    action: FaultAction


class BucketLocation(TypedDict):
    """The region and endpoint of a bucket that another server holds."""

    region: str
    endpoint: str


class BucketFlags(TypedDict, total=False):
    """The flags of a bucket that a test may set; omitted flags stay unchanged."""

    public: bool
    requester_pays: bool
    # S3 only.
    region: str
    requires_sse_kms: bool
    ignores_conditions: bool
    refuses_if_match: bool
    no_bulk_delete: bool
    needs_content_md5: bool
    lists_uploads_of_keys: bool
    elsewhere: BucketLocation | None
    # GCS only.
    versioning: bool
    soft_delete: bool
    storage_class: str
    retention_s: float | None
    default_event_based_hold: bool
    denied: list[str]
    kms: str | None


@dataclass(frozen=True)
class LoggedRequest:
    """One request of the log; `status` is None if no response was started, `fault` is the index of its rule."""

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
    """The server refused a control request; the message has the reason."""


class Control:
    """A client of one server's control API, at the URL in its `control`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = parts.hostname or "", parts.port, parts.path

    def _call(self, method: str, name: str, body: object = None) -> Any:
        # A connection per call: tests may call from several threads and forks.
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
        """Replaces the rules; the first matching rule determines a request's fault."""
        self._call("POST", "faults", list(rules))

    def fault_report(self) -> list[dict[str, Any]]:
        """Returns the current rules, each with how many requests it `matched` and for how many it `fired`."""
        report: list[dict[str, Any]] = self._call("GET", "faults")
        return report

    def clear_faults(self) -> None:
        self._call("DELETE", "faults")

    def clock(self, offset_s: float) -> float:
        """Sets the clock's offset from the true time; returns its time in seconds since the Unix epoch."""
        return float(self._call("POST", "clock", {"offset_s": offset_s})["now_s"])

    def account(
        self, access_key: str, secret_key: str, *, token: str | None = None, expires_in_s: float | None = None
    ) -> None:
        """Adds or replaces an account of S3; with a token it is temporary, and may expire by the server's clock."""
        account = {"access_key": access_key, "secret_key": secret_key, "token": token, "expires_in_s": expires_in_s}
        self._call("POST", "accounts", account)

    def clear_accounts(self) -> None:
        """Removes all accounts of S3 but the initial permanent one."""
        self._call("DELETE", "accounts")

    def token(self, token: str, *, expires_in_s: float | None = None) -> None:
        """Adds a bearer token of GCS, or replaces its expiry, which is by the server's clock."""
        self._call("POST", "tokens", {"token": token, "expires_in_s": expires_in_s})

    def revoke_token(self, token: str) -> None:
        self._call("DELETE", "tokens", {"token": token})

    def clear_tokens(self) -> None:
        """Revokes all bearer tokens of GCS but the initial one."""
        self._call("DELETE", "tokens")

    def bucket(self, name: str, flags: BucketFlags | None = None) -> dict[str, Any]:
        """Creates the bucket if needed and sets these flags; returns all flags and the bucket's counts."""
        report: dict[str, Any] = self._call("POST", "buckets", {"name": name, **(flags or {})})
        return report

    def buckets(self) -> list[dict[str, Any]]:
        report: list[dict[str, Any]] = self._call("GET", "buckets")
        return report

    def limits(
        self,
        *,
        min_part_bytes: int | None = None,
        max_keys: int | None = None,
        rewrite_bytes: int | None = None,
        token_lifetime_s: int | None = None,
    ) -> dict[str, int]:
        """Sets the given limits; returns all."""
        given = {
            "min_part_bytes": min_part_bytes,
            "max_keys": max_keys,
            "rewrite_bytes": rewrite_bytes,
            "token_lifetime_s": token_lifetime_s,
        }
        changed = {name: value for name, value in given.items() if value is not None}
        limits: dict[str, int] = self._call("PUT", "limits", changed) if changed else self._call("GET", "limits")
        return limits

    def requests(self, operation: str | None = None) -> Sequence[LoggedRequest]:
        """Returns the requests since the log was last cleared, oldest first; optionally of one operation."""
        names = [spec.name for spec in fields(LoggedRequest)]
        logged = [LoggedRequest(**{name: entry[name] for name in names}) for entry in self._call("GET", "requests")]
        return [entry for entry in logged if operation in (None, entry.operation)]

    def clear_requests(self) -> None:
        self._call("DELETE", "requests")

    def connections(self) -> Traffic:
        return Traffic(**self._call("GET", "connections"))

    def close_idle(self) -> int:
        """Closes all connections without a request in progress; returns their number."""
        return int(self._call("POST", "close_idle")["closed"])

    def reset(self) -> None:
        """Resets the server: no buckets, faults or log, its initial account and limits, the true time."""
        self._call("POST", "reset")
