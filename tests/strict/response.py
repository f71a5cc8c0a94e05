"""The response of an operation, of either protocol. `sending` sends it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Response:
    """A response; `sending` adds Content-Length or another framing, `connection` the headers of every response."""

    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes | memoryview = b""
    # HEAD announces the length of a body that is not sent.
    promised_length_bytes: int | None = None
    # Sent in chunks, since the length is not known before the body's end.
    chunked: bool = False
