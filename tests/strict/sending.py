"""Sends responses, complete or with the faults of an Action. `faults` selects the faults, `damage` changes content.

Every fault here affects bytes and timing: the operation was performed, and its response is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus

from .damage import damaged
from .faults import Action
from .peer import Peer
from .response import Response
from .state import RequestRecord

# Small enough to send the first bytes of a large body early, large enough for few calls.
_BLOCK_BYTES = 256 * 1024
# A chunked response has at least this many chunks, if it has as many bytes.
_CHUNKS = 5
# A slow-drip body is sent in this many pieces per second.
_DRIPS_PER_S = 20
_GARBAGE = b"\x16\x03\x01 this is not HTTP\r\n\r\n"
_INFORMATIONAL = {100: "", 102: "", 103: "Link: </early>; rel=preload\r\n"}


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


def informational(status: int) -> bytes:
    """Returns a complete 1xx response, which precedes the final one."""
    return f"HTTP/1.1 {status} {_reason(status)}\r\n{_INFORMATIONAL[status]}\r\n".encode()


@dataclass(frozen=True)
class _Block:
    """A block of a body: its bytes, their framing, and the pause before them."""

    content: memoryview
    before: bytes
    after: bytes
    pause_s: float


def _blocks(body: memoryview, action: Action, sent_bytes: int) -> Iterator[_Block]:
    """Splits the first `sent_bytes` of a body at the positions that a fault needs."""
    size = _BLOCK_BYTES
    if action.chunked:
        size = min(size, max(1, len(body) // _CHUNKS))
    if action.slow_drip:
        size = max(1, int(action.slow_drip / _DRIPS_PER_S))
    stall_at = action.stall_body_at
    position = 0
    while position < sent_bytes:
        whole_end = min(position + size, len(body))
        if stall_at is not None and position < stall_at:
            whole_end = min(whole_end, stall_at)
        content = body[position : min(whole_end, sent_bytes)]
        pause_s = len(content) / action.slow_drip if action.slow_drip and position else 0.0
        if position == stall_at:
            pause_s += action.stall_s
        # A chunk that is cut announces its full length, as from a server that dies in mid-chunk.
        before = b"%x\r\n" % (whole_end - position) if action.chunked else b""
        after = b"\r\n" if action.chunked and position + len(content) == whole_end else b""
        yield _Block(content, before, after, pause_s)
        position += len(content)


def _bytes_to_send(action: Action, size_bytes: int) -> int:
    if action.cut_body is None:
        return size_bytes
    if isinstance(action.cut_body, float):
        return int(size_bytes * action.cut_body)
    return min(action.cut_body, size_bytes)


def _head_of(response: Response, action: Action, framing: list[tuple[str, str]]) -> bytes:
    if action.garbage_head:
        return _GARBAGE
    lines = [f"HTTP/{'1.0' if action.http_1_0 else '1.1'} {response.status} {_reason(response.status)}"]
    lines += [f"{name}: {value}" for name, value in [*response.headers, *framing]]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")[: action.cut_head]


def _framing_of(response: Response, action: Action, *, has_body: bool, keep_open: bool) -> list[tuple[str, str]]:
    framing = []
    if has_body and action.chunked:
        framing.append(("Transfer-Encoding", "chunked"))
    elif has_body and not (action.no_length or action.http_1_0):
        framing.append(("Content-Length", str(len(response.body))))
    elif response.promised_length_bytes is not None:
        framing.append(("Content-Length", str(response.promised_length_bytes)))
    if not keep_open or action.no_length:
        framing.append(("Connection", "close"))
    return framing


async def send(
    peer: Peer, response: Response, action: Action, record: RequestRecord, *, has_body: bool, keep_open: bool
) -> bool:
    """Sends a response with the faults of an action.

    has_body: whether one may follow the head, that is not after HEAD, 204 or 304.
    keep_open: whether the connection would stay open if there were no fault.
    Returns: whether it stays open; a connection that was reset is gone already.
    Errors: ConnectionError where the client goes before the end.
    """
    if action.informational is not None:
        peer.write(informational(action.informational))
    await peer.pause(action.delay_first_byte_s)
    if action.white_space_s or (response.chunked and not action.http_1_0 and not action.no_length):
        action = replace(action, chunked=True)
    response = damaged(response, action)
    record.status = response.status
    peer.write(_head_of(response, action, _framing_of(response, action, has_body=has_body, keep_open=keep_open)))
    headless = action.garbage_head or action.cut_head is not None
    if has_body and not headless:
        await _send_body(peer, memoryview(response.body), action, record)
    await peer.drain()
    if action.reset:
        await peer.reset()
    cut = headless or (has_body and action.cut_body is not None)
    ended_by_fin = action.no_length or action.http_1_0 or action.close_after
    return keep_open and not (cut or action.reset or ended_by_fin)


async def _send_body(peer: Peer, body: memoryview, action: Action, record: RequestRecord) -> None:
    if action.white_space_s:
        body = await _send_white_space(peer, body, action.white_space_s)
    sent_bytes = _bytes_to_send(action, len(body))
    for block in _blocks(body, action, sent_bytes):
        await peer.pause(block.pause_s)
        # Counted before the write: a client that has the last byte sees it counted.
        record.bytes_sent += len(block.content)
        peer.write(block.before, block.content, block.after)
        await peer.drain()
    if sent_bytes == len(body) == action.stall_body_at:
        await peer.pause(action.stall_s)
    if action.cut_body is None:
        peer.write(b"0\r\n\r\n" if action.chunked else b"", b"\xee" * action.longer_body)


async def _send_white_space(peer: Peer, body: memoryview, duration_s: float) -> memoryview:
    """Sends the XML declaration and white space after it, in chunks; returns the rest of the body."""
    declaration = bytes(body[: bytes(body).find(b"?>") + 2]) if bytes(body[:5]) == b"<?xml" else b" "
    peer.write(b"%x\r\n" % len(declaration), declaration, b"\r\n")
    for _ in range(int(duration_s * _DRIPS_PER_S)):
        await peer.pause(1 / _DRIPS_PER_S)
        peer.write(b"1\r\n \r\n")
    return body[len(declaration) :] if declaration != b" " else body
