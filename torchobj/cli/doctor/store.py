"""Checks of a store, one request of each kind, and the advice after one that failed."""

import time
from collections.abc import Callable, Iterator

from torchobj.cli.doctor import writes
from torchobj.cli.doctor.check import UNSIGNED, Check
from torchobj.cli.options import described, next_step
from torchobj.cli.output import command, counted, duration, escaped, human_size
from torchobj.exceptions import (
    AccessDeniedError,
    CredentialsError,
    RangeError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
    TorchobjError,
    UnsupportedError,
)
from torchobj.store import ObjectInfo, Store

#: Times after which the requests of a store are given up, which may be configured to take minutes.
_READ_LIMIT_S, _WRITE_LIMIT_S = 15.0, 5.0
_READ_BYTES = 1 << 20
#: Permissions of S3 and of Google Cloud Storage, by operation.
_PERMISSIONS = {
    "list": ("s3:ListBucket on the bucket and this prefix", "storage.objects.list on the bucket"),
    "get": ("s3:GetObject on the key, and kms:Decrypt if it is encrypted by KMS", "storage.objects.get"),
    "put": ("s3:PutObject on the key, and kms:GenerateDataKey if it is encrypted by KMS", "storage.objects.create"),
    "delete": ("s3:DeleteObject on the key", "storage.objects.delete"),
}


def checks(store: Store, prefix: str, source: Check | None, *, write: bool) -> Iterator[Check]:
    """Checks a store by LIST, GET, and PUT if `write`.

    Args:
        store: The store.
        prefix: Prefix of the keys.
        source: Where the credentials come from; None for a store without them.
        write: Whether to try PUT.
    """
    store, found = _within(store, _READ_LIMIT_S), list[ObjectInfo]()
    listed = _timed("LIST", source, lambda: _list(store, prefix, found))
    yield listed
    if found:
        yield _timed("GET", source, lambda: _get(store, found[0]))
    else:
        empty = listed.state != "failed"
        reason = "the prefix has no objects" if empty else "LIST failed"
        advice = f"if it should have some, {command('ls', f'{store.url}/')} shows the bucket's folders" if empty else ""
        yield Check("GET", "note", f"not tried: {reason}", advice)
    if write:
        # A response that is lost must not keep the command for minutes, nor the deletion after it.
        store = _within(store, _WRITE_LIMIT_S)
        written = _timed("PUT", source, lambda: writes.put(store, prefix))
        yield written
        if written.state == "ok":
            yield _conditions(store, prefix, source)
    else:
        yield Check("PUT", "note", "not tried; --write writes, reads and deletes small objects of its own")


def _within(store: Store, limit_s: float) -> Store:
    """The store with requests that end after a time, if they do not make progress."""
    names = ("first_byte_timeout_s", "idle_timeout_s", "retry_timeout_s")
    limits = {name: min(getattr(store.config, name), limit_s) for name in names}
    return Store(store.url, config=store.config.replaced(**limits))


def _timed(name: str, source: Check | None, check: Callable[[], str]) -> Check:
    started = time.perf_counter()
    try:
        found = check()
    except TorchobjError as error:
        return _failed(name, source, error)
    return Check(name, "ok", f"{found} in {duration(time.perf_counter() - started)}")


def _failed(name: str, source: Check | None, error: TorchobjError) -> Check:
    step = next_step(error)
    text = described(error).removesuffix("" if step is None else f"; {escaped(step)}")
    left = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    message, _, hint = text.rpartition("; ")
    if isinstance(error, CredentialsError) and error.status is None:
        if source is not None and source.state == "ok" and message:
            return Check(name, "failed", f"{message}{left}", f"no request was sent: {hint}")
        return Check(name, "failed", f"{text}{left}", "no request was sent: see the check of credentials")
    advice = _advice(error, source, hint if message else "")
    return Check(name, "failed", f"{message or hint}{left}", advice or step or "")


def _advice(error: TorchobjError, source: Check | None, hint: str) -> str:
    """The next step after a failed request: which other check has the cause, or what to grant.

    Args:
        error: The error.
        source: Where the credentials come from.
        hint: The last part of its message.
    """
    if isinstance(error, (StoreConnectionError, StoreTimeoutError)):
        return "see the checks of endpoint, DNS and connection"
    if source is None or not isinstance(error, StoreError):
        return hint
    if source.found.startswith(UNSIGNED) and isinstance(error, AccessDeniedError):
        return f"the bucket is not public, and {source.found}"
    if isinstance(error, CredentialsError):
        return f"the store rejects the credentials ({source.found}): {hint or 'renew them where they come from'}"
    if isinstance(error, AccessDeniedError):
        granted = _PERMISSIONS.get(error.operation or "")
        if granted is not None:
            permission = granted[(error.url or "").startswith("gs://")]
            return f"the store accepts the credentials ({source.found}), which lack a permission: grant {permission}"
    return hint


def _list(store: Store, prefix: str, found: list[ObjectInfo]) -> str:
    page = next(iter(store.list(prefix).pages()), None)
    objects = [] if page is None else page.objects
    found += [info for info in objects if not info.key.endswith("/")][:1]
    return f"the first page has {counted(len(objects), 'key')}"


def _get(store: Store, info: ObjectInfo) -> str:
    try:
        size = len(store.get_range(info.key, 0, _READ_BYTES))
    except RangeError:
        size = 0
    return f"{human_size(size)} of {store.url}/{info.key}"


def _conditions(store: Store, prefix: str, source: Check | None) -> Check:
    """Whether the store compares versions before it writes and deletes. Some servers ignore conditions."""
    name = "conditions"
    try:
        ignored = writes.ignored_conditions(store, prefix)
    except UnsupportedError as error:
        return Check(name, "note", described(error))
    except TorchobjError as error:
        return _failed(name, source, error)
    if ignored:
        advice = "S3Options(conditional_writes=False) makes checkpoint managers compare versions themselves"
        return Check(name, "warning", f"the store ignores {', '.join(ignored)}", advice)
    return Check(name, "ok", "an object that exists, or has another version, is not replaced or deleted")
