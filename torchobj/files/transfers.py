"""Uploads and downloads files and folders, each by one native call. Does not import torch."""

import dataclasses
import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, Unpack

from torchobj import _torchobj
from torchobj.config import StoreConfig, resolve
from torchobj.exceptions import TransferError
from torchobj.files.patterns import Pattern, native_patterns
from torchobj.store import Store
from torchobj.store.attributes import ObjectAttributes, native_attributes
from torchobj.store.conditions import check_condition
from torchobj.store.transfers import FilePath, FileState, ProgressOption, Transfer, counters_to, make_folders
from torchobj.urls import parse_object_url, parse_url

__all__ = ["TreeTransfer", "download", "download_file", "upload", "upload_file"]

#: Number of failures in the message of a `TransferError`.
_SHOWN_FAILURES = 3


#: Of each file that was transferred, if they are listed: the version of the object, and the state of the file.
_Files: TypeAlias = Mapping[str, tuple[str | None, FileState | None]]


@dataclasses.dataclass(frozen=True, slots=True)
class TreeTransfer:
    """The result of the transfer of a tree."""

    transferred: int
    """Number of files that were transferred."""
    skipped: int
    """Number of files that were skipped because they are unchanged."""
    bytes: int
    """Number of bytes that were transferred."""
    _files: "_Files" = dataclasses.field(default_factory=dict, repr=False, compare=False)


def upload_file(
    path: FilePath,
    url: str,
    *,
    config: StoreConfig | None = None,
    overwrite: bool = True,
    if_version: str | None = None,
    skip_unchanged: bool = False,
    progress: ProgressOption = None,
    **attributes: Unpack[ObjectAttributes],
) -> Transfer:
    """Uploads a file. The object appears when it is complete.

    A large file is sent in parallel parts, within `StoreConfig.write_buffer_bytes` of memory. A checksum of each part
    is sent with it, and the store verifies it. The time of the last modification is stored in the metadata `mtime`, in
    seconds since 1970; `file://` stores no metadata.

    Args:
        path: A regular file, which must not change meanwhile, or a symbolic link to one. A FIFO, and a file without a
            size, such as those of `/proc`, are read to their ends, and `skip_unchanged` does not apply to them.
        url: `s3://bucket/key`, `gs://bucket/key`, `file:///folder/file` or `memory://name/key`.
        config: Settings of the store.
        overwrite: Whether an existing object may be replaced.
        if_version: Replaces only this version of the object, as returned by `Store.put` and `Store.head`.
        skip_unchanged: Whether to keep an object that is equal to the file: of the same size and with the checksum or
            MD5 that the store has, otherwise with the `mtime` of the file in its metadata. On `file://` the bytes are
            compared. This takes one request, and reads the file.
        progress: Receives a `Progress` about every 0.1 s and at the end, in this thread. An exception that it raises
            aborts the transfer. True shows a bar on stderr.
        attributes: `content_type`, `metadata`, `storage_class` and the other attributes of `Store.put`.

    Returns:
        Size and version of the object.

    Raises:
        FileNotFoundError: The file does not exist.
        ObjectChangedError: The file changed while it was uploaded. Nothing is written.
        PreconditionFailedError: The condition is not met.
        StoreError: Errors that persist after the retries, and errors of the file system.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("text")
        >>> transfer = upload_file(folder / "a.txt", "memory://files/a.txt", content_type="text/plain")
        >>> transfer.size, transfer.skipped
        (4, False)
        >>> upload_file(folder / "a.txt", "memory://files/a.txt", skip_unchanged=True).skipped
        True
    """
    store, key = _store_of(url, config)
    return store.upload_file(
        key,
        path,
        overwrite=overwrite,
        if_version=if_version,
        skip_unchanged=skip_unchanged,
        progress=progress,
        **attributes,
    )


def download_file(
    url: str,
    path: FilePath,
    *,
    config: StoreConfig | None = None,
    version: str | None = None,
    skip_unchanged: bool = False,
    progress: ProgressOption = None,
) -> Transfer:
    """Downloads an object to a file. The file appears when it is complete and durable.

    A large object is read in parallel ranges of one version, into a temporary file beside the target whose name starts
    with `.torchobj-`. After an interrupt, a kill or a failure of the network, that file remains, and the next download
    of the same version to the same target reads only the missing ranges. A download of another version or object to the
    target replaces it.

    A device, a FIFO, and a descriptor such as `/dev/stdout` or `/dev/fd/3` are not replaced: they are written as the
    object arrives, and a failure leaves the bytes before it there. The write waits for the reader of a FIFO.

    The bytes are verified with the CRC of the whole object if the store has one: Google Cloud Storage always does, and
    S3 if the object was uploaded with one. The time of modification of the file is that of the metadata `mtime`,
    otherwise that of the object.

    Args:
        url: As for `upload_file`.
        path: The file. Missing folders above it are created. A symbolic link is replaced, unless it leads to a device,
            a FIFO or a descriptor. A file that is replaced keeps its permissions.
        config: As for `upload_file`.
        version: The version to read, as for `Store.get`.
        skip_unchanged: Whether to keep a file that is equal to the object, as for `upload_file`; without a checksum,
            the times of modification are compared.
        progress: As for `upload_file`.

    Returns:
        Size and version of the object.

    Raises:
        ObjectNotFoundError: The object does not exist.
        ObjectChangedError: The object is not of this version, or changed during the download.
        InvalidKeyError: `path` is a socket.
        IntegrityError: The bytes do not match the checksum of the object.
        IsADirectoryError: `path` is a folder.
        StoreError: Errors that persist after the retries, and errors of the file system: if it is full, `errno` is
            ENOSPC, and the message contains the number of missing bytes.

    Example:
        >>> import tempfile, torchobj
        >>> _ = torchobj.Store("memory://files").put("b.bin", b"bytes")
        >>> file = Path(tempfile.mkdtemp()) / "folder" / "b.bin"
        >>> download_file("memory://files/b.bin", file).size, file.read_bytes()
        (5, b'bytes')
    """
    store, key = _store_of(url, config)
    return store.download_file(key, path, version=version, skip_unchanged=skip_unchanged, progress=progress)


def upload(
    folder: FilePath,
    url: str,
    *,
    config: StoreConfig | None = None,
    glob: str | None = None,
    patterns: Sequence[Pattern] = (),
    overwrite: bool = True,
    content_types: Mapping[str, str] | None = None,
    skip_unchanged: bool = False,
    progress: ProgressOption = None,
    _lists_files: bool = False,
    **attributes: Unpack[ObjectAttributes],
) -> TreeTransfer:
    """Uploads the files below a folder, many of them concurrently.

    A file `folder/a/b` becomes the object `a/b` below the URL. Symbolic links to files and folders are followed; a link
    to a folder that contains it is skipped with a warning, and so are pipes, sockets and devices. Below a `file://` URL
    no link to a folder is followed, and no device, FIFO or descriptor is written: these files are failures. Files whose
    names start with `.torchobj-` are temporary and are skipped. Empty folders have no object. What `glob` or `patterns`
    do not select is not read, and no failure if it cannot be.

    Args:
        folder: The folder.
        url: Prefix of the objects, such as `s3://bucket/prefix`; a slash is appended if it has none.
        config: As for `upload_file`.
        glob: Uploads only files whose path below the folder matches: `*` and `?` match within a component, `**` matches
            across components.
        patterns: Pairs of `exclude` or `include` and a pattern for the path below the folder, in which `*` and `?` also
            match slashes. The last one that matches a file decides whether it is uploaded, as those of `aws s3`.
        overwrite: Whether existing objects may be replaced; if not, they are failures.
        content_types: Content types by the ends of file names, such as `mimetypes.types_map`. The longest end that a
            name has counts; `content_type` overrides them.
        skip_unchanged: As for `upload_file`, for each file.
        progress: As for `upload_file`.
        attributes: As for `upload_file`, of each object.

    Raises:
        TransferError: Some files could not be read or uploaded. The others were: see its `failures` and `result`.
        NotADirectoryError: `folder` is a file.
        ConfigError: `glob` or `patterns` is not valid.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("a.txt", "b.txt", "c.log"):
        ...     _ = (folder / name).write_text(name)
        >>> upload(folder, "memory://trees/texts", glob="*.txt")
        TreeTransfer(transferred=2, skipped=0, bytes=10)
        >>> upload(folder, "memory://trees/logs", patterns=[("exclude", "*"), ("include", "*.log")])
        TreeTransfer(transferred=1, skipped=0, bytes=5)
    """
    native, prefix = _prefix_of(url, config)
    root = Path(folder)
    if not root.is_dir():
        # Raises FileNotFoundError, or an error of the file system.
        root.stat()
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder; upload_file uploads a file", os.fspath(folder))
    check_condition(overwrite, None)
    done = _torchobj.upload_tree(
        native,
        root,
        prefix,
        glob,
        native_patterns(patterns),
        native_attributes(attributes),
        {end.lower(): value for end, value in (content_types or {}).items()},
        overwrite,
        skip_unchanged,
        _lists_files,
        counters_to(progress),
    )
    return _tree_transfer("upload", os.fspath(folder), done)


def download(
    url: str,
    folder: FilePath,
    *,
    config: StoreConfig | None = None,
    glob: str | None = None,
    patterns: Sequence[Pattern] = (),
    skip_unchanged: bool = False,
    progress: ProgressOption = None,
    _lists_files: bool = False,
) -> TreeTransfer:
    """Downloads the objects under a prefix to files below a folder, many of them concurrently.

    An object `a/b` below the URL becomes the file `folder/a/b`. Each file is downloaded as by `download_file`. A key
    that cannot be a path below the folder is a failure: one that contains `..`, an empty component or NUL, one with a
    component of more than 255 bytes, and one of two keys of which one is a folder of the other. Symbolic links below
    the folder are not followed, and devices, FIFOs and sockets there are failures. Empty objects whose keys end with a
    slash are markers of folders and are skipped.

    Args:
        url: Prefix of the objects, such as `s3://bucket/prefix`; a slash is appended if it has none.
        folder: The folder. It is created if it does not exist.
        config: As for `upload_file`.
        glob: Downloads only objects whose key below the URL matches, as for `upload`.
        patterns: As for `upload`, for the key below the URL.
        skip_unchanged: As for `download_file`, for each object.
        progress: As for `upload_file`.

    Raises:
        TransferError: Some objects could not be downloaded. The others were: see its `failures` and `result`.
        NotADirectoryError: `folder` is a file.
        StoreError: The objects could not be listed.
        ConfigError: `glob` or `patterns` is not valid.

    Example:
        >>> import tempfile, torchobj
        >>> store = torchobj.Store("memory://trees")
        >>> _ = store.put("images/1/a.jpg", b"1"), store.put("images/2/b.jpg", b"22")
        >>> folder = Path(tempfile.mkdtemp())
        >>> download("memory://trees/images", folder)
        TreeTransfer(transferred=2, skipped=0, bytes=3)
        >>> (folder / "2" / "b.jpg").read_bytes()
        b'22'
    """
    native, prefix = _prefix_of(url, config)
    root = Path(folder)
    try:
        make_folders(root)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", os.fspath(folder)) from None
    done = _torchobj.download_tree(
        native, prefix, root, glob, native_patterns(patterns), skip_unchanged, _lists_files, counters_to(progress)
    )
    return _tree_transfer("download", url, done)


def _store_of(url: str, config: StoreConfig | None) -> tuple[Store, str]:
    """The store of an object, and its key."""
    parsed = parse_object_url(url)
    return Store(parsed.base, config=resolve(str(parsed), config)), parsed.key


def _prefix_of(url: str, config: StoreConfig | None) -> tuple["_torchobj.NativeStore", str]:
    """The native store of a URL, and its key with a slash at the end."""
    parsed = parse_url(url)
    prefix = parsed.key if not parsed.key or parsed.key.endswith("/") else f"{parsed.key}/"
    native = _torchobj.NativeStore(parsed.scheme, parsed.bucket, resolve(str(parsed), config))
    return native, prefix


def _tree_transfer(operation: str, source: str, done: "_torchobj._TreeDone") -> TreeTransfer:
    transferred, skipped, size, failures, files = done
    result = TreeTransfer(transferred, skipped, size, {name: (version, state) for name, version, state in files})
    if not failures:
        return result
    failures = sorted(failures, key=lambda failure: failure[0])
    shown = "; ".join(f"{name!r}: {error}" for name, error in failures[:_SHOWN_FAILURES])
    more = f"; and {len(failures) - _SHOWN_FAILURES} more" if len(failures) > _SHOWN_FAILURES else ""
    total = len(failures) + transferred + skipped
    message = f"{operation} {source}: {len(failures)} of {total} files were not transferred: {shown}{more}"
    failed = TransferError(message, failures, result)
    if len(codes := {error.errno for _, error in failures if isinstance(error, OSError)}) == 1:
        failed.errno = codes.pop()
    raise failed
