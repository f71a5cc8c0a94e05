"""The objects of a dataset: a prefix that is listed once, when first needed, or named objects."""

import copy
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torchobj import _torchobj
from torchobj._torchobj import Manifest, ObjectReader
from torchobj.config import StoreConfig, by_bucket, resolved
from torchobj.config.checks import check
from torchobj.datasets import manifest_broadcast, prefetch_source, worker_process
from torchobj.datasets.reader_constructor import ReaderConstructor
from torchobj.exceptions import ConfigError
from torchobj.urls import Url, canonical_url, parse_url

logger = logging.getLogger("torchobj")

#: Forked workers inherit a listing only if the sampler or the user accessed the dataset before the fork.
_LISTED_BY_WORKERS = (
    "each DataLoader worker lists the prefix itself, and again in each epoch without persistent_workers; call "
    "len(dataset), or access dataset.manifest of an iterable dataset, before the loop to list once for all workers"
)


def _with_bases(urls: Iterable[str], parse: Callable[[str], Url]) -> Iterator[tuple[str, str]]:
    """The base of each URL, such as `s3://bucket`, with the URL."""
    for url in urls:
        parsed = parse(url)
        if not parsed.key:
            raise ConfigError(f"url={url!r}: names no object")
        yield parsed.base, url


class Listing:
    """The objects of a dataset.

    A prefix is listed once, at the first use, and the listing is pickled with the dataset. Pickling for a process that
    is being spawned lists first. A forked DataLoader worker inherits a listing from before the fork. Under
    torch.distributed rank 0 lists for all ranks. A dataset of named objects lists nothing and shares nothing.
    """

    def __init__(
        self,
        config: StoreConfig,
        parse: Callable[[str], Url],
        *,
        url: str | None = None,
        objects: Iterable[str] | None = None,
        glob: str | None = None,
        suffixes: str | Sequence[str] | None = None,
        limit: int | None = None,
    ) -> None:
        if limit is not None:
            check("limit", limit, "1 or more", ok=hasattr(limit, "__index__") and limit is not True and limit > 0)
        check("glob", glob, "a pattern, such as '*.jpg'", ok=glob is None or isinstance(glob, str))
        chosen = [suffixes] if isinstance(suffixes, str) else suffixes or []
        is_list = isinstance(chosen, Sequence) and all(isinstance(suffix, str) for suffix in chosen)
        check("suffixes", suffixes, "a string or a list of strings", ok=is_list)
        self._url = parse(url) if url is not None else None
        self.config = config if url is None else resolved(url, config)
        self._filter = (glob, list(chosen), limit)
        self._objects = None if objects is None else [canonical_url(named) for named in objects]
        #: By the base of their URLs, the configurations of named objects.
        self._configs = by_bucket(_with_bases(self._objects or [], parse), config)
        self._manifest: Manifest | None = None
        self._agreement: manifest_broadcast.Agreement | None = None
        self._stores: list[_torchobj.NativeStore] | None = None
        self._source: prefetch_source.Source[_torchobj.NativeSource] = prefetch_source.Source()
        # By process, because a lock may be held by another thread at the time of a fork.
        self._locks: dict[int, threading.Lock] = {}

    @property
    def configs(self) -> list[StoreConfig]:
        """The configurations of the stores of the objects."""
        return list(self._configs.values()) or [self.config]

    @property
    def is_gcs(self) -> bool:
        """Whether all objects are of Google Cloud Storage."""
        bases = list(self._configs) if self._url is None else [self._url.base]
        return bool(bases) and all(base.startswith("gs://") for base in bases)

    def manifest(self) -> Manifest:
        """The objects. The first call lists; every call ensures that the ranks of the job agree on the listing.

        Raises:
            ManifestMismatchError: Ranks that had listed before torch.distributed was initialised listed other objects.
        """
        manifest = self._listed()
        # Created before workers are forked, so that they inherit it.
        self.source(manifest)
        return manifest

    @property
    def name(self) -> str:
        """Describes the listing in messages; the same on every rank."""
        if self._url is None:
            return f"{len(self._manifest or self._objects or [])} objects by name"
        glob, suffixes, limit = self._filter
        given = {"glob": glob, "suffixes": suffixes or None, "limit": limit}
        chosen = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        return f"{self._url} with {chosen}" if chosen else str(self._url)

    def __repr__(self) -> str:
        if self._url is None:
            return self.name
        return f"{self.name}, {'not listed yet' if self._manifest is None else f'{len(self._manifest)} objects'}"

    def _listed(self) -> Manifest:
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            url = self._url
            if url is None:
                if self._manifest is None:
                    self._manifest = Manifest.from_urls(self._objects or [])
                return self._manifest
            name = self.name
            if self._manifest is None:
                if worker_process.in_worker():
                    logger.warning("%s: %s", name, _LISTED_BY_WORKERS)
                self._manifest, self._agreement = manifest_broadcast.broadcast(name, lambda: self._list(url, name))
            elif self._agreement is None:
                self._agreement = manifest_broadcast.compare(name, self._manifest)
            return self._manifest

    def pages(self) -> "_torchobj.ManifestPages | None":
        """The pages of the listing as they arrive, each once. None if the listing exists, or if other ranks or workers
        need it too. Call `keep` at the end.
        """
        if self._url is None or self._manifest is not None or worker_process.in_worker() or manifest_broadcast.in_job():
            return None
        store = _torchobj.NativeStore(self._url.scheme, self._url.bucket, self.config)
        return _torchobj.ManifestPages(store, self._url.base, self._url.key, *self._filter)

    def for_page(self, page: Manifest) -> "Listing":
        """A page of this listing, as a listing of its own."""
        part = copy.copy(self)
        part._url, part._manifest, part._source, part._locks = None, page, prefetch_source.Source(), {}
        return part

    def keep(self, pages: "_torchobj.ManifestPages") -> None:
        """Keeps the listing that `pages` produced, so that it is not repeated."""
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            if self._manifest is None:
                self._manifest = self._checked(pages.whole(), self.name)

    def _list(self, url: Url, name: str) -> Manifest:
        store = _torchobj.NativeStore(url.scheme, url.bucket, self.config)
        glob, suffixes, limit = self._filter
        return self._checked(Manifest.from_listing(store, url.base, url.key, glob, suffixes, limit), name)

    def _checked(self, manifest: Manifest, name: str) -> Manifest:
        if len(manifest) == 0:
            logger.warning(
                "%s: no objects; check the prefix and the filters; percent-encoding is not decoded",
                name,
            )
        return manifest

    def stores(self, manifest: Manifest) -> "list[_torchobj.NativeStore]":
        """A store for each of the manifest's bases, in its order."""
        if self._stores is None:
            urls = [parse_url(f"{base}/") for base in manifest.bases()]
            self._stores = [
                _torchobj.NativeStore(url.scheme, url.bucket, self._configs.get(url.base, self.config)) for url in urls
            ]
        return self._stores

    def source(self, manifest: Manifest) -> "_torchobj.NativeSource | None":
        """The objects as a source of the prefetcher; None if there is no prefetcher."""
        if not prefetch_source.SUPPORTED:
            return None
        native = _torchobj.NativeSource
        return self._source.native(
            lambda budget: native(manifest, self.stores(manifest), budget), partial(native.attach, manifest)
        )

    def source_number(self) -> int | None:
        """The number of the source in the prefetcher; None if this process has no prefetcher."""
        self.manifest()
        return self._source.number

    def readers(self, indices: list[int], kind: ReaderConstructor, *, return_errors: bool = False) -> list[Any]:
        """Readers of objects. Whole objects are read concurrently; announced objects may be in memory already.

        With `return_errors`, exceptions are returned in place of objects that cannot be read.
        """
        manifest = self.manifest()
        if not kind.whole:
            return [self._lazy(manifest, index, kind) for index in indices]
        prefetched = self.source(manifest)
        if prefetched is not None and prefetched.announced():
            return prefetched.read(indices, return_errors)
        return manifest.read(self.stores(manifest), indices, return_errors)

    def _lazy(self, manifest: Manifest, index: int, kind: ReaderConstructor) -> ObjectReader:
        base, key, _, _ = manifest.entry(index)
        store = self.stores(manifest)[manifest.bases().index(base)]
        bucket = parse_url(f"{base}/").bucket
        return ObjectReader.open(store, manifest.url(index), bucket, key, kind.jump_bytes, kind.ahead_bytes)

    def __getstate__(self) -> dict[str, Any]:
        if worker_process.is_pickling_for_spawn():
            self.manifest()
        # A process that unpickles this is a worker of the job, or belongs to another job: the agreement stays valid.
        state = {name: value for name, value in self.__dict__.items() if name not in ("_locks", "_stores")}
        if self._manifest is not None:
            state["_objects"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stores, self._locks = None, {}
