"""Iterable datasets: yield the objects in order, read ahead, and divide them among ranks and workers on request."""

import dataclasses
import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch.utils.data
from typing_extensions import override

from torchobj._torchobj import ObjectReader
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.config.checks import check, check_kinds
from torchobj.datasets import worker_process
from torchobj.datasets.base import ListingDataset, Sample_co, Transform, UrlByIndex
from torchobj.datasets.errors import OnIterableError, check_iterable_on_error, log_failed_sample
from torchobj.datasets.listing import Listing, OnChange
from torchobj.datasets.read_ahead import IndexedReader, read_ahead, read_while_listing
from torchobj.datasets.reader_constructor import ReaderConstructor
from torchobj.datasets.sharding import Shard, Uneven, in_order, shuffled
from torchobj.datasets.shared_values import SharedEpoch
from torchobj.exceptions import ConfigError
from torchobj.manifest import Manifest, key_filter

__all__ = ["ObjectIterableDataset"]

logger = logging.getLogger("torchobj")


@dataclasses.dataclass
class _Progress:
    """The position of an iterator."""

    seed: int
    epoch: int
    #: Number of objects of its shard that are done: their samples were yielded or skipped.
    done: int
    #: Parameters that must be the same on resume, because `done` counts the objects of this shard.
    shape: dict[str, Any]


#: The numbers of a state.
_COUNTS = ("seed", "epoch", "done")


def _checked_count(name: str, value: Any) -> int:
    """Returns the int of a number, which may be one of NumPy."""
    number = operator.index(value) if hasattr(value, "__index__") else -1
    check(name, value, "an int, 0 or more", ok=number >= 0)
    return number


class ObjectIterableDataset(ListingDataset[Sample_co], torch.utils.data.IterableDataset[Sample_co]):
    """An iterable dataset of the objects under a prefix, in key order or shuffled.

    Objects are read ahead by one process for all its DataLoader workers. Each worker announces the objects that it
    needs next, within its part of the memory budget (`torchobj.set_memory_budget`).

    The prefix is listed once, when first needed. A first pass without workers, ranks and `shuffle` yields samples
    during the listing; otherwise the listing is completed first, under torch.distributed by rank 0 for all ranks.
    Spawned workers, and all workers of a `torchobj.DataLoader`, receive the listing from their parent. With other
    loaders, access `dataset.manifest` before the loop: otherwise each forked worker lists by itself, logs a warning,
    and reads through its own connections.

    Args:
        url: `s3://bucket/prefix/`, `gs://bucket/prefix/`, `file:///folder/` or `memory://name/prefix`; the prefix is
            compared as a string.
        transform: Converts a reader to a sample. None: the sample is the reader.
        glob: Pattern for the part of a key after the prefix. `*` matches within a path component, `**` across them.
        suffixes: Selects keys that end with this suffix, or with any of several.
        limit: Maximum number of objects, the first in key order.
        region, endpoint_url: Override those of `config`.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        enable_sharding: Whether to divide the objects: each rank of torch.distributed gets every n-th object, and each
            DataLoader worker every n-th of those. Rank and world size are read when iteration starts. False: each
            process yields all objects.
        shuffle: Whether to shuffle, in an order that depends on `seed` and the epoch only. See `set_epoch`.
        seed: Seed of the order; 0 or more.
        uneven: With `enable_sharding`, what to do if the objects do not divide evenly among ranks: `drop` leaves out
            the rest, `pad` repeats some of the first ones; then all ranks yield the same number of samples, and with
            the same number of workers the same number of batches. None: the numbers differ by one.
        on_error: Action for a sample that cannot be read or transformed: `raise`, after which iteration can continue;
            `skip`; or a callable that receives index, URL and exception and returns a sample. The first failure of each
            process is logged.

    Attributes:
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.
        shuffle, seed, uneven, on_error: The arguments. They can be assigned, with effect from the next `iter`;
            persistent workers keep the values that they were started with.

    Raises:
        ConfigError: An argument is invalid. No request is sent here.

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
    seed: int = 0
    uneven: Uneven = None
    on_error: OnIterableError = "raise"
    _enable_sharding = False
    _of_scheme: ClassVar[dict[str, str]] = {"": "ObjectIterableDataset"}

    def __init__(
        self,
        url: str,
        *,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        glob: str | None = None,
        suffixes: str | Sequence[str] | None = None,
        limit: int | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        enable_sharding: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        uneven: Uneven = None,
        on_error: OnIterableError = "raise",
    ) -> None:
        chosen = store_config(config, region, endpoint_url, url=url)
        listing = Listing(chosen, self._parse, url=url, chosen=key_filter(glob, suffixes, limit))
        self._set_up(listing, transform, None)
        self._with_order(enable_sharding, shuffle, seed, uneven, on_error)

    @classmethod
    @override
    def from_prefix(
        cls,
        url: str,
        *,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        glob: str | None = None,
        suffixes: str | Sequence[str] | None = None,
        limit: int | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        enable_sharding: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        uneven: Uneven = None,
        on_error: OnIterableError = "raise",
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        dataset = super().from_prefix(
            url,
            transform=transform,
            glob=glob,
            suffixes=suffixes,
            limit=limit,
            region=region,
            endpoint_url=endpoint_url,
            config=config,
            reader_constructor=reader_constructor,
        )
        return dataset._with_order(enable_sharding, shuffle, seed, uneven, on_error)

    @classmethod
    @override
    def from_objects(
        cls,
        urls: str | Iterable[str],
        *,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        enable_sharding: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        uneven: Uneven = None,
        on_error: OnIterableError = "raise",
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        dataset = super().from_objects(
            urls,
            transform=transform,
            region=region,
            endpoint_url=endpoint_url,
            config=config,
            reader_constructor=reader_constructor,
        )
        return dataset._with_order(enable_sharding, shuffle, seed, uneven, on_error)

    @classmethod
    @override
    def from_manifest(
        cls,
        manifest: Manifest | str | os.PathLike[str],
        *,
        on_change: OnChange = "raise",
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        enable_sharding: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        uneven: Uneven = None,
        on_error: OnIterableError = "raise",
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        dataset = super().from_manifest(
            manifest, on_change=on_change, transform=transform, config=config, reader_constructor=reader_constructor
        )
        return dataset._with_order(enable_sharding, shuffle, seed, uneven, on_error)

    def _set_up(
        self, listing: Listing, transform: Transform | None, reader_constructor: ReaderConstructor | None
    ) -> None:
        super()._set_up(listing, transform, reader_constructor)
        self._epoch = SharedEpoch()
        self._rank: worker_process.Rank | None = None
        # Of the iterator that was started last in this process.
        self._progress: _Progress | None = None
        # The start of the next iterator, if it is of that epoch.
        self._resumed: _Progress | None = None

    def _options(self) -> list[str]:
        order = f"shuffle=True, seed={self.seed}" if self.shuffle else "shuffle=False"
        return [order, f"enable_sharding={self._enable_sharding}", f"epoch {self._epoch.get()}"]

    def _check(self) -> None:
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"seed={self.seed!r}: must be an int, 0 or more")
        check_kinds(self, "True or False", (bool,), "shuffle")
        if self.uneven not in (None, "drop", "pad"):
            raise ConfigError(f"uneven={self.uneven!r}: must be 'drop', 'pad' or None")
        if self.uneven and not self._enable_sharding:
            raise ConfigError(
                f"uneven={self.uneven!r}: needs enable_sharding=True; without it each rank yields all objects"
            )
        check_iterable_on_error(self.on_error, even=self.uneven is not None)

    def _with_order(
        self,
        enable_sharding: bool,  # noqa: FBT001
        shuffle: bool = False,  # noqa: FBT001, FBT002
        seed: int = 0,
        uneven: Uneven = None,
        on_error: OnIterableError = "raise",
    ) -> Self:
        check("enable_sharding", enable_sharding, "True or False", ok=isinstance(enable_sharding, bool))
        self._enable_sharding = enable_sharding
        self.shuffle, self.seed, self.uneven, self.on_error = shuffle, seed, uneven, on_error
        self._check()
        return self

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration. With `shuffle` each epoch has its own order.

        It also applies to persistent workers. Without a call, the next iteration repeats the epoch.

        Raises:
            ConfigError: `epoch` is negative or not an int.
        """
        self._epoch.set(_checked_count("epoch", epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position of the iterator that was started last in this process, for `load_state_dict`.

        In a DataLoader worker it is the position of the worker; torchdata's `StatefulDataLoader` collects and restores
        these. Under torch.distributed it is valid for all ranks that have yielded the same number of samples.
        """
        epoch = self._epoch.get()
        progress = self._resumed or self._progress
        if progress is None or (progress.epoch != epoch and not worker_process.in_worker()):
            progress = _Progress(self.seed, epoch, 0, {})
        return dataclasses.asdict(progress)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration yield the rest of the epoch, each sample once.

        Also sets seed and epoch. If `set_epoch` then sets another epoch, that epoch starts from its beginning.

        Raises:
            ConfigError: `state` is not from `state_dict`. When iteration starts: it is of other objects, ranks or
                workers.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"state={type(state)}: must be a dict from state_dict")
        seed, epoch, done = (_checked_count(f"{name} of the state", state.get(name)) for name in _COUNTS)
        shape = state.get("shape")
        if not isinstance(shape, Mapping):
            raise ConfigError(f"shape of the state={shape!r}: must be a dict")
        self._resumed = _Progress(seed, epoch, done, {**shape})
        self.seed = self._resumed.seed
        self._epoch.set(self._resumed.epoch)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if worker_process.is_pickling_for_spawn():
            # torch.distributed is not initialised in a spawned worker.
            state["_rank"] = worker_process.rank(self._rank)
        return state

    def _shard(self) -> Shard:
        """The shard of this rank and worker, read now: torch.distributed may have been initialised since."""
        if not self._enable_sharding:
            return Shard()
        info = torch.utils.data.get_worker_info()
        return Shard(*worker_process.rank(self._rank), *((0, 1) if info is None else (info.id, info.num_workers)))

    def _warn_of_repeated_samples(self) -> None:
        """Warns once if each DataLoader worker yields all objects, which is almost always a mistake."""
        worker = torch.utils.data.get_worker_info()
        # A wrapper of the dataset may divide the samples among the workers.
        if worker is None or worker.num_workers == 1 or self._enable_sharding or worker.dataset is not self:
            return
        if worker.id == 0 and self._epoch.is_first_warning():
            logger.warning(
                "%s: each of %d DataLoader workers yields all objects, so that every sample is returned %d times; pass "
                "enable_sharding=True to divide the objects among the workers",
                self._listing.name,
                worker.num_workers,
                worker.num_workers,
            )

    def __iter__(self) -> Iterator[Sample_co]:
        self._check()
        self._warn_of_repeated_samples()
        shard, epoch, kind = self._shard(), self._epoch.get(), self._reader_constructor
        pages = self._listing.pages() if shard == Shard() and not self.shuffle else None
        if pages is not None:
            progress = self._start_progress(shard, epoch, None)
            return _SampleIterator(self, pages, read_while_listing(self._listing, pages, kind, progress.done), progress)
        manifest = self._listing.manifest()
        progress = self._start_progress(shard, epoch, len(manifest))
        order = shuffled(len(manifest), self.seed, epoch) if self.shuffle else in_order(len(manifest))
        readers = read_ahead(self._listing, shard.select(order, self.uneven)[progress.done :], kind)
        return _SampleIterator(self, manifest, readers, progress)

    def _start_progress(self, shard: Shard, epoch: int, objects: int | None) -> _Progress:
        """The progress of a new pass, at the loaded state if that is of this epoch."""
        shape: dict[str, Any] = {
            # Not known during the listing.
            "objects": objects,
            "world_size": shard.world_size,
            "workers": shard.workers,
            "shuffle": self.shuffle,
            "uneven": self.uneven,
        }
        if (digest := self._listing.digest()) is not None:
            shape["manifest"] = digest
        resumed, self._resumed = self._resumed, None
        done = 0 if resumed is None or resumed.epoch != epoch else resumed.done
        if resumed is not None and done:
            unknown = {"objects": None} if None in (objects, resumed.shape.get("objects")) else {}
            if resumed.shape | unknown != shape | unknown:
                raise ConfigError(
                    f"state of {resumed.shape}: cannot be resumed with {shape}: samples would be lost or repeated"
                )
        self._progress = _Progress(self.seed, epoch, done, shape)
        return self._progress


class _SampleIterator(Iterator[Any]):
    """Iterates over the samples of one pass. An exception of a sample does not end the pass."""

    def __init__(
        self, dataset: ObjectIterableDataset, urls: UrlByIndex, readers: Iterator[IndexedReader], progress: _Progress
    ) -> None:
        self._dataset, self._urls, self._readers, self._progress = dataset, urls, readers, progress

    def __next__(self) -> Any:
        dataset = self._dataset
        for index, reader in self._readers:
            self._progress.done += 1
            try:
                return dataset._transformed(self._urls, index, reader)
            except Exception as error:
                dataset._failed.add()
                if dataset.on_error == "raise":
                    raise
                url = self._urls.url(index)
                if dataset.on_error == "skip":
                    log_failed_sample(index, url, error, "skipped")
                    continue
                sample = dataset.on_error(index, url, error)
                log_failed_sample(index, url, error)
                return sample
        raise StopIteration

    def close(self) -> None:
        """Ends the pass and drops the objects that were read ahead."""
        self._readers = iter(())
