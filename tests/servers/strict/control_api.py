"""The control API: JSON over HTTP on its own port, unsigned. `control` is its typed client.

The separate port keeps control requests out of S3's connections, request log and faults, and out of TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping

from .accounts import Account
from .errors import S3Error
from .faults import MalformedRule
from .state import Limits, State
from .store import Bucket, Elsewhere
from .target import is_bucket_name
from .wire import RequestHead, read_body, read_head


class ControlError(ValueError):
    """An invalid control request."""


def _fields(given: object, **types: tuple[type, ...]) -> dict[str, object]:
    """Returns a JSON object whose fields are all known and of the given types; raises ControlError otherwise."""
    if not isinstance(given, dict):
        raise ControlError("the body must be a JSON object")
    for name, value in given.items():
        if name not in types or not isinstance(value, types[name]):
            raise ControlError(f"{name}={value!r}: must be one of {sorted(types)}, and of its type")
    return given


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
    offset_s = _fields(given, offset_s=(int, float)).get("offset_s")
    if not isinstance(offset_s, (int, float)):
        raise ControlError("offset_s is missing")
    state.clock.offset_s = float(offset_s)
    return {"now_s": state.clock.now_s()}


def _post_accounts(state: State, given: object) -> object:
    none = type(None)
    account = _fields(given, access_key=(str,), secret_key=(str,), token=(str, none), expires_in_s=(int, float, none))
    access_key, secret_key, token = account.get("access_key"), account.get("secret_key"), account.get("token")
    expires_in_s = account.get("expires_in_s")
    if not isinstance(access_key, str) or not isinstance(secret_key, str):
        raise ControlError("access_key and secret_key are needed")
    expires_s = state.clock.now_s() + expires_in_s if isinstance(expires_in_s, (int, float)) else None
    state.accounts.add(Account(access_key, secret_key, token if isinstance(token, str) else None, expires_s))
    return {"expires_s": expires_s}


def _delete_accounts(state: State, given: object) -> object:
    del given
    state.accounts.reset()
    return {}


def _post_buckets(state: State, given: object) -> object:
    flags = _fields(
        given,
        name=(str,),
        region=(str,),
        public=(bool,),
        requester_pays=(bool,),
        requires_sse_kms=(bool,),
        elsewhere=(dict, type(None)),
    )
    name = flags.pop("name", None)
    if not isinstance(name, str) or not is_bucket_name(name):
        raise ControlError(f"name={name!r}: must be a bucket's name")
    if isinstance(flags.get("elsewhere"), dict):
        location = _fields(flags["elsewhere"], region=(str,), endpoint=(str,))
        if len(location) != 2:
            raise ControlError("elsewhere needs region and endpoint")
        flags["elsewhere"] = Elsewhere(str(location["region"]), str(location["endpoint"]))
    bucket = state.buckets.setdefault(name, Bucket(name, state.clock.now_s()))
    for flag, value in flags.items():
        setattr(bucket, flag, value)
    return _report_bucket(bucket)


def _report_bucket(bucket: Bucket) -> dict[str, object]:
    elsewhere = bucket.elsewhere
    return {
        "name": bucket.name,
        "region": bucket.region,
        "public": bucket.public,
        "requester_pays": bucket.requester_pays,
        "requires_sse_kms": bucket.requires_sse_kms,
        "elsewhere": {"region": elsewhere.region, "endpoint": elsewhere.endpoint} if elsewhere else None,
        "objects": len(bucket.objects),
        "uploads": len(bucket.uploads),
    }


def _get_buckets(state: State, given: object) -> object:
    del given
    return [_report_bucket(bucket) for bucket in state.buckets_by_name()]


def _get_limits(state: State, given: object) -> object:
    del given
    return {"min_part_bytes": state.limits.min_part_bytes, "max_keys": state.limits.max_keys}


def _put_limits(state: State, given: object) -> object:
    limits = {"min_part_bytes": state.limits.min_part_bytes, "max_keys": state.limits.max_keys}
    for name, value in _fields(given, min_part_bytes=(int,), max_keys=(int,)).items():
        if not isinstance(value, int) or not 1 <= value <= 5 * 1024**3:
            raise ControlError(f"{name}={value!r}: must be 1..5 GiB")
        limits[name] = value
    state.limits = Limits(**limits)
    return limits


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


_HANDLERS: Mapping[tuple[str, str], Callable[[State, object], object]] = {
    ("POST", "/_control/faults"): _post_faults,
    ("GET", "/_control/faults"): _get_faults,
    ("DELETE", "/_control/faults"): _delete_faults,
    ("POST", "/_control/clock"): _post_clock,
    ("POST", "/_control/accounts"): _post_accounts,
    ("DELETE", "/_control/accounts"): _delete_accounts,
    ("POST", "/_control/buckets"): _post_buckets,
    ("GET", "/_control/buckets"): _get_buckets,
    ("GET", "/_control/limits"): _get_limits,
    ("PUT", "/_control/limits"): _put_limits,
    ("GET", "/_control/requests"): _get_requests,
    ("DELETE", "/_control/requests"): _delete_requests,
    ("GET", "/_control/connections"): _get_connections,
    ("POST", "/_control/close_idle"): _post_close_idle,
    ("POST", "/_control/reset"): _post_reset,
}


def _answer(state: State, head: RequestHead, body: bytes) -> tuple[int, object]:
    handler = _HANDLERS.get((head.method, head.target))
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


async def serve_control(state: State, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves one control connection until the client closes it."""
    try:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while (head := await read_head(reader)) is not None:
                body = await read_body(reader, head)
                writer.write(_wire_form(*_answer(state, head, body)))
                await writer.drain()
                if head.wants_close:
                    return
    except S3Error as error:
        writer.write(_wire_form(error.status, {"error": error.message}))
    finally:
        writer.close()
