"""The native side of torchobj. Public, as names of `torchobj`: `Buffer`, `ObjectReader`, `ObjectRef`."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, Required, Self, TypeAlias, TypedDict, final, type_check_only

from typing_extensions import disjoint_base

from torchobj.config import StoreConfig

__all__ = [
    "Announcer",
    "Buffer",
    "CacheFiles",
    "Cancellation",
    "CredentialAnswer",
    "ListPages",
    "ManifestBuilder",
    "ManifestPages",
    "NativeBlocks",
    "NativeGather",
    "NativeManifest",
    "NativeSlicePlan",
    "NativeStore",
    "NativeWave",
    "NativeWriter",
    "ObjectReader",
    "ObjectRef",
    "ObjectSource",
    "ScanPages",
    "SourceIterator",
    "TarIndexer",
    "TarReader",
    "__version__",
    "adopt",
    "close_gathers",
    "crc32_combine",
    "default_config",
    "download_file",
    "download_tree",
    "end_calls",
    "enter_loader",
    "finish",
    "get_many",
    "heads",
    "is_special_file",
    "offer",
    "pickle_nesting",
    "prefetch_stats",
    "process_id",
    "process_number",
    "read_refs",
    "release_free_memory",
    "remove_loader",
    "request_stats",
    "s3_ca_bundle",
    "s3_credential_source",
    "scatter",
    "start_prefetcher",
    "upload_file",
    "upload_tree",
    "work_for_loader",
]

__version__: str

# Key, size, version, modified (milliseconds since 1970), storage class.
_Entry: TypeAlias = tuple[str, int | None, str | None, int | None, str | None]

# Device, inode, size in bytes, and time of modification in nanoseconds since 1970.
_FileState: TypeAlias = tuple[int, int, int, int]

# Number of files that were transferred and that were skipped, number of bytes, the failures, and the relative paths,
# versions and states of the files that were transferred.
_TreeDone: TypeAlias = tuple[
    int, int, int, list[tuple[str, Exception]], list[tuple[str, str | None, _FileState | None]]
]

# Shape of the rows, offsets of the tile in them, offsets of the tile in the slice, shape of the tile.
_Tile: TypeAlias = tuple[list[int], list[int], list[int], list[int]]

@type_check_only
class Attributes(TypedDict):
    """Headers and metadata of an object, as a dict."""

    content_type: NotRequired[str | None]
    content_encoding: NotRequired[str | None]
    content_disposition: NotRequired[str | None]
    content_language: NotRequired[str | None]
    cache_control: NotRequired[str | None]
    storage_class: NotRequired[str | None]
    metadata: Required[Mapping[str, str]]

# Key, size, version, modified (milliseconds since 1970), attributes, checksum.
_Head: TypeAlias = tuple[str, int, str | None, int | None, Attributes, str | None]

def heads(
    store: NativeStore, keys: Sequence[str], return_errors: bool = False, checksum: bool = False
) -> Sequence[_Head | Exception]:
    """Returns the attributes of objects, by concurrent HEAD requests.

    Args:
        store: The store.
        keys: Keys of the objects.
        return_errors: Whether the list contains an exception for each object whose request failed, instead of raising the
            first one.
        checksum: Whether checksums are requested.

    Returns:
        Key, size, version, time of the last modification in milliseconds since 1970, attributes and checksum of each object, in
        order.
    """

def close_gathers(gathers: Sequence[tuple[NativeGather, Sequence[Any]]]) -> list[tuple[str, int, int]]:
    """Writes the last pieces of several objects and commits them, concurrently.

    Args:
        gathers: Pairs of a gather and its last pieces, as for `NativeGather.write`.

    Returns:
        Version, size in bytes and CRC-32 of each object.

    Raises:
        StoreError: An object could not be committed; the first error is raised after the others are committed.
            KeyboardInterrupt aborts all that are not committed yet.
    """

def default_config() -> dict[str, Any]:
    """Returns the default configuration of Rust, with the field names of Python. A test compares both."""

def download_file(
    store: NativeStore,
    key: str,
    folder: str | os.PathLike[str],
    name: str,
    version: str | None,
    skip_unchanged: bool,
    progress: Callable[..., None] | None = None,
) -> tuple[int, str | None, bool, _FileState | None]:
    """Downloads an object to a file.

    Args:
        store: The store of the object.
        key: Key of the object.
        folder: The folder of the file.
        name: Name of the file.
        version: The version to read; None: the current one.
        skip_unchanged: Whether a file that is equal to the object is kept.
        progress: As for `upload_file`.

    Returns:
        As `upload_file`, with the file as it was written.

    Raises:
        StoreError: The object could not be read, or the file could not be written.
    """

def download_tree(
    store: NativeStore,
    prefix: str,
    folder: str | os.PathLike[str],
    glob: str | None,
    patterns: Sequence[tuple[bool, str]],
    skip_unchanged: bool,
    lists_done: bool,
    progress: Callable[..., None] | None = None,
) -> _TreeDone:
    """Downloads the objects under a prefix.

    Args:
        store: The store of the objects.
        prefix: Prefix of the keys.
        folder: The folder of the files.
        glob: Selects objects by their keys without the prefix.
        patterns: As for `upload_tree`.
        skip_unchanged: Whether files that are equal to their objects are kept.
        lists_done: As for `upload_tree`.
        progress: As for `upload_file`.

    Returns:
        Number of files that were transferred and that were skipped, number of bytes, the relative paths and exceptions
        of the files that failed, and with `lists_done` the relative paths, versions and states of those transferred.

    Raises:
        ConfigError: `glob` is not valid.
        StoreError: The listing failed, or the folder could not be opened.
    """

def end_calls() -> None:
    """Ends the calls of all other threads, and the uploads of all writers, for the end of the process: only the calling thread
    can use stores afterwards. `finish` waits for it.
    """

def finish(limit_s: float) -> list[tuple[str, str | None, bool]]:
    """Waits until all calls have ended, and until the uploads that they and dropped writers began are aborted. A signal ends the
    wait.

    Args:
        limit_s: Maximum number of seconds.

    Returns:
        URL of the object, id and state of each upload that is neither committed nor aborted. The id is None if the store has
        not responded to its beginning; the state is whether a warning has named it.
    """

def is_special_file(path: str | os.PathLike[str]) -> bool:
    """Returns whether a write opens the file instead of replacing it: a device, a FIFO, a socket, or a descriptor.

    Args:
        path: The file. Symbolic links are followed.
    """

def get_many(
    jobs: Sequence[tuple[NativeStore, str | ObjectRef]], into: Sequence[Any] | None = None, return_errors: bool = False
) -> list[Any]:
    """Reads objects of any stores concurrently, with the GIL released.

    Args:
        jobs: Pairs of a store and a key or an `ObjectRef`.
        into: A writable, contiguous buffer for each object; buffers must not overlap. None: returns new buffers.
        return_errors: Whether the list contains an exception for each object that could not be read, instead of
            raising the first one.

    Returns:
        A `Buffer` for each object, or with `into` the number of bytes written.

    Raises:
        ValueError: A buffer is read-only, or two buffers overlap.
        StoreError: An object could not be read, unless `return_errors`.
    """

def crc32_combine(first: int, second: int, second_len: int) -> int:
    """Returns the CRC-32 of the concatenation of two byte strings with these CRC-32, as zlib's function of this name.

    Args:
        first: The CRC-32 of the first string.
        second: The CRC-32 of the second string.
        second_len: Length of the second string in bytes.
    """

def pickle_nesting(pickle: bytes) -> int:
    """Returns the nesting depth of the objects in a pickle; 2^32 - 1 if it cannot be determined."""

def s3_ca_bundle(config: StoreConfig) -> Path | None:
    """Returns the path of the CA certificates that a configuration trusts for S3; None: those of the system."""

def s3_credential_source(config: StoreConfig) -> tuple[bool | None, str, str]:
    """Returns where the credentials that a configuration signs requests of S3 with come from, without their values.

    Sends no requests. `anonymous` and a `credential_provider` are not considered.

    Returns:
        Whether the source is known to have some: False for the role of the machine, None if it cannot be used. Its name, or the
        reason. The next step, or an empty text.
    """

def scatter(
    jobs: Sequence[tuple[NativeStore, str, str | None, Sequence[tuple[int, Any]]]],
    checksum: bool,
    progress: Callable[[int], object] | None = None,
) -> list[tuple[str | None, int, list[int]]]:
    """Reads ranges of objects into buffers, concurrently, with the GIL released.

    Args:
        jobs: For each object its store, its key, the version that it must have (None: any), and its ranges: pairs of
            an offset in bytes and a writable, contiguous buffer, which is filled from there. Buffers must not overlap.
        checksum: Whether to compute the CRC-32 of each range.
        progress: Called about every 0.1 s with the number of bytes that have arrived; its exception ends the reads.

    Returns:
        For each object its version, its size in bytes, and the CRC-32 of each range; empty without `checksum`.

    Raises:
        ValueError: A buffer is read-only, or two buffers overlap.
        ObjectChangedError: An object has another version.
        StoreError: An object could not be read.
    """

def upload_file(
    store: NativeStore,
    path: str | os.PathLike[str],
    key: str,
    attributes: Attributes,
    overwrite: bool,
    if_version: str | None,
    skip_unchanged: bool,
    progress: Callable[..., None] | None = None,
) -> tuple[int, str | None, bool, _FileState | None]:
    """Uploads a file.

    Args:
        store: The store of the object.
        path: The file.
        key: Key of the object.
        attributes: Headers and metadata of the object.
        overwrite: Whether an existing object may be replaced.
        if_version: The version that is replaced.
        skip_unchanged: Whether an object that is equal to the file is kept.
        progress: Called about every 0.1 s with the files done, all files, the bytes done, all bytes, and the files that
            were skipped; totals are None until they are known.

    Returns:
        Size in bytes, version, whether the upload was skipped, and otherwise device, inode, size in bytes and time of
        modification in nanoseconds since 1970 of the file as it was read.

    Raises:
        StoreError: The file could not be read, or the object could not be written.
    """

def upload_tree(
    store: NativeStore,
    folder: str | os.PathLike[str],
    prefix: str,
    glob: str | None,
    patterns: Sequence[tuple[bool, str]],
    attributes: Attributes,
    content_types: Mapping[str, str],
    overwrite: bool,
    skip_unchanged: bool,
    lists_done: bool,
    progress: Callable[..., None] | None = None,
) -> _TreeDone:
    """Uploads the files below a folder.

    Args:
        store: The store of the objects.
        folder: The folder.
        prefix: Prefix of the keys.
        glob: Selects files by their relative paths.
        patterns: Whether relative paths that match a pattern of a shell are selected; the last one that matches counts.
        attributes: Headers and metadata of the objects.
        content_types: Content types by the ends of names, in lower case, for attributes without one.
        overwrite: Whether existing objects may be replaced.
        skip_unchanged: Whether objects that are equal to their files are kept.
        lists_done: Whether the result contains each file that was transferred.
        progress: As for `upload_file`.

    Returns:
        Number of files that were transferred and that were skipped, number of bytes, the relative paths and exceptions
        of the files that failed, and with `lists_done` the relative paths, versions and states of those transferred.

    Raises:
        ConfigError: `glob` is not valid.
        StoreError: The folder could not be read.
    """

@final
class Buffer:
    """The bytes of an object, in memory that views share.

    Supports the writable buffer protocol: `memoryview`, `numpy.frombuffer` and `torch.frombuffer` share the memory without a
    copy. The memory lives until the buffer and all of its views are deleted. `bytes(buffer)` and pickles copy it.

    In a DataLoader worker, a returned buffer is transferred to the trainer without a copy if the worker has no other
    reference to its memory, and is copied otherwise. Buffers and views that the worker keeps remain valid in both cases.

    A forked child keeps the bytes of the buffers and views that it inherits, also after the parent has deleted its own: memory
    that the parent had during the fork is not reused before the child has exited. What a dataset or loader read ahead is shared:
    the child sees what the parent writes to it, and the reverse.

    Args:
        data: A contiguous buffer to copy.

    Raises:
        BufferError: `data` is not contiguous.

    Example:
        >>> import torch
        >>> buffer = Buffer(b"abc")
        >>> torch.frombuffer(buffer, dtype=torch.uint8)  # shares the memory
        tensor([97, 98, 99], dtype=torch.uint8)
    """

    def __new__(cls, data: Any) -> Self: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int | slice, /) -> Any: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __reduce__(self) -> tuple[Any, ...]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...
    def view(self, start: int, end: int) -> Buffer:
        """Returns a buffer of bytes `start..end`, which shares the memory of this one.

        The memory lives until this buffer and all buffers and views that share it are deleted.

        Args:
            start: Index of the first byte.
            end: Index after the last byte.

        Raises:
            IndexError: The bytes are not within the buffer. Indices are not clamped.

        Example:
            >>> bytes(Buffer(b"abc").view(1, 3))
            b'bc'
        """
    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Returns the bytes as text.

        Args:
            encoding: As for `bytes.decode`.
            errors: As for `bytes.decode`.

        Raises:
            UnicodeDecodeError: The bytes are not text in this encoding.

        Example:
            >>> Buffer(b"abc").decode()
            'abc'
        """

@final
class ManifestBuilder:
    """Builds a manifest from columns, as `NativeManifest.columns` returns them."""

    def __new__(cls) -> Self: ...
    def add(self, bases: Sequence[str], columns: Sequence[bytes]) -> None:
        """Adds objects.

        Args:
            bases: The bases that `columns` refers to, in the order of their first occurrence.
            columns: The columns.

        Raises:
            ValueError: The columns do not fit each other.
        """
    def finish(self) -> NativeManifest:
        """Returns the manifest. The builder is empty afterwards."""

@disjoint_base
class NativeManifest:
    """The native side of `torchobj.Manifest`.

    On Linux, a manifest of at least 1 MiB is in a sealed file in memory, which other processes can map.

    Args:
        data: A manifest serialized by `bytes(manifest)`, or a manifest to share.

    Raises:
        ValueError: `data` is not a manifest.
    """

    def __new__(cls, data: bytes | NativeManifest) -> Self: ...
    # On Linux only.
    @staticmethod
    def received(file: int, bases: Sequence[str], digest: str) -> NativeManifest:
        """Maps the file of a manifest of another process.

        Args:
            file: Duplicate of its `descriptor()`, valid in this process, which this call closes.
            bases: Its `bases()`.
            digest: Its `digest()`.

        Raises:
            OSError: It is not the file of a manifest, or the system refuses the address space.
        """
    def descriptor(self) -> int | None:
        """Returns the file descriptor of the memory of the manifest, or None if its memory is private to this process."""
    def columns(self, begin: int, end: int) -> list[bytes]:
        """Returns objects as columns in Arrow's layout, without Python objects.

        Args:
            begin: Index of the first object.
            end: Index after the last object.

        Returns:
            Indices of the bases (int32), offsets of the keys (int32) and the keys, sizes (int64; -1: unknown), offsets of the
            versions (int32) and the versions (empty: unknown).

        Raises:
            IndexError: An object is out of range, or the texts exceed 2 GiB.
        """
    @staticmethod
    def from_listing(
        store: NativeStore,
        base: str,
        prefix: str,
        glob: str | None = None,
        suffixes: Sequence[str] = ...,
        limit: int | None = None,
    ) -> NativeManifest:
        """Lists the objects under a prefix.

        Args:
            store: The store to list.
            base: URL of the store, without a trailing slash.
            prefix: Prefix of the keys, not percent-encoded.
            glob: Keeps only keys whose part after the prefix matches.
            suffixes: Keeps only keys that end with one of these; empty: all.
            limit: Maximum number of objects, in key order; None: no limit.

        Raises:
            ConfigError: `glob` is not valid.
            StoreError: The listing failed.
        """
    @staticmethod
    def from_urls(urls: Iterable[str]) -> NativeManifest:
        """Makes a manifest of objects, in this order, without their sizes and versions.

        Args:
            urls: URLs of objects.

        Raises:
            ConfigError: One of them is not a URL.
        """
    def __len__(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __bytes__(self) -> bytes: ...
    def digest(self) -> str:
        """Returns a hash of the objects, 32 hexadecimal digits. Equal manifests have the same digest, in any version of
        torchobj. The first call computes it.
        """
    def memory_bytes(self) -> int:
        """Returns the memory of the manifest in bytes, including the keys."""
    def bases(self) -> list[str]:
        """Returns the URLs of the stores of the objects, such as `s3://bucket`."""
    def url(self, index: int) -> str:
        """Returns the URL of an object.

        Args:
            index: Index of the object, from 0.

        Raises:
            IndexError: `index` is out of range.
        """
    def entry(self, index: int) -> tuple[str, str, int | None, str | None]:
        """Returns the store, the key, the size in bytes and the version of an object.

        Args:
            index: Index of the object, from 0.

        Returns:
            `(base, key, size, version)`; size and version are None if the listing did not contain them.

        Raises:
            IndexError: `index` is out of range.
        """
    def read(
        self,
        stores: Sequence[NativeStore],
        indices: Sequence[int],
        return_errors: bool = False,
        pinned: bool = True,
    ) -> list[Any]:
        """Reads objects concurrently, with the GIL released.

        Args:
            stores: A store for each of `bases()`, in that order.
            indices: Indices of the objects.
            return_errors: Whether the list contains an exception for each object that could not be read, instead of
                raising the first one.
            pinned: Whether an object must have the size and version of the manifest.

        Returns:
            An `ObjectReader` for each object, in this order, whose bytes are in memory.

        Raises:
            IndexError: An index is out of range, or `stores` is too short.
            StoreError: An object could not be read, unless `return_errors`.
        """

@final
class ManifestPages:
    """Iterator over the pages of a listing, each a `NativeManifest`. Requests the next page while the caller uses one.

    Args:
        store: The store to list.
        base: URL of the store, without a trailing slash.
        prefix: Prefix of the keys, not percent-encoded.
        glob: Keeps only keys whose part after the prefix matches.
        suffixes: Keeps only keys that end with one of these; empty: all.
        limit: Maximum number of objects, in key order; None: no limit.
    """

    def __new__(
        cls,
        store: NativeStore,
        base: str,
        prefix: str,
        glob: str | None,
        suffixes: Sequence[str],
        limit: int | None,
    ) -> Self: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> NativeManifest: ...
    def url(self, index: int) -> str:
        """Returns the URL of an object of the pages so far.

        Args:
            index: Index of the object over all pages, from 0.

        Raises:
            IndexError: `index` is out of range.
        """
    def whole(self) -> NativeManifest:
        """Returns a manifest of all pages so far."""

@final
class ObjectReader(BinaryIO):
    """A readable binary file over an object.

    Registered as an `io.BufferedIOBase`, so it can be used like an open file. `torchobj.open` returns readers that fetch on
    demand: they send no request before the first read. A dataset passes readers of bytes in memory to its `transform`: these
    share them without a copy through `getbuffer()`, `buffer` and the buffer protocol, and can be pickled. The memory lives
    until the reader is closed or deleted and all views are deleted.

    Not thread-safe.

    Args:
        url: URL of the object.
        bucket: Bucket of the object; empty for a file.
        key: Key of the object, not percent-encoded.
        buffer: Bytes of the object, which the reader shares.
        position: Initial position in bytes.

    Raises:
        ValueError: The reader is closed; raised by every method but `close`.
        StoreError: A fetch failed, after the retries.
        ObjectChangedError: The object was replaced since the first fetch.
    """

    def __new__(cls, url: str, bucket: str, key: str, buffer: Buffer, position: int = 0) -> Self: ...
    @staticmethod
    def open(
        store: NativeStore,
        url: str,
        bucket: str,
        key: str,
        jump_bytes: int | None = None,
        ahead_bytes: int | None = None,
        version: str | None = None,
    ) -> ObjectReader:
        """Returns a reader that fetches on demand.

        Args:
            store: The store of the object.
            url: URL of the object.
            bucket: Bucket of the object; empty for a file.
            key: Key of the object, not percent-encoded.
            jump_bytes: Number of bytes to fetch after a seek; None: 256 KiB.
            ahead_bytes: Maximum number of bytes to fetch ahead of sequential reads; None: 32 MiB.
            version: The version to read; None: that of the first fetch.
        """
    @property
    def url(self) -> str:
        """URL of the object."""
    @property
    def bucket(self) -> str:
        """Bucket of the object; empty for a file."""
    @property
    def key(self) -> str:
        """Key of the object, not percent-encoded."""
    @property
    def buffer(self) -> Buffer | None:
        """The bytes of the object, shared; None if the reader fetches on demand or is closed."""
    @property
    def size(self) -> int:
        """Size of the object in bytes. A reader that fetches on demand sends a request, unless it has fetched before."""
    @property
    def mode(self) -> str:
        """The mode of the file: `rb`."""
    @property
    def name(self) -> str:
        """URL of the object, as the name of the file."""
    @property
    def closed(self) -> bool:
        """Whether the reader is closed."""
    def read(self, size: int | None = None, /) -> bytes:
        """Reads bytes and advances the position.

        Args:
            size: Number of bytes; None or negative: all remaining bytes.

        Returns:
            A copy of the bytes; fewer than `size` only at the end of the object.
        """
    def read1(self, size: int | None = None, /) -> bytes:
        """Same as `read`."""
    def readinto(self, buffer: Any, /) -> int:
        """Reads bytes into a buffer and advances the position.

        Args:
            buffer: A writable, contiguous buffer. The reader does not use it after the call.

        Returns:
            Number of bytes; fewer than the size of the buffer only at the end of the object.

        Raises:
            TypeError: `buffer` is read-only.
        """
    def readinto1(self, buffer: Any, /) -> int:
        """Same as `readinto`."""
    def readline(self, size: int | None = None, /) -> bytes:
        """Reads a line, including its newline, and advances the position.

        Args:
            size: Maximum number of bytes; None or negative: no limit.

        Returns:
            A copy of the line; empty at the end of the object.
        """
    def readlines(self, hint: int | None = None, /) -> list[bytes]:
        """Reads the remaining lines.

        Args:
            hint: Stops after the line at which this number of bytes is reached; None, 0 or negative: no limit.
        """
    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Sets the position. Sends no request, except for the size if `whence` is 2 and it is unknown.

        Args:
            offset: Offset in bytes.
            whence: Origin of the offset: the start (0), the position (1) or the end (2).

        Returns:
            The new position. It may be after the end of the object, where reads return no bytes.

        Raises:
            ValueError: The new position would be negative.
        """
    def tell(self) -> int:
        """Returns the position in bytes."""
    def seekable(self) -> bool:
        """Returns True: the reader supports `seek`."""
    def readable(self) -> bool:
        """Returns True."""
    def writable(self) -> bool:
        """Returns False."""
    def isatty(self) -> bool:
        """Returns False."""
    def flush(self) -> None:
        """Does nothing."""
    def fileno(self) -> int:
        """Raises `io.UnsupportedOperation`: an object has no file descriptor."""
    def write(self, data: Any, /) -> int:
        """Raises `io.UnsupportedOperation`: a reader cannot write."""
    def writelines(self, lines: Any, /) -> None:
        """Raises `io.UnsupportedOperation`: a reader cannot write."""
    def truncate(self, size: int | None = None, /) -> int:
        """Raises `io.UnsupportedOperation`: a reader cannot write."""
    def detach(self) -> Any:
        """Raises `io.UnsupportedOperation`: the reader has no raw stream."""
    def getbuffer(self) -> memoryview:
        """Returns all bytes of the object, regardless of the position.

        Returns:
            A writable memoryview that shares the memory of the reader. It remains valid after the reader is closed.

        Raises:
            io.UnsupportedOperation: The reader fetches on demand.
        """
    def close(self) -> None:
        """Closes the reader and drops its bytes. Views remain valid. Does nothing if the reader is closed."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> bytes: ...
    def __reduce__(self) -> tuple[Any, ...]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class ObjectRef:
    """A reference to an object, or to bytes `start..end` of it.

    Creating one sends no request. It is immutable, and can be pickled, compared and hashed.

    Args:
        url: `s3://bucket/key`, `file:///folder/file` or `memory://name/key`; at most 16 KiB.
        start: First byte of the range; None: 0.
        end: End of the range, exclusive; clamped to the size of the object. None: the end of the object.
        size: Size of the whole object in bytes, if it is known. It saves a request for large objects, and determines
            the memory that is reserved for it. Reading an object of another size is an error.
        version: The version to read: on S3 the ETag, on GCS the generation, which may be noncurrent. Reading another
            one raises `ObjectChangedError`.

    Raises:
        ConfigError: The URL has no key or is too long, a number is negative, or the range ends before it begins.

    Example:
        >>> ObjectRef("s3://bucket/shard.bin", start=1024, end=2048).key
        'shard.bin'
    """

    def __new__(
        cls,
        url: str,
        start: int | None = None,
        end: int | None = None,
        size: int | None = None,
        version: str | None = None,
    ) -> Self: ...
    @property
    def url(self) -> str:
        """URL of the object."""
    @property
    def key(self) -> str:
        """Key of the object, not percent-encoded."""
    @property
    def start(self) -> int:
        """First byte of the range; 0 for the whole object."""
    @property
    def end(self) -> int | None:
        """End of the range, exclusive; None for the end of the object."""
    @property
    def size(self) -> int | None:
        """Size of the whole object in bytes; None if unknown."""
    @property
    def version(self) -> str | None:
        """The version to read; None for any."""
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def read_refs(configs: Sequence[tuple[str, StoreConfig]], refs: Sequence[ObjectRef]) -> list[ObjectReader | Exception]:
    """Reads objects of any stores concurrently, with the GIL released.

    Args:
        configs: Pairs of a URL prefix and its configuration, the most specific first; the last prefix is empty.
        refs: The objects.

    Returns:
        For each object an `ObjectReader`, or the exception if it could not be read.
    """

@final
class NativeStore:
    """A bucket or folder, or a prefix in it, and its configuration. Creating one sends no request.

    Stores with equal arguments share connections, credentials and the concurrency limit. A forked child makes its own.
    Methods raise subclasses of `StoreError` and release the GIL.

    Args:
        scheme: `s3`, `gs`, `file` or `memory`.
        bucket: Name of the bucket, or path of the folder.
        config: Configuration of the store.
        prefix: Prefix of all keys, which methods take and return without it.

    Raises:
        ConfigError: The scheme is not supported.
    """
    def __new__(cls, scheme: str, bucket: str, config: StoreConfig, prefix: str = "") -> Self: ...
    def url(self, key: str) -> str:
        """Returns the URL of a key."""
    def get(self, key: str, start: int | None = None, end: int | None = None, version: str | None = None) -> Buffer:
        """Reads an object, or a range of it.

        Args:
            key: Key of the object.
            start: First byte; negative: counted from the end of the object. None: the whole object.
            end: End of the range, exclusive; clamped to the size of the object. None: the end of the object.
            version: The version to read; None: any.

        Returns:
            A buffer that owns its memory.
        """
    def get_ranges(self, ranges: Sequence[tuple[str, int, int | None]]) -> list[Buffer]:
        """Reads ranges concurrently, and checks that all ranges of an object have the same version.

        Args:
            ranges: Triples of a key, a start and an end, as in `get`.

        Returns:
            A buffer for each range.

        Raises:
            ObjectChangedError: An object was replaced between two of its ranges.
        """
    def get_ends(self, key: str, head_bytes: int, tail_bytes: int) -> tuple[Buffer, Buffer, int, str | None]:
        """Reads the first and the last bytes of an object, of the same version.

        Args:
            key: Key of the object.
            head_bytes: Number of bytes from the start.
            tail_bytes: Number of bytes from the end.

        Returns:
            `(head, tail, size, version)`; head and tail overlap if the object is small.
        """
    def head(self, key: str) -> tuple[int, str | None, int | None, Attributes]:
        """Returns the size, the version, the time of the last modification and the attributes of an object. The time is in
        milliseconds since 1970.
        """
    def put(
        self, key: str, data: Any, attributes: Attributes, overwrite: bool = True, if_version: str | None = None
    ) -> str:
        """Writes an object.

        Args:
            key: Key of the object.
            data: A contiguous buffer. It must not change during the call, and is not used afterwards.
            attributes: Headers and metadata of the object.
            overwrite: Whether an existing object may be replaced.
            if_version: The version that is replaced.

        Returns:
            The version of the object.

        Raises:
            PreconditionFailedError: The condition is not met.
        """
    def list(
        self,
        prefix: str,
        delimiter: str | None = None,
        start_after: str | None = None,
        glob: str | None = None,
        ordered: bool = True,
    ) -> ListPages:
        """Lists keys.

        Args:
            prefix: Prefix of the keys.
            delimiter: Keys that contain it after the prefix are listed as common prefixes.
            start_after: Lists only keys after this one.
            glob: Keeps only keys whose part after the prefix matches.
            ordered: Whether pages are in key order, or as they arrive.

        Returns:
            An iterator over pages.
        """
    def copy(self, source_url: str, key: str) -> str:
        """Copies an object on the server.

        Args:
            source_url: URL of the object to copy; its scheme must be that of this store.
            key: Key of the copy.

        Returns:
            The version of the copy.
        """
    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects. Succeeds for objects that do not exist."""
    def delete_if(self, key: str, version: str) -> None:
        """Deletes an object if it has this version. Succeeds if it does not exist.

        Raises:
            PreconditionFailedError: The object has another version.
        """
    def buckets(self, project: str | None = None) -> Sequence[tuple[str, int | None]]:
        """Returns the buckets of the account: names, and times of creation in milliseconds since 1970. The store needs no bucket.

        Args:
            project: The project, on Google Cloud Storage.
        """
    def abort_upload(self, key: str, upload_id: str) -> None:
        """Aborts an unfinished upload and deletes its parts. Succeeds if it does not exist."""
    def uploads(self, prefix: str) -> Sequence[tuple[str, str, int | None]]:
        """Returns the unfinished uploads under a prefix: key, id and start time in milliseconds since 1970."""

@final
class CacheFiles:
    """Iterator over the files of a disk cache: object, bytes on the disk, time of the last read in seconds since 1970, and whether the
    file is intact. The object is a tuple of URL, start, end and size, or None if the file is damaged.

    Args:
        folder: The folder of the cache.
        verify: Whether all bytes are compared with their checksums, instead of those at the end.

    Raises:
        ConfigError: Other users may write to the folder, or it belongs to one.
        ObjectNotFoundError: It contains no cache.
    """
    def __new__(cls, folder: str | os.PathLike[str], verify: bool = False) -> Self: ...
    def used_bytes(self) -> int | None:
        """Returns the accounted bytes of all files; None if they are not counted yet."""

    def others(self) -> list[Path]:
        """Returns the paths of the files of other programs that were found so far."""

    def correct(self) -> None:
        """Deletes what killed processes left, and counts the files."""

    def evict(self, max_bytes: int) -> tuple[int, int]:
        """Counts the files, and deletes those that were read longest ago.

        Args:
            max_bytes: The others have at most this many bytes.

        Returns:
            Number of the deleted files, and their bytes on the disk.
        """

    def __iter__(self) -> Self: ...
    def __next__(self) -> tuple[tuple[str, int, int, int] | None, int, int, bool]: ...
    def remove(self) -> None:
        """Deletes the file that was returned last."""

@final
class ListPages:
    """Iterator over the pages of a listing: pairs of entries and common prefixes. Requests the next page while the caller uses
    one. An entry is key, size, version, time of the last modification in milliseconds since 1970, and storage class.
    """
    def __iter__(self) -> Self: ...
    def __next__(self) -> tuple[Sequence[_Entry], Sequence[str]]: ...
    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Exports the objects of the remaining pages as an Arrow stream. The iterator is exhausted then.

        Args:
            requested_schema: Ignored.
        """

@final
class ScanPages:
    """Iterator over the attributes of all objects under a prefix, in lists and in no order. Requests the next ones while the
    caller uses a list. An object is a tuple as of `heads`, without a checksum.

    Args:
        store: The store.
        prefix: Prefix of the keys.
        glob: Keeps only keys whose part after the prefix matches.
        has_metadata: Keeps only objects with user metadata: of this name, or any if it is the empty string.
    """

    def __new__(cls, store: NativeStore, prefix: str, glob: str | None, has_metadata: str | None) -> Self: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> Sequence[_Head]: ...
    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Exports the remaining objects as an Arrow stream. The iterator is exhausted then.

        Args:
            requested_schema: Ignored.
        """

@final
class NativeSlicePlan:
    """Reads of arrays, and slices of them, that lie one behind the other in objects. Executed in waves.

    Args:
        store: The store of the objects.
        prefix: Start of the keys of all objects.
        verify: Compare the CRC-32 of arrays that are read whole.
        wave_bytes: Size of the buffer that ends a wave.
        tile_bytes: Maximum size of a tile, unless one element is larger.
    """

    def __new__(cls, store: NativeStore, prefix: str, verify: bool, wave_bytes: int, tile_bytes: int) -> Self: ...
    def add_array(self, name: str, offset: int, before: bytes | None, array_bytes: int) -> int:
        """Adds a whole array of `array_bytes` bytes, which is read into the buffer. `before` are the bytes that precede it
        from `offset` on; a descriptor follows it then. Without them the array starts at `offset`. Returns the number of
        the read.
        """
    def add_slice(
        self,
        name: str,
        offset: int,
        before: bytes | None,
        crc32: int,
        shape: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
        width: int,
        memory: Any | None,
    ) -> int:
        """Adds a slice of an array with elements of `width` bytes. `memory` is a writable buffer of its size, which
        receives it if no other read does and its runs are long. Otherwise it is read tile by tile. Without `before`,
        `crc32` is that of the array; 0 if it is unknown. Returns the number of the read.
        """
    def read(self, progress: Callable[[int], object] | None = None) -> NativeWave | None:
        """Executes the next wave. Returns `None` if no read is left.

        Args:
            progress: Called about every 0.1 s with the number of bytes of all waves that have arrived; its exception
                ends the reads.
        """

@final
class NativeWave:
    """What one wave of a `NativeSlicePlan` has read. Reads are given by their numbers.

    Attributes:
        buffer: The bytes of all arrays and tiles.
        arrays: The reads of whole arrays.
        starts: The offset of each of them in the buffer.
        tiles: Read, offset in the buffer and tile of each part of a slice without memory of its own.
        complete: The reads that ended with all bytes.
        other_frame: The reads that found another frame.
        damaged: The reads whose CRC-32 differs.
    """

    buffer: Buffer
    arrays: list[int]
    starts: list[int]
    tiles: list[tuple[int, int, _Tile]]
    complete: list[int]
    other_frame: list[int]
    damaged: list[int]

# On Linux only.
@final
class ObjectSource:
    """Reads objects ahead, which are identified by their index in a manifest, or by `ObjectRef`.

    The process that creates a source owns it: its prefetcher reads the objects, for itself and for its workers, which share
    the memory of its arena. The buffers of the readers stay valid until they are dropped.
    """

    @staticmethod
    def of_manifest(
        manifest: NativeManifest, stores: Sequence[NativeStore], budget: int, pinned: bool = True
    ) -> ObjectSource:
        """Creates a source whose objects are identified by their index in a manifest.

        Args:
            manifest: The objects.
            stores: A store for each of `manifest.bases()`, in that order.
            budget: Memory budget of the prefetcher in bytes, if this process has no prefetcher yet.
            pinned: Whether an object must have the size and version of the manifest.
        """
    @staticmethod
    def of_refs(configs: Sequence[tuple[str, StoreConfig]], budget: int) -> ObjectSource:
        """Creates a source whose objects are identified by `ObjectRef`.

        Args:
            configs: Pairs of a URL prefix and its configuration, the most specific first; the last prefix is empty.
            budget: Memory budget of the prefetcher in bytes, if this process has no prefetcher yet.
        """
    @staticmethod
    def attach(
        owner: int, number: int, file: int, eventfd: int, manifest: NativeManifest | None = None
    ) -> ObjectSource:
        """Makes the source of another process available in this one.

        Args:
            owner: `owner` of the source.
            number: `number` of the source.
            file: Duplicate of the first of its `descriptors()`, valid in this process.
            eventfd: Duplicate of the second.
            manifest: The manifest of the source; None if its objects are identified by `ObjectRef`.
        """
    def descriptors(self) -> tuple[int, int]:
        """Returns the file descriptors of the arena and of its eventfd, to send them to a worker that does not inherit them.

        Raises:
            OSError: The program has closed them.
        """
    @property
    def owner(self) -> int:
        """`process_number()` of the owner."""
    @property
    def number(self) -> int:
        """Number of the source in its owner."""
    def announced(self) -> bool:
        """Returns whether announced objects were not read yet. In a process other than the owner always True."""
    def to_announce(self, keys: Sequence[int] | Sequence[ObjectRef]) -> list[tuple[int, int]]:
        """Returns objects in the form of `Announcer.announce`, which must be called next. Empty in a process other than the owner.

        Args:
            keys: As for `read`.
        """
    def read(self, keys: Sequence[int] | Sequence[ObjectRef], return_errors: bool = False) -> list[Any]:
        """Reads objects concurrently, with the GIL released. In a worker, the owner reads them.

        Args:
            keys: Indices of objects in the manifest, or a list of `ObjectRef` if the source has no manifest.
            return_errors: Whether the list contains an exception for each object that could not be read, instead of
                raising the first one.

        Returns:
            An `ObjectReader` for each object.

        Raises:
            IndexError: An index is out of range.
            StoreError: An object could not be read, unless `return_errors`.
            RuntimeError: In a worker: the owner has exited, or has more than 256 workers.
        """
    def charges(self, indices: Sequence[int]) -> list[int]:
        """Returns the memory in bytes that each object takes of the budget; an estimate if its size is unknown.

        Args:
            indices: Indices of objects in the manifest.

        Raises:
            IndexError: The source has no manifest.
        """

@final
class SourceIterator:
    """Reads objects of a source and announces later ones, in the owner or in a worker. Dropping it cancels its announcements.

    Args:
        source: The source of the objects.
    """

    def __new__(cls, source: ObjectSource) -> Self: ...
    def read(
        self, keys: Sequence[int] | Sequence[ObjectRef], ahead: Sequence[int] | Sequence[ObjectRef]
    ) -> list[ObjectReader | Exception]:
        """Announces objects that will be read later, and reads others.

        Args:
            keys: The objects to read, as for `ObjectSource.read`.
            ahead: The objects to announce, after those that were announced before.

        Returns:
            For each object of `keys` an `ObjectReader`, or the exception if it could not be read.

        Raises:
            IndexError, RuntimeError: As `ObjectSource.read`.
        """
    def budget(self) -> int:
        """Returns the memory budget of the owner in bytes."""

@final
class Announcer:
    """Announces objects that an iterator of a loader will read, to the prefetcher of this process. Dropping it cancels its
    announcements.

    Args:
        loader: Number of the loader, which this process assigned; 0 for none.

    Raises:
        RuntimeError: This process has no prefetcher.
    """

    def __new__(cls, loader: int = 0) -> Self: ...
    def announce(self, objects: Sequence[tuple[int, int]]) -> None:
        """Announces objects in the order in which they will be read. Does nothing in a forked child.

        Args:
            objects: Pairs of the number of a source and the index of an object.
        """
    def pending(self) -> tuple[int, int]:
        """Returns the bytes of announced objects that were not read yet, and the memory budget. The first is 0 in a forked child."""
    def limit_by_memory(self) -> None:
        """Records that no more is announced, until the next call of `announce`, because `pending` reached its part of the budget."""
    def requested(self) -> int:
        """Returns the number of announced objects that were requested. 0 in a forked child."""
    def cancel(self) -> None:
        """Cancels the announcements of objects that were not read yet."""

@final
class NativeBlocks:
    """Recycled memory for the batches that DataLoader workers build. The process that creates this object owns the memory.

    Raises:
        RuntimeError: This process has no prefetcher.
    """

    def __new__(cls) -> Self: ...
    @staticmethod
    def attach(owner: int, file: int, eventfd: int) -> NativeBlocks:
        """The same memory, in a worker started by spawn or forkserver.

        Args:
            owner: `process_number()` of the owner.
            file: Descriptor of the arena.
            eventfd: Descriptor of its eventfd.
        """
    @property
    def owner(self) -> int:
        """`process_number()` of the owner."""
    def descriptors(self) -> tuple[int, int]:
        """File descriptors of the arena and of its eventfd, for `attach`.

        Raises:
            OSError: The program has closed them.
        """
    def block(self, size: int, preferred: int, worker: int) -> Buffer | None:
        """Requests memory of `preferred` bytes, or of `size` bytes if that is more or the limits of the owner do not allow the
        former. Its content is undefined.

        Args:
            size: Number of bytes that are needed.
            preferred: Number of bytes of a larger block.
            worker: Number of this worker, for `reclaim`.

        Returns:
            A buffer. It is returned to the owner when it and all of its views are deleted. None if the limits do not allow
            it, or the owner has exited.
        """
    def reclaim(self, workers: list[int]) -> None:
        """Recycles the blocks that workers had offered and that will not be adopted.

        Args:
            workers: Numbers of workers that have exited.
        """
    @staticmethod
    def contains(address: int) -> bool:
        """Returns whether an address is within a block of which this process has views."""

def offer(buffer: Buffer) -> tuple[int, int, int] | None:
    """Offers the memory of a buffer to the owner of its arena, without a copy.

    Returns:
        `(owner, segment, generation)`, the arguments of `adopt` in the owner. None if the buffer must be copied, because it is
        not in an arena, or this process can still write to it.
    """

def adopt(owner: int, segment: int, generation: int) -> Buffer:
    """Takes over the memory of a buffer that a worker offered to this process.

    Args:
        owner: `process_number()` of the owner of the arena, which must be this process.
        segment: Id of the segment.
        generation: Generation of the segment.

    Returns:
        A buffer with that memory if the worker has dropped its own, and with a copy otherwise.

    Raises:
        RuntimeError: Another process is the owner, or the buffer was taken over already.
    """

def start_prefetcher(budget: int) -> None:
    """Starts the prefetcher of this process, if it has none.

    Args:
        budget: Memory budget in bytes.

    Raises:
        OSError: The arena could not be allocated.
        StoreError: The runtime could not be started.
    """

def prefetch_stats(loader: int | None = None) -> dict[str, Any]:
    """Returns the counters and the memory of the prefetcher of this process; an empty dict if it has none.

    Args:
        loader: Number of a loader, which this process assigned: the counters are its own. None: they are those of the process.
    """

def process_number() -> int:
    """Returns a number that identifies this process.

    No other process of the machine has it, also not one that gets the same process id later. A forked child has its own.
    """

def process_id(number: int) -> int:
    """Returns the process id of a process.

    Args:
        number: `process_number()` of the process.
    """

def request_stats() -> dict[str, Any]:
    """Returns the metrics of the requests of this process, by all of its clients; a forked child starts at zero.

    Returns:
        Numbers by name. `requests` has the number of attempts by operation and outcome, in the order of `outcomes`; `first_byte`,
        `body`, `reads` and `others` have the number of durations, their sum, and their 50th, 90th and 99th percentiles, in seconds.
    """

def enter_loader(loader: int) -> int:
    """Counts the reads of this thread, in the process of a loader, as those of this loader.

    Args:
        loader: Number that this process assigned; 0 for none.

    Returns:
        The previous number.
    """

def work_for_loader(loader: int) -> None:
    """Counts the reads of this process, a worker, as those of a loader.

    Args:
        loader: Number that the process of the loader assigned.
    """

def remove_loader(loader: int) -> None:
    """Deletes the counters of a loader.

    Args:
        loader: Number that this process assigned.
    """

def release_free_memory() -> None:
    """Releases the memory of the prefetcher of this process that is not in use."""

@final
class NativeGather:
    """Uploads an object that consists of pieces of memory, without joining them first.

    `close` commits the object. `abort` cancels the upload, and so does an error, or dropping the gather before `close`. The
    memory of a piece is shared until it is sent: it must not change before `close` returns.

    Args:
        store: The store of the object.
        key: Key of the object.
        attributes: Headers and metadata of the object.
        overwrite: Whether an existing object may be replaced.
        if_version: The version that is replaced.
        limit_bytes: Maximum number of bytes of pieces in flight. None: the pieces do not count, and the write buffer of
            the store's configuration limits the copies of small pieces.
    """
    def __new__(
        cls,
        store: NativeStore,
        key: str,
        attributes: Attributes,
        overwrite: bool = True,
        if_version: str | None = None,
        limit_bytes: int | None = None,
    ) -> Self: ...
    def write(self, pieces: Sequence[Any]) -> None:
        """Writes pieces.

        Args:
            pieces: A `bytes` object is a literal. Any other contiguous buffer is a record, whose CRC-32 is computed. An
                int is replaced by the CRC-32 of the record with that number, in 4 bytes; a pair of ints by the CRC-32 of
                the records `first..end`.

        Raises:
            ValueError: The upload has ended.
            StoreError: A part could not be written; the upload is aborted.
        """
    def close(self) -> tuple[str, int, int]:
        """Commits the object.

        Returns:
            Version, size in bytes and CRC-32 of the object.
        """
    def abort(self) -> None:
        """Aborts the upload; the object does not change. Does nothing in a forked child, because the upload belongs to its parent."""

@final
class Cancellation:
    """Cancels the calls of threads that have entered it, now and later: each raises SystemExit, which ends its thread. It is
    cancelled as well if the thread that made it has entered one that is.
    """

    def __new__(cls) -> Self: ...
    def enter(self) -> None:
        """Enters it, for the rest of the thread."""

    def cancel(self) -> None:
        """Cancels the calls."""

@final
class CredentialAnswer:
    """Receives the result of one call of a `credential_provider`. Only the first result is used."""
    def credentials(
        self,
        access_key_id: str | None,
        secret_access_key: str | None,
        token: str | None,
        expires_at: float | None,
    ) -> None:
        """Sends the credentials that the callable returned. `expires_at` is in seconds since 1970; None: never."""
    def error(self, message: str) -> None:
        """Sends the message of an exception that the callable raised."""

@final
class NativeWriter:
    """Writes an object as a stream, in parts if it is large.

    `close` commits the object. `abort` cancels the upload, and so does dropping the writer before `close`.

    Args:
        store: The store of the object.
        key: Key of the object.
        attributes: Headers and metadata of the object.
        overwrite: Whether an existing object may be replaced.
        if_version: The version that is replaced.
    """
    def __new__(
        cls,
        store: NativeStore,
        key: str,
        attributes: Attributes,
        overwrite: bool = True,
        if_version: str | None = None,
    ) -> Self: ...
    def write(self, data: Any) -> int:
        """Writes all bytes of a buffer. Waits for parts to be sent while the write buffer is full.

        Args:
            data: A contiguous buffer. The writer does not use it after the call.

        Returns:
            Number of bytes of `data`.

        Raises:
            ValueError: The writer is closed.
            StoreError: A part could not be written.
        """
    def close(self) -> str:
        """Commits the object and returns its version."""
    def abort(self) -> None:
        """Aborts the upload; the object does not change. Does nothing in a forked child, because the writer belongs to its parent."""

@final
class TarIndexer:
    """Finds the positions of the members of a tar shard, for an index, by reading ranges with its headers.

    The bodies of large members are skipped. Samples and formats are those of `TarReader`; the shard must not be compressed,
    and its names must be UTF-8.

    Args:
        url: URL of the shard, for messages.
        size: Size of the shard in bytes.

    Example:
        >>> import io, tarfile
        >>> file = io.BytesIO()
        >>> with tarfile.open(fileobj=file, mode="w") as tar:
        ...     tar.addfile(tarfile.TarInfo("images/001.txt"))
        >>> shard = file.getvalue()
        >>> indexer = TarIndexer("s3://bucket/shard.tar", len(shard))
        >>> while part := indexer.next():
        ...     indexer.feed(Buffer(shard[part[0] : part[1]]))
        >>> indexer.samples()
        [('images/001', 0, 512, [('txt', 512, 0)])]
    """

    def __new__(cls, url: str, size: int) -> Self: ...
    def feed(self, data: Buffer | ObjectReader) -> None:
        """Continues with the bytes of the range that `next` returned.

        Args:
            data: The bytes: a `Buffer`, or an `ObjectReader` of bytes in memory.

        Raises:
            TarError: The bytes are not a tar, a header is damaged, a member is sparse or ends after the shard, a name is
                longer than 64 KiB or not UTF-8, or an extension occurs twice in a sample. `samples` returns those before it.
            ConfigError: `data` is not as long as the range.
        """
    def next(self) -> tuple[int, int] | None:
        """Returns the range of the shard to read next, or None after the last member.

        Returns:
            Offset of the first byte, and offset after the last one.

        Raises:
            TarError: The shard is empty or ends in the middle; or as `feed`.
        """
    def samples(self) -> list[tuple[str, int, int, list[tuple[str, int, int]]]]:
        """Returns the samples that are complete, once.

        Returns:
            Key, offset of the first header, offset after the last member, and extension, offset and size in bytes of each
            member.
        """

@final
class TarReader:
    """Reads the samples of a tar shard from its bytes as they arrive.

    A sample is made of consecutive files whose names differ only in the extension, which is the part after the first dot of
    the file name, in lower case. Samples are equal to those of the `webdataset` package. Folders, links, files without an
    extension and metadata (`__name__` or in a folder of such a name) are skipped. Names are UTF-8; other bytes become
    surrogates (`surrogateescape`).

    The shard may be v7, ustar, GNU or pax. It ends with a block of zeros, or between two members. What follows the block of
    zeros is ignored. Sparse members are refused, and so are global pax headers that set the path or the size of all members.

    Not thread-safe.

    Args:
        url: URL of the shard, for `__url__` and for messages.
        compression: `"gzip"` or `"zstd"`; None: not compressed.
        position: Offset of the header to start with, in bytes: that of a sample, `begin` or `end`. Must be 0 for a compressed
            shard.

    Raises:
        ConfigError: `compression` is unknown, or `position` is not an offset of a header.

    Example:
        >>> import io, tarfile
        >>> file = io.BytesIO()
        >>> with tarfile.open(fileobj=file, mode="w") as tar:
        ...     tar.addfile(tarfile.TarInfo("images/001.txt"))
        >>> reader = TarReader("s3://bucket/shard.tar")
        >>> [(begin, end, key, sample)] = reader.push(Buffer(file.getvalue()))
        >>> begin, end, key, sorted(sample)
        (0, 512, 'images/001', ['__key__', '__url__', 'txt'])
    """

    def __new__(cls, url: str, compression: str | None = None, position: int = 0) -> Self: ...
    @property
    def pending(self) -> bool:
        """Whether `push` of an empty buffer would continue: bytes of a compressed shard are not yet decompressed."""
    def finish(self) -> list[tuple[int, int, str, dict[str, Any] | Exception]]:
        """Ends the shard.

        Returns:
            The remaining samples, as `push`; of a compressed shard all that were pending.

        Raises:
            TarError: The shard is empty or ends in the middle of a member, of a header or of the compressed bytes; or as
                `push`.
        """
    def push(self, data: Buffer | ObjectReader) -> list[tuple[int, int, str, dict[str, Any] | Exception]]:
        """Continues with the next bytes of the shard. They may end anywhere.

        The buffers of a sample share the memory of `data`; only those of members that span several calls, or of a compressed
        shard, have their own. The memory lives until all of them are deleted.

        Decompresses about 64 MiB at most. While `pending` is true, call it again with an empty buffer for the rest.

        Args:
            data: The bytes: a `Buffer`, or an `ObjectReader` of bytes in memory.

        Returns:
            The samples that became complete: offset of the first header, offset after the last member, key, and a dict of
            `__key__`, `__url__`, and a `Buffer` by extension. Offsets are those after decompression. If an extension occurs
            twice in a sample, a `TarError` takes the place of the dict.

        Raises:
            TarError: The bytes are not a tar, a header or the compressed bytes are damaged, a member is sparse, a name is
                longer than 64 KiB, or a sample has more than 256 MiB and than 100 times its compressed bytes. If samples became
                complete before, these are returned, and the next call raises the error.
        """
