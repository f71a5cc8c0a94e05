"""What a dataset is made of: a prefix to be listed, or objects by name; listed once, when first needed."""

import copy
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torchobj import _torchobj
from torchobj._torchobj import Manifest, ObjectReader
from torchobj.config import StoreConfig
from torchobj.datasets import rendezvous, source, workers
from torchobj.datasets.readers import ReaderConstructor
from torchobj.exceptions import ConfigError
from torchobj.urls import SCHEMES, Url, parse_url

logger = logging.getLogger("torchobj")

#: Nothing of a DataLoader asks its dataset for anything before it forks, unless the sampler does.
_LISTED_BY_WORKERS = (
    "each DataLoader worker lists for itself, and again in each epoch without persistent_workers; len(dataset), or "
    "dataset.manifest of an iterable one, before the loop lists once for all"
)


def _parsed(url: str, schemes: tuple[str, ...], any_scheme: str) -> Url:
    """A URL of one of the schemes; the error for another that torchobj has names the class that takes it."""
    scheme = url.partition("://")[0] if isinstance(url, str) else ""
    if scheme in SCHEMES and scheme not in schemes:
        taken = " or ".join(f"{name}://" for name in schemes)
        raise ConfigError(f"url={url!r}: scheme {scheme!r}, expected {taken}; {any_scheme} takes {scheme}:// too")
    return parse_url(url, schemes)


class Listing:
    """The objects of a dataset.

    A prefix is listed by the first who needs it, once; pickled with the dataset from then on, and listed for a pickle
    that goes to a process that is being spawned. A forked DataLoader worker has what was listed before the fork. Under
    torch.distributed rank 0 lists for all ranks. Objects by name are each rank's own: nothing is listed, and nobody is
    waited for.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        url: str | None = None,
        objects: str | Iterable[str] | None = None,
        glob: str | None = None,
        suffixes: str | Sequence[str] | None = None,
        limit: int | None = None,
        schemes: tuple[str, ...],
        any_scheme: str,
    ) -> None:
        if limit is not None and limit < 1:
            raise ConfigError(f"limit={limit!r}: must be 1 or more")
        self._config = config
        self._url = _parsed(url, schemes, any_scheme) if url is not None else None
        self._filter = (glob, [suffixes] if isinstance(suffixes, str) else list(suffixes or []), limit)
        # An iterable is used up once, here, as s3torchconnector does.
        self._objects = [objects] if isinstance(objects, str) else None if objects is None else list(objects)
        for name in self._objects or []:
            if not _parsed(name, schemes, any_scheme).key:
                raise ConfigError(f"url={name!r}: names no object")
        self._manifest: Manifest | None = None
        self._agreed: rendezvous.Agreement | None = None
        self._stores: list[_torchobj.NativeStore] | None = None
        self._source: source.Source[_torchobj.NativeSource] = source.Source()
        # By process: a fork may catch it held by a thread that the child has not.
        self._locks: dict[int, threading.Lock] = {}

    def manifest(self) -> Manifest:
        """The objects. The first call lists; each sees to it that the ranks of the job agree on what is listed.

        Raises:
            ManifestMismatchError: Ranks that had listed before torch.distributed was initialised listed other objects.
        """
        manifest = self._listed()
        # Before workers are forked: what they inherit they need not ask for.
        self.source(manifest)
        return manifest

    @property
    def name(self) -> str:
        """What is listed, for messages; the same on every rank."""
        if self._url is None:
            return f"{len(self._manifest or self._objects or [])} objects by name"
        glob, suffixes, limit = self._filter
        given = {"glob": glob, "suffixes": suffixes or None, "limit": limit}
        chosen = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        return f"{self._url} with {chosen}" if chosen else str(self._url)

    def _listed(self) -> Manifest:
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            url = self._url
            if url is None:
                if self._manifest is None:
                    self._manifest = Manifest.from_urls(self._objects or [])
                return self._manifest
            name = self.name
            if self._manifest is None:
                if workers.in_worker():
                    logger.warning("%s: %s", name, _LISTED_BY_WORKERS)
                self._manifest, self._agreed = rendezvous.share(name, lambda: self._list(url, name))
            elif self._agreed is None:
                self._agreed = rendezvous.compare(name, self._manifest)
            return self._manifest

    def pages(self) -> "_torchobj.ManifestPages | None":
        """The pages of the listing as they come, each once; None where it is there, or somebody else needs it too.

        That are the other ranks of a job, and other workers. Whoever came to the end says so by `keep`.
        """
        if self._url is None or self._manifest is not None or workers.in_worker() or rendezvous.in_job():
            return None
        store = _torchobj.NativeStore(self._url.scheme, self._url.bucket, self._config)
        return _torchobj.ManifestPages(store, self._url.base, self._url.key, *self._filter)

    def of_page(self, page: Manifest) -> "Listing":
        """A page of this listing, as one of its own."""
        part = copy.copy(self)
        part._url, part._manifest, part._source, part._locks = None, page, source.Source(), {}
        return part

    def keep(self, pages: "_torchobj.ManifestPages") -> None:
        """Takes what was listed by pages for the listing: it is not made again."""
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            if self._manifest is None:
                self._manifest = self._checked(pages.whole(), self.name)

    def _list(self, url: Url, name: str) -> Manifest:
        store = _torchobj.NativeStore(url.scheme, url.bucket, self._config)
        glob, suffixes, limit = self._filter
        return self._checked(Manifest.from_listing(store, url.base, url.key, glob, suffixes, limit), name)

    def _checked(self, manifest: Manifest, name: str) -> Manifest:
        if len(manifest) == 0:
            logger.warning("%s: no objects; check the prefix and the filters: keys are compared as they are", name)
        return manifest

    def stores(self, manifest: Manifest) -> "list[_torchobj.NativeStore]":
        """A store for each of the manifest's bases, in its order."""
        if self._stores is None:
            urls = [parse_url(f"{base}/") for base in manifest.bases()]
            self._stores = [_torchobj.NativeStore(url.scheme, url.bucket, self._config) for url in urls]
        return self._stores

    def source(self, manifest: Manifest) -> "_torchobj.NativeSource | None":
        """The objects as a source of the prefetcher; None where there is none."""
        if not source.SUPPORTED:
            return None
        native = _torchobj.NativeSource
        return self._source.native(
            lambda budget: native(manifest, self.stores(manifest), budget), partial(native.attach, manifest)
        )

    def source_number(self) -> int | None:
        """The prefetcher's name for the source; None where there is none in this process."""
        self.manifest()
        return self._source.number

    def readers(self, indices: list[int], kind: ReaderConstructor, *, return_errors: bool = False) -> list[Any]:
        """Readers of objects. What is read whole is read at once, and what was announced is there sooner.

        With `return_errors` there is an exception in place of what could not be read.
        """
        manifest = self.manifest()
        if not kind.whole:
            return [self._lazy(manifest, index, kind) for index in indices]
        ahead = self.source(manifest)
        if ahead is not None and ahead.announced():
            return ahead.read(indices, return_errors)
        return manifest.read(self.stores(manifest), indices, return_errors)

    def _lazy(self, manifest: Manifest, index: int, kind: ReaderConstructor) -> ObjectReader:
        base, key, _, _ = manifest.entry(index)
        store = self.stores(manifest)[manifest.bases().index(base)]
        bucket = parse_url(f"{base}/").bucket
        return ObjectReader.open(store, manifest.url(index), bucket, key, kind.jump_bytes, kind.ahead_bytes)

    def __getstate__(self) -> dict[str, Any]:
        if workers.is_for_a_new_process():
            self.manifest()
        # A process that unpickles this is a worker of the job, or another job: what was agreed stays agreed.
        state = {name: value for name, value in self.__dict__.items() if name not in ("_locks", "_stores")}
        if self._manifest is not None:
            state["_objects"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stores, self._locks = None, {}
