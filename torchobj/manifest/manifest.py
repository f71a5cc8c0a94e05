"""`Manifest`: a compact list of objects, from a listing, from URLs or from a file. Does not import torch.

The native class holds the objects in memory; `parquet` reads and writes the tables of files; `datasets` reads the
objects and passes manifests to workers.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from typing_extensions import override

from torchobj._torchobj import ManifestPages, NativeManifest, NativeStore
from torchobj.config import StoreConfig, resolve
from torchobj.config.checks import check
from torchobj.manifest import parquet
from torchobj.store.file_objects import ObjectWriter
from torchobj.store.reads import get_many
from torchobj.store.transfers import ProgressOption, counters_to
from torchobj.urls import parse_url

__all__ = ["KeyFilter", "Manifest", "key_filter", "url_of_file"]

#: Pattern, suffixes and maximum number of objects of a listing.
KeyFilter = tuple[str | None, list[str], int | None]


def key_filter(glob: str | None, suffixes: str | Sequence[str] | None, limit: int | None) -> KeyFilter:
    """The checked filter of a listing.

    Raises:
        ConfigError: An argument is invalid.
    """
    if limit is not None:
        check("limit", limit, "1 or more", ok=hasattr(limit, "__index__") and limit is not True and limit > 0)
    check("glob", glob, "a pattern, such as '*.jpg'", ok=glob is None or isinstance(glob, str))
    chosen = [suffixes] if isinstance(suffixes, str) else suffixes or []
    is_list = isinstance(chosen, Sequence) and all(isinstance(suffix, str) for suffix in chosen)
    check("suffixes", suffixes, "a string or a list of strings", ok=is_list)
    return glob, list(chosen), limit


def url_of_file(path_or_url: str | os.PathLike[str]) -> str:
    """The URL of a file that is given by its URL or local path.

    Raises:
        ConfigError: It is neither.
    """
    is_text = isinstance(path_or_url, str) and path_or_url != ""
    check("path_or_url", path_or_url, "a path or a URL", ok=is_text or isinstance(path_or_url, os.PathLike))
    if isinstance(path_or_url, str) and "://" in path_or_url:
        return path_or_url
    return f"file://{Path(path_or_url).absolute()}"


class Manifest(NativeManifest):
    """A compact, immutable list of objects with their sizes and versions.

    10 million numbered keys of 24 bytes take about 0.13 GB, keys included; each ETag adds 16 bytes. `dataset.manifest`
    is one. DataLoader workers share its memory, however they were started. `bytes(manifest)` serializes it. Manifests
    are equal if their objects are.

    Args:
        data: A manifest serialized by `bytes(manifest)`.

    Raises:
        ValueError: `data` is not a manifest.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://numbers")
        >>> for key in ("train/1", "train/2", "test/1"):
        ...     _ = store.put(key, b"abc")
        >>> manifest = Manifest.from_prefix("memory://numbers/train/")
        >>> manifest.save("memory://numbers/train.parquet")
        >>> loaded = Manifest.load("memory://numbers/train.parquet")
        >>> loaded == manifest, len(loaded), loaded.url(1), loaded.entry(1)[2]
        (True, 2, 'memory://numbers/train/2', 3)
    """

    __slots__ = ()

    @classmethod
    def from_prefix(
        cls,
        url: str,
        *,
        glob: str | None = None,
        suffixes: str | Sequence[str] | None = None,
        limit: int | None = None,
        progress: ProgressOption = None,
        config: StoreConfig | None = None,
    ) -> Self:
        """Lists the objects under a prefix, in key order.

        Args:
            url: `s3://bucket/prefix/`, `gs://bucket/prefix/`, `file:///folder/` or `memory://name/prefix`.
            glob: Pattern for the part of a key after the prefix. `*` matches within a path component, `**` across them.
            suffixes: Selects keys that end with this suffix, or with any of several.
            limit: Maximum number of objects, the first in key order.
            progress: Receives a `torchobj.files.Progress` after each page and at the end: number of the selected
                objects and their bytes. True shows a bar on stderr. An exception that it raises ends the listing.
            config: Settings of the store.

        Raises:
            ConfigError: An argument is invalid.
            StoreError: The listing failed.
        """
        parsed, chosen = parse_url(url), key_filter(glob, suffixes, limit)
        store = NativeStore(parsed.scheme, parsed.bucket, resolve(url, config))
        report = counters_to(progress)
        if report is None:
            return cls(NativeManifest.from_listing(store, parsed.base, parsed.key, *chosen))
        pages, count, size = ManifestPages(store, parsed.base, parsed.key, *chosen), 0, 0
        for page in pages:
            count, size = count + len(page), size + sum(page.entry(index)[2] or 0 for index in range(len(page)))
            report(count, None, size, None, 0)
        report(count, count, size, size, 0)
        return cls(pages.whole())

    @staticmethod
    @override
    def from_urls(urls: Iterable[str]) -> "Manifest":
        """Makes a manifest of objects, in this order, without their sizes and versions.

        Args:
            urls: URLs of objects.

        Raises:
            ConfigError: One of them is not a URL.
        """
        return Manifest(NativeManifest.from_urls(urls))

    def save(self, path_or_url: str | os.PathLike[str], *, config: StoreConfig | None = None) -> None:
        """Writes the manifest as a Parquet file, which replaces an existing one when it is complete.

        pandas, pyarrow and DuckDB read it as a table with the columns `base`, such as `s3://bucket`, `key`, `size` in
        bytes and `version`; size and version are null if they are unknown. Needs pyarrow: `pip install
        torchobj[manifest]`.

        Args:
            path_or_url: A local path, or the URL of an object.
            config: Settings of the store.

        Raises:
            ConfigError: pyarrow is not installed, or the URL does not name an object.
            StoreError: The file cannot be written.
        """
        parquet.check_installed()
        with ObjectWriter(url_of_file(path_or_url), config=config) as file:
            parquet.write(self, file)

    @classmethod
    def load(cls, path_or_url: str | os.PathLike[str], *, config: StoreConfig | None = None) -> Self:
        """Reads a file that `save` wrote. Lists nothing. Needs pyarrow: `pip install torchobj[manifest]`.

        A file in a bucket may name objects of any bucket, but no files or memory of this machine.

        Args:
            path_or_url: A local path, or the URL of an object.
            config: Settings of the store.

        Raises:
            ConfigError: pyarrow is not installed, or the URL does not name an object.
            ObjectNotFoundError: The file does not exist.
            ManifestError: The file is not a manifest of this format, is damaged, or names objects that it must not.
            StoreError: The file cannot be read.
        """
        parquet.check_installed()
        url = url_of_file(path_or_url)
        [data] = get_many([url], config=config)
        return cls(parquet.read(data, url))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (bytes(self),)
