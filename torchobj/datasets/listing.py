"""The objects of a dataset: a prefix that is listed once, when first needed, a manifest, or named objects."""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from torchobj import _torchobj
from torchobj.config import (
    Prefix,
    StoreConfig,
    file_for,
    resolve,
    store_config,
)
from torchobj.config.checks import check
from torchobj.exceptions import ConfigError, ObjectNotFoundError
from torchobj.manifest import Manifest
from torchobj.manifest.manifest import KeyFilter
from torchobj.ranks import broadcast
from torchobj.reading.reader import ManifestReader
from torchobj.shards.shard_urls import find_shards
from torchobj.store.nearest_keys import nearest_keys
from torchobj.urls import Url, canonical_url, shown_url
from torchobj.workers import process

logger = logging.getLogger("torchobj")

#: What to do if an object has another version than the listing.
OnChange = Literal["raise", "accept"]

#: How an empty listing is no error.
ALLOWED = "pass allow_empty=True if a dataset without samples is wanted"

#: Forked workers inherit a listing only if the sampler or the user accessed the dataset before the fork.
BY_WORKERS = (
    "%s: each DataLoader worker %s itself, and again in each epoch without persistent_workers; call "
    "len(dataset), or dataset.prepare() of an iterable dataset, before the loop to do so once for all workers"
)


class ManifestFile(NamedTuple):
    """A manifest in a file, which is loaded at the first use."""

    url: str


class Shards(NamedTuple):
    """Names, braces, globs and prefixes of shards, and the suffixes of shards below a prefix, as for `find_shards`."""

    urls: list[str]
    suffixes: tuple[str, ...]


#: The URL of a prefix, URLs of objects, or a manifest.
Objects = str | Iterable[str] | Manifest | ManifestFile


def _by_bucket(urls: Iterable[str], config: StoreConfig, parse: Callable[[str], Url]) -> dict[str, StoreConfig]:
    """The configurations of the buckets of objects, by the base of their URLs, such as `s3://bucket`.

    Raises:
        ConfigError: As `resolve`; or a URL names no object; or different prefixes of the file apply to objects of one
            bucket.
    """
    file = file_for(config)
    is_divided = any(prefix.is_below_bucket for prefix in file.settings)
    first: dict[str, str] = {}
    for url in urls:
        parsed = parse(url)
        if not parsed.key:
            raise ConfigError(f"url={url!r}: names no object")
        other = first.setdefault(parsed.base, url)
        if is_divided and file.longest(url) != file.longest(other):
            raise ConfigError(
                f"url={url!r}: {_described(file.longest(url))} of {file.path} applies to it, and "
                f"{_described(file.longest(other))} to {other!r} in the same bucket. A dataset of named objects uses "
                "one configuration for each bucket: create a dataset for each prefix and combine them, for example "
                "with torch.utils.data.ConcatDataset"
            )
    return {base: resolve(url, config) for base, url in first.items()}


def _described(prefix: Prefix | None) -> str:
    return "no prefix" if prefix is None else f"the prefix {prefix}"


def _configs_of(manifest: Manifest, config: StoreConfig, parse: Callable[[str], Url]) -> dict[str, StoreConfig]:
    """The configurations of the stores of a manifest, by the base of their URLs."""
    urls: Iterable[str] = (f"{base}/-" for base in manifest.bases())
    if any(prefix.is_below_bucket for prefix in file_for(config).settings):
        urls = (manifest.url(index) for index in range(len(manifest)))
    return _by_bucket(urls, config, parse)


class DatasetListing:
    """The objects of a dataset.

    A prefix is listed once, at the first use, and the listing is pickled with the dataset; a manifest file is loaded
    once. Pickling for a process that is being spawned lists or loads first. A forked DataLoader worker inherits a
    listing from before the fork. Under torch.distributed rank 0 lists or loads for all ranks. A dataset of named
    objects lists nothing and shares nothing.

    Args:
        config: The argument of the call.
        parse: Parses a URL of the dataset's schemes.
        source: The objects.
        chosen: Selects objects below the prefix.
        on_change: Whether an object that has changed since it was listed is an error.
        allow_empty: Whether no objects at all are logged, rather than an error. Named objects may always be none.
    """

    def __init__(
        self,
        config: StoreConfig | None,
        parse: Callable[[str], Url],
        source: str | list[str] | Manifest | ManifestFile | Shards,
        chosen: KeyFilter = (None, [], None),
        on_change: OnChange = "raise",
        *,
        allow_empty: bool = True,
    ) -> None:
        check("on_change", on_change, "'raise' or 'accept'", ok=on_change in ("raise", "accept"))
        check("allow_empty", allow_empty, "True or False", ok=isinstance(allow_empty, bool))
        self._source = [canonical_url(named) for named in source] if isinstance(source, list) else source
        self._url = parse(source) if isinstance(source, str) else None
        config = store_config(config)
        self.config = resolve(source, config) if isinstance(source, str) else config
        self._filter = chosen
        self._parse = parse
        #: Describes the names below prefixes that are not data, in the process that listed.
        self.skipped = ""
        self._manifest = source if isinstance(source, Manifest) else None
        self.is_of_manifest = isinstance(source, (Manifest, ManifestFile))
        self._allow_empty = allow_empty
        #: Whether an object must have the size and version of the listing.
        self._pinned = on_change == "raise"
        #: By the base of their URLs, the configurations of named objects, and of those of a manifest.
        self._configs = _by_bucket(self._source if isinstance(self._source, list) else [], config, parse)
        if self._manifest is not None:
            self._configs = _configs_of(self._manifest, config, parse)
        #: Identifies the process group whose ranks agree on the objects.
        self._agreed_in: str | None = None
        self._reader: ManifestReader | None = None
        self._lock = process.ProcessLock()

    @classmethod
    def of(
        cls,
        source: Objects | Shards,
        parse: Callable[[str], Url],
        config: StoreConfig | None,
        *,
        chosen: KeyFilter = (None, [], None),
        on_change: OnChange = "raise",
        allow_empty: bool = True,
    ) -> "DatasetListing":
        """From the arguments of a dataset.

        Raises:
            ConfigError: An argument is invalid, or a filter is given without a prefix.
        """
        if any(chosen) and not isinstance(source, str):
            raise ConfigError(
                "glob, suffixes, limit: select objects below a prefix; pass the URL of one, or none of them"
            )
        if not isinstance(source, (str, Manifest, ManifestFile, Shards)):
            is_known = isinstance(source, Iterable)
            check("source", source, "the URL of a prefix, URLs of objects, or a torchobj.Manifest", ok=is_known)
            # An iterable is consumed here, as s3torchconnector does.
            source = list(source)
        return cls(config, parse, source, chosen, on_change, allow_empty=allow_empty)

    @property
    def configs(self) -> list[StoreConfig]:
        """The configurations of the stores of the objects."""
        return list(self._configs.values()) or [self.config]

    @property
    def schemes(self) -> set[str]:
        """The schemes of the objects; that of the file, for a manifest that is not loaded yet."""
        bases = list(self._configs) if self._url is None else [self._url.base]
        if isinstance(self._source, ManifestFile) and self._manifest is None:
            bases = [canonical_url(self._source.url)]
        return {base.partition("://")[0] for base in bases}

    def manifest(self) -> Manifest:
        """The objects. The first call lists or loads; every call ensures that the ranks of the job agree on them.

        Raises:
            ObjectNotFoundError: There are no objects at all, and `allow_empty` is False; on every rank.
            ManifestMismatchError: Ranks that had listed before torch.distributed was initialised listed other objects,
                or were given other manifests.
        """
        return self.reader().manifest

    def reader(self) -> ManifestReader:
        """Reads the objects, which are listed or loaded as by `manifest`. Workers that are started later inherit it."""
        manifest = self.objects()
        if self._reader is None:
            with self._lock:
                self._reader = self._reader or self.reader_of(manifest)
        self._reader.source()
        return self._reader

    def reader_of(self, manifest: Manifest) -> ManifestReader:
        """Reads the objects of a part of the listing."""
        return ManifestReader(manifest, self._configs, self.config, pinned=self._pinned)

    @property
    def name(self) -> str:
        """Describes the listing in messages; the same on every rank."""
        source = self._source
        if isinstance(source, ManifestFile):
            return f"the manifest {shown_url(source.url)}"
        if isinstance(source, Shards):
            first, others = shown_url(source.urls[0]), len(source.urls) - 1
            return first + (f" and {others} more" if others else "")
        if isinstance(source, Manifest):
            return "the manifest of the dataset"
        if isinstance(source, list):
            return f"{len(source if self._manifest is None else self._manifest)} objects by name"
        glob, suffixes, limit = self._filter
        given = {"glob": glob, "suffixes": suffixes or None, "limit": limit}
        chosen = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        return f"{self._url} with {chosen}" if chosen else str(self._url)

    @property
    def _action(self) -> str:
        """What the first use does, in messages."""
        if isinstance(self._source, ManifestFile):
            return "loads it"
        if isinstance(self._source, Shards):
            return "finds the shards"
        return "lists the prefix" if self._url is not None and self._url.key else "lists the bucket"

    @property
    def named(self) -> str:
        """Identifies objects that the caller has named, which may differ from rank to rank; empty for others."""
        source = self._source
        if self._is_shared or not isinstance(source, list):
            return ""
        urls = (
            source if self._manifest is None else [self._manifest.url(index) for index in (0, len(self._manifest) - 1)]
        )
        return f"{urls[0]} {urls[-1]}" if urls else ""

    def __repr__(self) -> str:
        if not self._is_shared:
            return self.name
        action = "loaded" if isinstance(self._source, ManifestFile) else "listed"
        found = f"not {action} yet" if self._manifest is None else f"{len(self._manifest)} objects"
        return ", ".join(filter(None, (self.name, found, self.skipped)))

    @property
    def _is_shared(self) -> bool:
        """Whether ranks and workers must agree on the objects: not if the caller named them."""
        return not isinstance(self._source, list)

    def objects(self, *, warns: bool = True) -> Manifest:
        """As `manifest`, for a dataset that reads the objects by reference and not through `reader`.

        Args:
            warns: Whether a DataLoader worker warns that it repeats the listing.
        """
        manifest = self._agreed(warns=warns)
        # Ranks have compared a manifest that was given before, so that all of them raise.
        return self._checked(manifest) if self.is_of_manifest and not self._allow_empty else manifest

    def _agreed(self, *, warns: bool) -> Manifest:
        if self._manifest is not None and (not self._is_shared or broadcast.is_current(self._agreed_in)):
            return self._manifest
        with self._lock:
            if isinstance(self._source, list):
                self._manifest = self._manifest or Manifest.from_urls(self._source)
            elif self._manifest is None:
                name = self.name
                if warns and process.is_first_to_repeat("listing"):
                    logger.warning(BY_WORKERS, name, self._action)
                with process.logged_once(f"listing of {name}"):
                    found = broadcast.broadcast(name, self._load, Manifest)
                if self._url is None:
                    self._configs = _configs_of(found, self.config, self._parse)
                self._manifest, self._agreed_in = found, broadcast.nonce()
            elif not broadcast.is_current(self._agreed_in):
                broadcast.compare(self.name, self._manifest, is_given=self.is_of_manifest)
                self._agreed_in = broadcast.nonce()
            return self._manifest

    def _load(self) -> Manifest:
        """Lists the prefix, or loads the file."""
        if isinstance(self._source, ManifestFile):
            return self._checked(Manifest.load(self._source.url, config=self.config))
        if isinstance(self._source, Shards):
            found = find_shards(self._source.urls, self.config, self._source.suffixes)
            self.skipped = str(found)
            return found.manifest
        assert self._url is not None  # noqa: S101  the only other kind that is not in memory
        listed = _torchobj.NativeManifest.from_listing(self._store(), self._url.base, self._url.key, *self._filter)
        return self._checked(Manifest(listed))

    def _store(self) -> "_torchobj.NativeStore":
        assert self._url is not None  # noqa: S101  of a prefix
        return _torchobj.NativeStore(self._url.scheme, self._url.bucket, self.config)

    def pages(self) -> "_torchobj.ManifestPages | None":
        """The pages of the listing as they arrive, each once. None if the listing exists, or if other ranks or workers
        need it too. Call `keep` at the end.
        """
        if self._url is None or self._manifest is not None or process.in_worker() or broadcast.in_job():
            return None
        return _torchobj.ManifestPages(self._store(), self._url.base, self._url.key, *self._filter)

    def keep(self, pages: "_torchobj.ManifestPages") -> None:
        """Keeps the listing that `pages` produced, so that it is not repeated."""
        with self._lock:
            if self._manifest is None:
                self._manifest = self._checked(Manifest(pages.whole()))

    def _checked(self, manifest: Manifest) -> Manifest:
        if len(manifest) == 0:
            described = f"{self.name}: no objects"
            if self._url is not None:
                described += "; check the prefix and the filters; percent-encoding is not decoded"
            if not self._allow_empty:
                raise ObjectNotFoundError(f"{described}{self.nearest()}; {ALLOWED}")
            logger.warning("%s", described)
        return manifest

    def nearest(self) -> str:
        """Names existing keys near the prefix, in the message of an error."""
        return "" if self._url is None else nearest_keys(self._store(), self._url)

    def digest(self) -> str | None:
        """The digest of the manifest that was given; None for a prefix and for named objects."""
        return self.objects().digest() if self.is_of_manifest else None

    def __getstate__(self) -> dict[str, Any]:
        if process.is_pickling_for_spawn():
            self.manifest()
        # A process that unpickles this is a worker of the job, or belongs to another job: the agreement stays valid.
        is_named = self._manifest is not None and isinstance(self._source, list)
        return self.__dict__ | {"_source": []} if is_named else self.__dict__
