"""The checks of `torchobj doctor --write`, each with an object of its own, which it deletes however it ends."""

import contextlib
import secrets
from collections.abc import Callable, Iterator

from torchobj.cli.options import described
from torchobj.cli.output import command
from torchobj.exceptions import PreconditionFailedError, StoreError, TorchobjError
from torchobj.store import Store

#: Name of the objects, before a nonce.
_PROBE = ".torchobj-doctor-"


def put(store: Store, prefix: str) -> str:
    """Writes, reads and deletes an object. Returns what was done.

    Raises:
        StoreError: A request failed, or other bytes were read.
    """
    data = secrets.token_bytes(1024)
    with _temporary(store, prefix) as key:
        store.put(key, data)
        if bytes(memoryview(store.get(key))) != data:
            raise StoreError(f"get {store.url}/{key}: other bytes than were written; check caches and proxies")
    return f"{store.url}/{key} was written, read and deleted"


def ignored_conditions(store: Store, prefix: str) -> list[str]:
    """The conditions that the store ignores.

    Raises:
        StoreError: A request failed.
        UnsupportedError: The store refuses conditions.
    """
    with _temporary(store, prefix) as key:
        old = store.put(key, secrets.token_bytes(16))
        store.put(key, secrets.token_bytes(16), if_version=old)
        return [
            condition
            for condition, request in (
                ("an object that exists (overwrite=False)", lambda: store.put(key, b"", overwrite=False)),
                ("another version (if_version=)", lambda: store.put(key, b"", if_version=old)),
                ("another version at a delete", lambda: store.delete(key, if_version=old)),
            )
            if not _is_refused(request)
        ]


@contextlib.contextmanager
def _temporary(store: Store, prefix: str) -> Iterator[str]:
    """A key with a random name below a prefix, whose object is deleted at the end: also if its write failed or was
    interrupted, after which it may exist.
    """
    key = f"{prefix[: prefix.rfind('/') + 1]}{_PROBE}{secrets.token_hex(16)}"
    try:
        yield key
    except BaseException as error:
        _delete_after(error, store, key)
        raise
    store.delete(key)


def _delete_after(error: BaseException, store: Store, key: str) -> None:
    """Deletes an object after an error, to which it adds that this failed."""
    url = f"{store.url}/{key}"

    def left(why: str) -> str:
        return f"{url} may exist, because its deletion {why}: {command('rm', url)} deletes it"

    try:
        store.delete(key)
    except KeyboardInterrupt as again:
        # Its text is the message of the command.
        again.args = (f"{str(again) or 'interrupted'}; {left('was interrupted')}",)
        raise
    except TorchobjError as failed:
        if isinstance(error, KeyboardInterrupt):
            error.args = (f"{str(error) or 'interrupted'}; {left(f'failed ({described(failed)})')}",)
        elif not _is_refusal(error):
            error.add_note(left(f"failed ({described(failed)})"))


def _is_refusal(error: BaseException) -> bool:
    """Whether the server has refused a write, so that there is no object."""
    return isinstance(error, StoreError) and error.operation == "put" and 400 <= (error.status or 0) < 500


def _is_refused(request: Callable[[], object]) -> bool:
    try:
        request()
    except PreconditionFailedError:
        return True
    return False
