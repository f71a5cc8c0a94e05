"""The control API: JSON over HTTP on its own port, unsigned. `control` is its typed client.

The separate port keeps control requests out of the protocol's connections, request log and faults, and out of TLS.
Requests about buckets and credentials differ: `control_s3` and `gcs.control_gcs` handle them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace

from .control_fields import ControlError, Handler, Handlers, fields_of
from .errors import RequestError
from .faults import MalformedRule
from .state import State
from .wire import RequestHead, read_body, read_head


def _post_faults(state: State, given: object) -> object:
    state.script.replace(given)
    return {"rules": len(state.script.rules)}


def _get_faults(state: State, given: object) -> object:
    del given
    return [rule.report() for rule in state.script.rules]


def _delete_faults(state: State, given: object) -> object:
    del given
    state.script.clear()
    return {}


def _post_clock(state: State, given: object) -> object:
    offset_s = fields_of(given, offset_s=(int, float)).get("offset_s")
    if not isinstance(offset_s, (int, float)):
        raise ControlError("offset_s is missing")
    state.clock.offset_s = float(offset_s)
    return {"now_s": state.clock.now_s()}


def _get_limits(state: State, given: object) -> object:
    del given
    return asdict(state.limits)


def _put_limits(state: State, given: object) -> object:
    limits: dict[str, int] = {}
    for name, value in fields_of(given, **dict.fromkeys(asdict(state.limits), (int,))).items():
        if not isinstance(value, int) or not 1 <= value <= 5 * 1024**3:
            raise ControlError(f"{name}={value!r}: must be 1..5 GiB")
        limits[name] = value
    state.limits = replace(state.limits, **limits)
    return asdict(state.limits)


def _get_requests(state: State, given: object) -> object:
    del given
    return [record.report() for record in state.requests]


def _delete_requests(state: State, given: object) -> object:
    del given
    # A new list: requests in progress still write to the old records.
    state.requests = []
    return {}


def _get_connections(state: State, given: object) -> object:
    del given
    return state.traffic.report()


def _post_close_idle(state: State, given: object) -> object:
    del given
    return {"closed": state.traffic.close_idle()}


def _post_reset(state: State, given: object) -> object:
    del given
    state.reset()
    return {}


_HANDLERS: Mapping[tuple[str, str], Handler] = {
    ("POST", "faults"): _post_faults,
    ("GET", "faults"): _get_faults,
    ("DELETE", "faults"): _delete_faults,
    ("POST", "clock"): _post_clock,
    ("GET", "limits"): _get_limits,
    ("PUT", "limits"): _put_limits,
    ("GET", "requests"): _get_requests,
    ("DELETE", "requests"): _delete_requests,
    ("GET", "connections"): _get_connections,
    ("POST", "close_idle"): _post_close_idle,
    ("POST", "reset"): _post_reset,
}


def _answer(handlers: Handlers, state: State, head: RequestHead, body: bytes) -> tuple[int, object]:
    name = (head.method, head.target.removeprefix("/_control/"))
    handler = _HANDLERS.get(name) or handlers.get(name)
    if handler is None:
        return 404, {"error": f"{head.method} {head.target}: no such control request"}
    try:
        return 200, handler(state, json.loads(body) if body else {})
    except (ControlError, MalformedRule, json.JSONDecodeError) as error:
        return 400, {"error": str(error)}


def _wire_form(status: int, answer: object) -> bytes:
    body = json.dumps(answer).encode()
    head = f"HTTP/1.1 {status} Control\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def serve_control(
    handlers: Handlers, state: State, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Serves one control connection until the client closes it; `handlers` are those of the server's protocol."""
    try:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while (head := await read_head(reader)) is not None:
                body = await read_body(reader, head)
                writer.write(_wire_form(*_answer(handlers, state, head, body)))
                await writer.drain()
                if head.wants_close:
                    return
    except RequestError as error:
        writer.write(_wire_form(error.status, {"error": error.message}))
    finally:
        writer.close()
