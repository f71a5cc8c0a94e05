"""Iterable datasets: yield the objects in order, read ahead, and divide them among ranks and workers on request."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch.utils.data
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from torchobj import _torchobj
from torchobj._torchobj import ObjectReader
from torchobj.config import StoreConfig
from torchobj.config.checks import check_kinds
from torchobj.datasets import undivided
from torchobj.datasets.base import PerObjectDataset
from torchobj.datasets.failures import OnIterableError
from torchobj.datasets.listing import OnChange, PrefixListing
from torchobj.datasets.passes import PassDataset, PassIterator
from torchobj.datasets.samples import ReadSample, Sample_co, Samples
from torchobj.manifest import Manifest
from torchobj.manifest.manifest import key_filter
from torchobj.ranks import broadcast
from torchobj.ranks.sample_ranks import SampleRanks, callers
from torchobj.ranks.sharding import Shard, Uneven, in_order, shuffled
from torchobj.reading.reader_constructor import ReaderConstructor

__all__ = ["ObjectIterableDataset"]

#: The module of torch in which a DataLoader starts a pass.
_FETCHER = "torch.utils.data._utils.fetch"


class ObjectIterableDataset(PerObjectDataset[Sample_co], PassDataset[Sample_co]):
    """An iterable dataset of the objects under a prefix, of named objects, or of a manifest, in order or shuffled.

    Objects are read ahead by one process for all its DataLoader workers. Each worker announces the objects that it
    needs next, within its part of the memory budget (`torchobj.set_memory_budget`).

    The prefix is listed once, when first needed. A first pass without workers, ranks and `shuffle` yields samples
    during the listing; otherwise the listing is completed first, under torch.distributed by rank 0 for all ranks.
    Spawned workers, and all workers of a `torchobj.DataLoader`, receive the listing from their parent. With other
    loaders, access `dataset.manifest` before the loop: otherwise each forked worker lists by itself, logs a warning,
    and reads through its own connections.

    Args:
        source: The URL of a prefix, `s3://bucket/prefix/`, `gs://bucket/prefix/`, `file:///folder/` or
            `memory://name/prefix`; the prefix is compared as a string. Or URLs of objects, as for `from_objects`, or a
            `Manifest`, as for `from_manifest`.
        transform: Converts a reader to a sample. None: the sample is the reader.
        glob: Pattern for the part of a key after the prefix. `*` matches within a path component, `**` across them.
        suffixes: Selects keys that end with this suffix, or with any of several.
        limit: Maximum number of objects, the first in key order.
        on_change: What to do if an object has another version or size than in the listing or the manifest: `raise` an
            `ObjectChangedError`, or `accept` the object as it is now.
        allow_empty: Whether a prefix or manifest without any object is a dataset without samples, and logged. False: it
            is an error at the first use, on all ranks; a rank or worker without objects of its own is none.
        config: Settings of the store.
        enable_sharding: Whether to divide the objects: each rank gets every n-th object, and each DataLoader worker
            every n-th of those. False: each process yields all objects. None: as False, and a warning if several ranks
            do so by a DataLoader. The ranks are those of torch.distributed when
            iteration starts; if a loader that Accelerate has prepared iterates, which divides the samples itself, there
            is one rank, and in a Trainer of Lightning its strategy determines them.
        rank, world_size: The rank of this process and the number of ranks, instead of those; `rank=0, world_size=1` if
            something else divides. They imply `enable_sharding=True`.
        mesh: A `DeviceMesh`, instead of `rank` and `world_size`. Ranks that differ only in dimensions for parts of the
            model, such as `tp`, `cp` and `pp`, get the same samples. Dimensions with names such as `dp`, `fsdp`,
            `dp_replicate` and `data_parallel` divide them; pass `mesh["name"]` to divide by one of another name.
        shuffle: Whether to shuffle, in an order that depends on `seed` and the epoch only. Each pass has the order of
            the next epoch, unless `set_epoch` is called.
        seed: Seed of the order; 0 or more.
        uneven: With `enable_sharding`, what to do if the objects do not divide evenly among ranks: `drop` leaves out
            the rest, `pad` repeats some of the first ones; then all ranks yield the same number of samples, and with
            the same number of workers the same number of batches. None: the numbers differ by one.
        on_error: Action for a sample that cannot be read or transformed: `raise`, after which iteration can continue;
            `skip`; or a callable that receives index, URL and exception and returns a sample. The first failure of each
            process is logged.
        reader_constructor: Kind of reader for `transform`, from `S3ReaderConstructor`. None: `sequential()`.

    Attributes:
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.
        shuffle, seed, uneven, on_error: The arguments. They can be assigned, with effect from the next `iter`;
            persistent workers keep the values that they were started with.

    Raises:
        ConfigError: An argument is invalid. No request is sent here.
        ObjectNotFoundError: At the first use: there are no objects; with the nearest keys. See `allow_empty`.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://voices")
        >>> for key in ("train/b", "train/a", "test/c"):
        ...     _ = store.put(key, key.encode())
        >>> dataset = ObjectIterableDataset("memory://voices/train/", transform=lambda reader: reader.read())
        >>> list(dataset)
        [b'train/a', b'train/b']
    """

    shuffle: bool = False
    uneven: Uneven

    def __init__(
        self,
        source: str | Iterable[str] | Manifest,
        *,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        glob: str | None = None,
        suffixes: str | Sequence[str] | None = None,
        limit: int | None = None,
        on_change: OnChange = "raise",
        allow_empty: bool = False,
        config: StoreConfig | None = None,
        enable_sharding: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        shuffle: bool = False,
        seed: int = 0,
        uneven: Uneven = None,
        on_error: OnIterableError = "raise",
        reader_constructor: ReaderConstructor | None = None,
    ) -> None:
        ranks = SampleRanks.of(enable_sharding, rank, world_size, mesh, by_default=False)
        chosen = key_filter(glob, suffixes, limit)
        options = {"chosen": chosen, "on_change": on_change, "allow_empty": allow_empty}
        self._set_up(source, transform, config, reader_constructor, **options)
        self._set_up_passes(on_error, ranks)
        self.shuffle, self.seed, self.uneven = shuffle, seed, uneven
        self._check()

    _construct = __init__

    @override
    def prepare(self) -> None:
        # Workers inherit the listing, and announce by themselves.
        len(self.manifest)

    def _options(self) -> list[str]:
        order = f"shuffle=True, seed={self.seed}" if self.shuffle else "shuffle=False"
        return [order, f"enable_sharding={self._ranks.is_divided}", f"epoch {self._epoch.next()}"]

    def _check(self) -> None:
        check_kinds(self, "True or False", (bool,), "shuffle")
        super()._check()

    def __iter__(self) -> Iterator[Sample_co]:
        self._check()
        self._warn_of_repeated_samples(self._listing.name)
        if self._is_of_loader():
            self.note_whole_pass()
        shard, epoch, samples = self._shard(), self._pass_epoch(), Samples(self._sample_source, self._failures)
        listing, is_whole = self._listing, shard == Shard() and not self.shuffle
        if isinstance(listing, PrefixListing) and is_whole and (pages := listing.pages()) is not None:
            position = self._starting_position(self._shape(shard, None), epoch)
            listed = _read_while_listing(samples, listing, pages, position["done"])
            return PassIterator(self, position, listed, samples.sample)
        reader = listing.reader()
        objects = len(reader.manifest)
        broadcast.confirm()
        position = self._starting_position(self._shape(shard, objects), epoch)
        order = shuffled(objects, self.seed, epoch) if self.shuffle else in_order(objects)
        left = shard.select(order, self.uneven)[position["done"] :]
        return PassIterator(self, position, samples.read_in_order(left, reader), samples.sample)

    @override
    def _is_countable(self) -> bool:
        running = self._running_position
        is_listing = running is not None and running["shape"].get("objects", 0) is None
        return self._listing.is_found or not (is_listing or broadcast.in_job())

    @override
    def _lengths(self, shards: Sequence[Shard], epoch: int) -> list[int]:
        objects = len(self._listing.manifest())
        return [len(shard.positions(objects, self.uneven)) for shard in shards]

    def note_whole_pass(self) -> None:
        """Warns once if several ranks yield all objects, and the caller has not said so. Before workers are started."""
        if self._ranks.is_chosen:
            return
        advice = (
            "enable_sharding=True to divide them among ranks and workers, or enable_sharding=False if that is intended"
        )
        undivided.note_pass(self, advice, samples=self._listing.named, recorded=self._rank)

    def _is_of_loader(self) -> bool:
        """Whether a DataLoader iterates over this dataset, and not over another one that contains it."""
        if (worker := torch.utils.data.get_worker_info()) is not None:
            return worker.dataset is self
        return any(module == _FETCHER and frame.f_locals.get("dataset") is self for module, frame in callers())

    def _shape(self, shard: Shard, objects: int | None) -> dict[str, Any]:
        """The parameters of a pass, on which its position depends. `objects` is None during the listing."""
        shape: dict[str, Any] = {
            "objects": objects,
            "world_size": shard.world_size,
            "workers": shard.workers,
            "shuffle": self.shuffle,
            "uneven": self.uneven,
        }
        digest = self._listing.digest()
        return shape if digest is None else shape | {"manifest": digest}


def _read_while_listing(
    samples: Samples[int], listing: PrefixListing, pages: "_torchobj.ManifestPages", begin: int
) -> Iterator[ReadSample]:
    """The objects of a listing in progress, from number `begin` on, page by page in its order."""
    before = 0
    for page in pages:
        skipped = min(len(page), max(0, begin - before))
        order = in_order(len(page))[skipped:]
        for position, keys, readers, reader in samples.read_in_order(order, listing.reader_of(Manifest(page))):
            yield before + position, keys, readers, reader
        before += len(page)
    listing.keep(Manifest(pages.whole()))
