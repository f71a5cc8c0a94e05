"""Verifies copies of objects before their sources are deleted, and deletes sources that have not changed."""

import re
from collections.abc import Sequence
from itertools import islice
from os.path import commonprefix
from typing import NamedTuple

from torchobj.exceptions import ObjectNotFoundError, PreconditionFailedError, UnsupportedError
from torchobj.store.file_objects import open as open_object
from torchobj.store.object_info import ObjectInfo
from torchobj.store.store import Store
from torchobj.urls import parse_url

__all__ = ["Copy", "delete_unchanged", "unverified"]

#: Keys of a page of a listing (S3 API reference, "ListObjectsV2").
_PAGE_KEYS = 1000

#: An ETag that is the MD5 of the bytes, unless they are encrypted with a key of their own.
_MD5 = re.compile(r'"[0-9a-f]{32}"')

_BLOCK_BYTES = 8 << 20


class Copy(NamedTuple):
    """A copy that was made."""

    source: str
    """Key of the source."""
    size: int | None
    """Size of the source in bytes."""
    version: str | None
    """Version of the source."""
    key: str
    """Key of the copy."""
    written: str | None
    """Version of the copy in the response to its request; None if that had none."""


def unverified(target: Store, copies: Sequence[Copy], source: Store | None = None) -> dict[str, str]:
    """Returns why copies must not be relied on, by their keys.

    The copies must have the size of their source, and the version that was written. A listing has both for most; the
    others are looked up by HEAD requests. Copies that the server made must also have the ETag of their source, or its
    checksum, for which HEAD requests of both are sent. If one has neither, but both have ETags that should be equal,
    the bytes are compared.

    Args:
        target: The store of the copies.
        copies: The copies.
        source: The store of the sources, if the server made the copies.
    """
    found, reasons, unsure = _found(target, copies), dict[str, str](), list[Copy]()
    for copy in copies:
        info, url = found[copy.key], f"{target.url}/{copy.key}"
        if isinstance(info, Exception):
            missing = isinstance(info, ObjectNotFoundError)
            reasons[copy.key] = f"{url} does not exist" if missing else f"{url} cannot be looked up ({info})"
        elif info.size != copy.size:
            reasons[copy.key] = f"{url} has {info.size} bytes instead of {copy.size}"
        elif copy.written is not None and info.version != copy.written:
            reasons[copy.key] = f"another writer replaced {url}, or the store wrote other bytes"
        elif source is not None and not (_is_s3(target) and info.version == copy.version):
            unsure.append(copy)
    if source is not None and unsure:
        reasons |= _different(source, target, unsure)
    return reasons


def delete_unchanged(store: Store, key: str, version: str | None) -> bool:
    """Deletes an object if it still has a version. Returns whether it had."""
    # Some servers with the interface of S3 ignore the condition of the delete.
    is_checked = version is not None and parse_url(store.url).scheme == "gs"
    if not is_checked and store.head(key).version != version:
        return False
    try:
        store.delete(key, if_version=version)
    except PreconditionFailedError:
        return False
    except UnsupportedError:
        store.delete(key)
    return True


def _found(target: Store, copies: Sequence[Copy]) -> dict[str, ObjectInfo | Exception]:
    """The copies as the store has them now, or the errors."""
    keys, found = {copy.key for copy in copies}, dict[str, ObjectInfo | Exception]()
    if len(keys) > 1:
        pages = target.list(commonprefix(list(keys))).pages()  # noqa: RUF071  prefixes of keys, not folders
        # The prefix may have many other objects.
        for page in islice(pages, 2 + 4 * len(keys) // _PAGE_KEYS):
            has_all = (info for info in page.objects if info.size is not None and info.version is not None)
            found |= {info.key: info for info in has_all if info.key in keys}
    rest = sorted(keys - found.keys())
    return found | dict(zip(rest, target.head_many(rest, return_errors=True), strict=True)) if rest else found


def _different(source: Store, target: Store, copies: list[Copy]) -> dict[str, str]:
    """Why copies that the server made are not equal to their sources, by their keys."""
    heads = (
        source.head_many([copy.source for copy in copies], checksum=True, return_errors=True),
        target.head_many([copy.key for copy in copies], checksum=True, return_errors=True),
    )
    reasons = {}
    for copy, *infos in zip(copies, *heads, strict=True):
        failed = next((info for info in infos if isinstance(info, Exception)), None)
        if failed is not None:
            reasons[copy.key] = f"{target.url}/{copy.key} cannot be compared with it ({failed})"
            continue
        one, other = (info for info in infos if isinstance(info, ObjectInfo))
        # `delete_unchanged` keeps a source that has changed.
        if one.version == copy.version and not _is_equal(source, target, one, other):
            reasons[copy.key] = f"{target.url}/{copy.key} has other bytes"
    return reasons


def _is_equal(source: Store, target: Store, one: ObjectInfo, other: ObjectInfo) -> bool:
    if one.checksum and other.checksum and one.checksum.partition(":")[0] == other.checksum.partition(":")[0]:
        return one.checksum == other.checksum
    if not (_is_s3(target) and _MD5.fullmatch(one.version or "") and _MD5.fullmatch(other.version or "")):
        # Of parts, or of a store in which a copy cannot differ: the size and the version that was written are all.
        return True
    if one.version == other.version:
        return True
    with (
        open_object(f"{source.url}/{one.key}", "rb", config=source.config) as read,
        open_object(f"{target.url}/{other.key}", "rb", config=target.config) as copied,
    ):
        while block := read.read(_BLOCK_BYTES):
            if copied.read(len(block)) != block:
                return False
        return copied.read(1) == b""


def _is_s3(store: Store) -> bool:
    return parse_url(store.url).scheme == "s3"
