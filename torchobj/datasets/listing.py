"""The objects of a dataset: a prefix that is listed once, when first needed, shards, a manifest, or named objects.

`listing_of` chooses the class of a listing.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from typing_extensions import override

from torchobj import _torchobj
from torchobj.config import Prefix, StoreConfig, file_for, resolve, store_config
from torchobj.config.checks import check
from torchobj.exceptions import ConfigError, ObjectNotFoundError
from torchobj.manifest import Manifest
from torchobj.manifest.manifest import KeyFilter
from torchobj.ranks import broadcast
from torchobj.reading.reader import ManifestReader
from torchobj.reading.reader_constructor import SEQUENTIAL, ReaderConstructor
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


class ListingOptions(NamedTuple):
    """The arguments of `listing_of` besides the source."""

    parse: Callable[[str], Url]
    config: StoreConfig
    chosen: KeyFilter
    pinned: bool
    """Whether an object must have the size and version of the listing."""
    allow_empty: bool
    kind: ReaderConstructor


def _by_bucket(urls: Iterable[str], config: StoreConfig, parse: Callable[[str], Url]) -> dict[str, StoreConfig]:
    """The configurations of the buckets of objects, by the base of their URLs, such as `s3://bucket`.

    Raises:
        ConfigError: A URL names no object; or different prefixes of the file apply to objects of one bucket.
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


class Listing:
    """The objects of a dataset. A subclass finds those of one kind of source.

    They are found once, at the first use, and pickled with the dataset. Pickling for a process that is being spawned
    finds them first. A forked DataLoader worker inherits them if its parent has them. Under torch.distributed rank 0
    finds them for all ranks.

    Args:
        name: Describes the objects in messages; the same on every rank.
        options: The arguments of the dataset.
        configs: The configurations of the objects, as far as they are known, by the base of their URLs.
    """

    #: What the first use does, in messages.
    action = "finds the shards"
    #: Whether the caller passed a manifest, whose digest is in the states of a loader.
    is_given = False
    #: Identifies objects that the caller has named, which may differ from rank to rank; empty for others.
    named = ""
    #: Describes the names below prefixes that are not data, in the process that listed.
    skipped = ""
    _advice = ""
    _manifest: Manifest | None = None
    _reader: ManifestReader | None = None
    #: Identifies the process group whose ranks agree on the objects.
    _agreed_in: str | None = None

    def __init__(self, name: str, options: ListingOptions, configs: Mapping[str, StoreConfig]) -> None:
        self.name, self.config, self._options, self._configs = name, options.config, options, configs
        self._lock = process.ProcessLock()

    def _load(self) -> Manifest:
        """Finds the objects."""
        raise NotImplementedError

    def _configs_of(self, manifest: Manifest) -> Mapping[str, StoreConfig]:
        """The configurations of the stores of the objects, once these are known."""
        config, parse = self._options.config, self._options.parse
        urls: Iterable[str] = (f"{base}/-" for base in manifest.bases())
        if any(prefix.is_below_bucket for prefix in file_for(config).settings):
            urls = map(manifest.url, range(len(manifest)))
        return _by_bucket(urls, config, parse)

    @property
    def configs(self) -> list[StoreConfig]:
        """The configurations of the stores of the objects."""
        return list(self._configs.values()) or [self.config]

    @property
    def schemes(self) -> set[str]:
        """The schemes of the objects; that of the file, for a manifest that is not loaded yet."""
        return {base.partition("://")[0] for base in self._configs}

    @property
    def is_found(self) -> bool:
        """Whether the objects are known, and the ranks of the job agree on them."""
        return self._manifest is not None and broadcast.is_current(self._agreed_in)

    def manifest(self) -> Manifest:
        """The objects. The first call finds them; every call ensures that the ranks of the job agree on them.

        Raises:
            ObjectNotFoundError: There are no objects at all, and `allow_empty` is False; on every rank.
            ManifestMismatchError: Ranks that had listed before torch.distributed was initialised listed other objects,
                or were given other manifests.
        """
        return self.reader().manifest

    def reader(self) -> ManifestReader:
        """Reads the objects, which are found as by `manifest`. Workers that are started later inherit it."""
        if self._reader is not None and process.in_worker():
            # The ranks have agreed on what it inherited.
            return self._reader
        manifest = self.objects()
        if self._reader is None:
            with self._lock:
                self._reader = self._reader or self.reader_of(manifest)
        self._reader.source()
        return self._reader

    def reader_of(self, manifest: Manifest) -> ManifestReader:
        """Reads the objects of a part of the listing."""
        return ManifestReader(manifest, self._configs, self.config, self._options.kind, pinned=self._options.pinned)

    def objects(self, *, warns: bool = True) -> Manifest:
        """As `manifest`, for a dataset that reads the objects by reference and not through `reader`.

        Args:
            warns: Whether a DataLoader worker warns that it repeats the listing.
        """
        if self._manifest is not None and broadcast.is_current(self._agreed_in):
            return self._manifest
        with self._lock:
            if self._manifest is None:
                if warns and process.is_first_to_repeat("listing"):
                    logger.warning(BY_WORKERS, self.name, self.action)
                with process.logged_once(f"listing of {self.name}"):
                    found = broadcast.broadcast(self.name, self._load, Manifest)
                self._configs = self._configs_of(found)
                self._manifest = found
            elif not broadcast.is_current(self._agreed_in):
                broadcast.compare(self.name, self._manifest, is_given=self.is_given)
            self._agreed_in = broadcast.nonce()
            return self._manifest

    def _checked(self, manifest: Manifest) -> Manifest:
        if len(manifest) == 0:
            described = f"{self.name}: no objects{self._advice}"
            if not self._options.allow_empty:
                raise ObjectNotFoundError(f"{described}{self.nearest()}; {ALLOWED}")
            logger.warning("%s", described)
        return manifest

    def nearest(self) -> str:
        """Names existing keys near the prefix, in the message of an error."""
        return ""

    def digest(self) -> str | None:
        """The digest of the manifest that was given; None for other objects."""
        return self.objects().digest() if self.is_given else None

    def __repr__(self) -> str:
        verb = "loaded" if self.is_given else "listed"
        found = f"not {verb} yet" if self._manifest is None else f"{len(self._manifest)} objects"
        return ", ".join(filter(None, (self.name, found, self.skipped)))

    def __getstate__(self) -> dict[str, Any]:
        if process.is_pickling_for_spawn():
            self.manifest()
        # A process that unpickles this is a worker of the job, or belongs to another job: the agreement stays valid.
        return self.__dict__


class PrefixListing(Listing):
    """The objects below a prefix that a filter selects."""

    _advice = "; check the prefix and the filters; percent-encoding is not decoded"

    def __init__(self, url: str, options: ListingOptions) -> None:
        self._url, options = options.parse(url), options._replace(config=resolve(url, options.config))
        glob, suffixes, limit = options.chosen
        given = {"glob": glob, "suffixes": suffixes or None, "limit": limit}
        chosen = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        name = f"{self._url} with {chosen}" if chosen else str(self._url)
        super().__init__(name, options, {self._url.base: options.config})
        self.action = "lists the prefix" if self._url.key else "lists the bucket"

    @property
    def _place(self) -> "tuple[_torchobj.NativeStore, str, str]":
        url = self._url
        return _torchobj.NativeStore(url.scheme, url.bucket, self.config), url.base, url.key

    @override
    def _load(self) -> Manifest:
        return self._checked(Manifest(_torchobj.NativeManifest.from_listing(*self._place, *self._options.chosen)))

    @override
    def _configs_of(self, manifest: Manifest) -> Mapping[str, StoreConfig]:
        return self._configs

    def pages(self) -> "_torchobj.ManifestPages | None":
        """The pages of the listing as they arrive, each once. None if the listing exists, or if other ranks or workers
        need it too. Call `keep` at the end.
        """
        if self._manifest is not None or process.in_worker() or broadcast.in_job():
            return None
        return _torchobj.ManifestPages(*self._place, *self._options.chosen)

    def keep(self, manifest: Manifest) -> None:
        """Keeps the whole of `pages`, so that the listing is not repeated."""
        with self._lock:
            self._manifest = self._manifest or self._checked(manifest)

    @override
    def nearest(self) -> str:
        return nearest_keys(self._place[0], self._url)


class ShardListing(Listing):
    """The shards of names and patterns."""

    def __init__(self, shards: Shards, options: ListingOptions) -> None:
        self._shards, others = shards, len(shards.urls) - 1
        super().__init__(shown_url(shards.urls[0]) + (f" and {others} more" if others else ""), options, {})

    @override
    def _load(self) -> Manifest:
        found = find_shards(self._shards.urls, self.config, self._shards.suffixes)
        self.skipped = str(found)
        return found.manifest


class GivenListing(Listing):
    """The objects of a manifest that the caller passed."""

    is_given = True

    def __init__(self, manifest: Manifest, options: ListingOptions) -> None:
        super().__init__("the manifest of the dataset", options, {})
        self._manifest, self._configs = manifest, self._configs_of(manifest)

    @override
    def objects(self, *, warns: bool = True) -> Manifest:
        # Ranks compare it first, so that all of them raise.
        manifest = super().objects(warns=warns)
        return manifest if self._options.allow_empty else self._checked(manifest)


class FileListing(Listing):
    """The objects of a manifest in a file."""

    is_given = True
    action = "loads it"

    def __init__(self, file: ManifestFile, options: ListingOptions) -> None:
        self._file = file.url
        super().__init__(f"the manifest {shown_url(file.url)}", options, {canonical_url(file.url): options.config})

    @override
    def _load(self) -> Manifest:
        return self._checked(Manifest.load(self._file, config=self.config))


class NamedListing(Listing):
    """Objects that the caller named, on each rank by itself: nothing is listed, and nothing is shared."""

    def __init__(self, named: Iterable[str], options: ListingOptions) -> None:
        # An iterable is consumed here, as s3torchconnector does.
        urls = [canonical_url(url) for url in named]
        super().__init__(f"{len(urls)} objects by name", options, _by_bucket(urls, options.config, options.parse))
        self._named, self.named = Manifest.from_urls(urls), f"{urls[0]} {urls[-1]}" if urls else ""

    @property
    @override
    def is_found(self) -> bool:
        return True

    @override
    def objects(self, *, warns: bool = True) -> Manifest:
        return self._named

    def __repr__(self) -> str:
        return self.name


#: By the type of the source; URLs of objects are in any iterable.
_KINDS: dict[type, Callable[[Any, ListingOptions], Listing]] = {
    str: PrefixListing,
    Manifest: GivenListing,
    ManifestFile: FileListing,
    Shards: ShardListing,
}


def listing_of(
    source: Objects | Shards,
    parse: Callable[[str], Url],
    config: StoreConfig | None,
    *,
    chosen: KeyFilter = (None, [], None),
    on_change: OnChange = "raise",
    allow_empty: bool = True,
    kind: ReaderConstructor = SEQUENTIAL,
) -> Listing:
    """The listing of the arguments of a dataset.

    Args:
        source: The objects.
        parse: Parses a URL of the dataset's schemes.
        config: Settings of the stores.
        chosen: Selects objects below a prefix.
        on_change: Whether an object that has changed since it was listed is an error.
        allow_empty: Whether no objects at all are logged, rather than an error. Named objects may always be none.
        kind: Kind of the readers.

    Raises:
        ConfigError: An argument is invalid, or a filter is given without a prefix.
    """
    if any(chosen) and not isinstance(source, str):
        raise ConfigError("glob, suffixes, limit: select objects below a prefix; pass the URL of one, or none of them")
    is_known = isinstance(source, (*_KINDS, Iterable))
    check("source", source, "the URL of a prefix, URLs of objects, or a torchobj.Manifest", ok=is_known)
    check("on_change", on_change, "'raise' or 'accept'", ok=on_change in ("raise", "accept"))
    check("allow_empty", allow_empty, "True or False", ok=isinstance(allow_empty, bool))
    kinds = [each for known, each in _KINDS.items() if isinstance(source, known)]
    create: Callable[[Any, ListingOptions], Listing] = kinds[0] if kinds else NamedListing
    return create(source, ListingOptions(parse, store_config(config), chosen, on_change == "raise", allow_empty, kind))
