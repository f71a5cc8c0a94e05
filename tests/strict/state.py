"""The server's state: buckets, accounts, clock, limits, faults, requests, connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from .accounts import Accounts
from .faults import Script
from .gcs.store import Project
from .store import Bucket


@dataclass
class Limits:
    """Limits that tests may lower.

    min_part_bytes, max_keys: 5 MiB and 1000 are S3's own (user guide, "Multipart upload limits"; ListObjectsV2), and
    1000 is also the largest page of GCS.
    rewrite_bytes: how much one RewriteObject of GCS copies.
    token_lifetime_s: that of tokens of the metadata server.
    """

    min_part_bytes: int = 5 * 1024**2
    max_keys: int = 1000
    rewrite_bytes: int = 1024**3
    token_lifetime_s: int = 3600


class Clock:
    """The server's clock, with a scripted offset."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def now_s(self) -> float:
        """Returns seconds since the Unix epoch."""
        return time.time() + self.offset_s


@dataclass
class RequestRecord:
    """One line of the request log; `status` is None if no response was started."""

    connection: int
    method: str
    target: str
    headers: dict[str, str]
    received_s: float
    operation: str | None = None
    bucket: str | None = None
    key: str | None = None
    status: int | None = None
    code: str | None = None
    fault: int | None = None
    request_id: str = ""
    bytes_received: int = 0
    bytes_sent: int = 0

    def report(self) -> dict[str, object]:
        return asdict(self)


@dataclass
class ConnectionRecord:
    """An open connection; `close` ends it gracefully, `drop` aborts it with any request in progress."""

    number: int
    close: Callable[[], None]
    drop: Callable[[], None]
    idle: bool = True


@dataclass
class Traffic:
    """Counts connections and requests; a request is in flight from the end of its head to the end of its response."""

    open: dict[int, ConnectionRecord] = field(default_factory=dict)
    total_accepted: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    _last_number: int = 0

    def accepted(self, close: Callable[[], None], drop: Callable[[], None]) -> ConnectionRecord:
        self.total_accepted += 1
        # A separate counter: total_accepted restarts when the state is reset.
        self._last_number += 1
        record = ConnectionRecord(self._last_number, close, drop)
        self.open[record.number] = record
        return record

    def close_idle(self) -> int:
        """Closes every connection without a request in progress; returns their number."""
        idle = [record for record in self.open.values() if record.idle]
        for record in idle:
            record.close()
        return len(idle)

    def began(self) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def drop_busy(self) -> None:
        """Aborts every connection with a request in progress."""
        for record in [record for record in self.open.values() if not record.idle]:
            record.drop()

    def report(self) -> dict[str, int]:
        return {
            "open": len(self.open),
            "idle": sum(record.idle for record in self.open.values()),
            "total_accepted": self.total_accepted,
            "in_flight": self.in_flight,
            "most_in_flight": self.most_in_flight,
        }


class State:
    """The state of one server; `reset` clears it but keeps idle connections open."""

    def __init__(self) -> None:
        # Scheme, host and port, once the server listens.
        self.endpoint = ""
        self.started_s = time.monotonic()
        self.traffic = Traffic()
        self.accounts = Accounts()
        self.clock = Clock()
        self.limits = Limits()
        self.script = Script()
        self.requests: list[RequestRecord] = []
        # S3's buckets and those of GCS; a server has one protocol, so that one of them stays empty.
        self.buckets: dict[str, Bucket] = {}
        self.gcs = Project()
        self._last_number = 0

    def reset(self) -> None:
        self.accounts.reset()
        self.clock.offset_s = 0.0
        self.limits = Limits()
        self.script.clear()
        self.requests = []
        self.buckets = {}
        self.gcs = Project()
        self.traffic.drop_busy()
        self.traffic.total_accepted = len(self.traffic.open)
        self.traffic.most_in_flight = self.traffic.in_flight

    def buckets_by_name(self) -> Iterator[Bucket]:
        return (self.buckets[name] for name in sorted(self.buckets))

    def next_number(self) -> int:
        """Returns a number that this server has not used, for request and upload ids."""
        self._last_number += 1
        return self._last_number
