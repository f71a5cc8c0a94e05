"""Iterable datasets: objects one after the other, read ahead, split over ranks and workers on request."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch.utils.data

from torchobj._torchobj import ObjectReader
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.datasets import workers
from torchobj.datasets.ahead import Reading, read_ahead, read_while_listing
from torchobj.datasets.base import Named, OverObjects, Sample_co, Transform, identity
from torchobj.datasets.errors import OnErrorInARow, check_on_error_in_a_row, say_failed
from torchobj.datasets.listing import Listing
from torchobj.datasets.readers import ReaderConstructor
from torchobj.datasets.share import Share, Uneven, in_order, shuffled
from torchobj.datasets.shared import Epoch
from torchobj.exceptions import ConfigError
from torchobj.urls import SCHEMES

__all__ = ["ObjectIterableDataset", "S3IterableDataset"]

logger = logging.getLogger("torchobj")


@dataclasses.dataclass
class _Progress:
    """How far an iterator is."""

    seed: int
    epoch: int
    #: Objects of its share that are done: samples of which were yielded, or skipped.
    done: int
    #: What must be the same where it goes on: `done` means nothing in another share.
    shape: dict[str, Any]


class ObjectIterableDataset(OverObjects, torch.utils.data.IterableDataset[Sample_co]):
    """The objects under a prefix, one after the other: in key order, or shuffled.

    Objects are read ahead of their use, by one process for all its DataLoader workers; each worker announces what it
    will use next, as far as its part of the budget goes (`torchobj.set_budget`).

    The prefix is listed once, when first needed. The first pass without workers, ranks and `shuffle` yields while it is
    being listed; with any of these the listing comes first, under torch.distributed by rank 0 for all.
    Workers get the listing from their parent where it has one: it lists for workers that are spawned, and in a
    `torchobj.DataLoader` for any. Under another loader ask for `dataset.manifest` before the loop: forked workers
    would each list for themselves, and warn, and read by connections of their own.

    Args:
        url: `s3://bucket/prefix/`, `file:///folder/` or `memory://name/prefix`; the prefix is raw.
        transform: Makes a sample of a reader; without one a sample is the reader.
        glob: Only keys whose part behind the prefix matches: `*` stays within a component, `**` does not.
        suffixes: Only keys that end so; one, or any of several.
        limit: At most so many objects, the first in key order.
        region, endpoint_url: In place of the configuration's.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        enable_sharding: Each rank of torch.distributed gets every n-th object, and each DataLoader worker every n-th of
            those. Rank and world size are those of the moment when iteration starts. Without it each gets all.
        shuffle: In an order that `seed` and the epoch decide, the same in every process. See `set_epoch`.
        seed: As said; 0 or more.
        uneven: What is done with `enable_sharding` where the objects do not divide evenly among ranks: `drop` leaves
            out those that are too many, `pad` yields some of the first ones twice; either way each rank yields the same
            number of samples, and with the same number of workers the same number of batches. None: they differ by one.
        on_error: What to do about a sample that cannot be read or made: `raise`, and the next one comes all the same;
            `skip`; or a callable that gets index, URL and exception and returns a sample. The first of each process is
            logged.

    Attributes:
        failed_samples: How many samples could not be read or made, in this process and its DataLoader workers.
        shuffle, seed, uneven, on_error: As given. May be set, and count from the next `iter` on; workers that stay
            keep what they were started with.

    Raises:
        ConfigError: An argument is wrong. Nothing is asked of the store here.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://voices")
        >>> for key in ("train/b", "train/a", "test/c"):
        ...     _ = store.put(key, key.encode())
        >>> dataset = ObjectIterableDataset("memory://voices/train/", transform=lambda reader: reader.read())
        >>> list(dataset)
        [b'train/a', b'train/b']
    """

    shuffle: bool
    seed: int
    uneven: Uneven
    on_error: OnErrorInARow
    _schemes: tuple[str, ...] = SCHEMES

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
        on_error: OnErrorInARow = "raise",
    ) -> None:
        chosen = store_config(config, region, endpoint_url)
        listing = Listing(
            chosen,
            url=url,
            glob=glob,
            suffixes=suffixes,
            limit=limit,
            schemes=self._schemes,
            any_scheme="ObjectIterableDataset",
        )
        self._set_up(listing, chosen, transform, None, enable_sharding=enable_sharding)
        self.shuffle, self.seed, self.uneven, self.on_error = shuffle, seed, uneven, on_error
        self._check()

    def _set_up(
        self,
        listing: Listing,
        config: StoreConfig,
        transform: Transform | None,
        reader_constructor: ReaderConstructor | None,
        *,
        enable_sharding: bool,
    ) -> None:
        self._set_up_reading(listing, config, transform, reader_constructor)
        self.shuffle, self.seed, self.uneven, self.on_error = False, 0, None, "raise"
        self._enable_sharding = enable_sharding
        self._epoch = Epoch()
        self._rank: workers.Rank | None = None
        # Of the iterator that was begun last in this process.
        self._progress: _Progress | None = None
        # Where the next one begins, if it is of that epoch.
        self._resumed: _Progress | None = None

    def _check(self) -> None:
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"seed={self.seed!r}: must be an int, 0 or more")
        if self.uneven not in (None, "drop", "pad"):
            raise ConfigError(f"uneven={self.uneven!r}: must be 'drop', 'pad' or None")
        if self.uneven and not self._enable_sharding:
            raise ConfigError(f"uneven={self.uneven!r}: needs enable_sharding=True, without it each rank gets all")
        check_on_error_in_a_row(self.on_error, even=self.uneven is not None)

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration is of; with `shuffle` each has an order of its own.

        Also for workers that stay from epoch to epoch. Iterating again without it is the same epoch again.

        Raises:
            ConfigError: Less than 0.
        """
        if epoch < 0:
            raise ConfigError(f"epoch={epoch!r}: must be 0 or more")
        self._epoch.set(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the iterator is that was begun last in this process: what `load_state_dict` takes.

        In a DataLoader worker it is the worker's; torchdata's `StatefulDataLoader` collects and returns them. Under
        torch.distributed it is the rank's, and that of any other if all yielded equally many samples.
        """
        epoch = self._epoch.get()
        progress = self._resumed or self._progress
        if progress is None or (progress.epoch != epoch and not workers.in_worker()):
            progress = _Progress(self.seed, epoch, 0, {})
        return dataclasses.asdict(progress)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration yields what was left of the epoch then: each sample once, none twice.

        Sets seed and epoch too. A `set_epoch` of another epoch in between starts that one from its beginning.

        Raises:
            ConfigError: When iteration starts, and the state is of other objects, ranks or workers.
        """
        self._resumed = _Progress(state["seed"], state["epoch"], state["done"], dict(state["shape"]))
        self.seed = self._resumed.seed
        self._epoch.set(self._resumed.epoch)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if workers.is_for_a_new_process():
            # A spawned worker has no torch.distributed to ask.
            state["_rank"] = workers.rank(self._rank)
        return state

    def _share(self) -> Share:
        """What this rank and worker is, as of now: torch.distributed may have been initialised since."""
        if not self._enable_sharding:
            return Share()
        info = torch.utils.data.get_worker_info()
        return Share(*workers.rank(self._rank), *((0, 1) if info is None else (info.id, info.num_workers)))

    def _warn_of_repeated_samples(self) -> None:
        """Warns, once, where each DataLoader worker is to yield all objects: almost always a mistake."""
        worker = torch.utils.data.get_worker_info()
        # What wraps the dataset may give each worker its part.
        if worker is None or worker.num_workers == 1 or self._enable_sharding or worker.dataset is not self:
            return
        if worker.id == 0 and self._epoch.is_first_warning():
            logger.warning(
                "%s: each of %d DataLoader workers yields all objects, so that every sample comes %d times; pass "
                "enable_sharding=True to have each worker yield its part",
                self._listing.name,
                worker.num_workers,
                worker.num_workers,
            )

    def __iter__(self) -> Iterator[Sample_co]:
        self._check()
        self._warn_of_repeated_samples()
        share, epoch, kind = self._share(), self._epoch.get(), self._reader_constructor
        pages = self._listing.pages() if share == Share() and not self.shuffle else None
        if pages is not None:
            progress = self._begin(share, epoch, None)
            return _Pass(self, pages, read_while_listing(self._listing, pages, kind, progress.done), progress)
        manifest = self._listing.manifest()
        progress = self._begin(share, epoch, len(manifest))
        order = shuffled(len(manifest), self.seed, epoch) if self.shuffle else in_order(len(manifest))
        readings = read_ahead(self._listing, share.of(order, self.uneven)[progress.done :], kind)
        return _Pass(self, manifest, readings, progress)

    def _begin(self, share: Share, epoch: int, objects: int | None) -> _Progress:
        """The progress of a pass that begins: at the state that was loaded, if it is of this epoch."""
        shape = {
            # Not known while they are being listed.
            "objects": objects,
            "world_size": share.world_size,
            "workers": share.workers,
            "shuffle": self.shuffle,
            "uneven": self.uneven,
        }
        resumed, self._resumed = self._resumed, None
        done = 0 if resumed is None or resumed.epoch != epoch else resumed.done
        if resumed is not None and done:
            unknown = {"objects": None} if None in (objects, resumed.shape["objects"]) else {}
            if resumed.shape | unknown != shape | unknown:
                raise ConfigError(f"a state of {resumed.shape} cannot be resumed by {shape}: samples would be lost")
        self._progress = _Progress(self.seed, epoch, done, shape)
        return self._progress


class _Pass(Iterator[Any]):
    """One pass. An exception of a sample does not end it."""

    def __init__(
        self, dataset: ObjectIterableDataset, names: Named, readings: Iterator[Reading], progress: _Progress
    ) -> None:
        self._dataset, self._names, self._readings, self._progress = dataset, names, readings, progress

    def __next__(self) -> Any:
        dataset = self._dataset
        for index, reader in self._readings:
            self._progress.done += 1
            try:
                return dataset._made(self._names, index, reader)
            except Exception as error:
                dataset._failed.add()
                if dataset.on_error == "raise":
                    raise
                url = self._names.url(index)
                if dataset.on_error == "skip":
                    say_failed(index, url, error, "skipped")
                    continue
                sample = dataset.on_error(index, url, error)
                say_failed(index, url, error)
                return sample
        raise StopIteration

    def close(self) -> None:
        """Ends it; what is read ahead for it is dropped."""
        self._readings = iter(())


class S3IterableDataset(ObjectIterableDataset[Sample_co]):
    """An `ObjectIterableDataset` of `s3://` URLs, with the classmethods of s3torchconnector."""

    _schemes = ("s3",)

    @classmethod
    def from_prefix(
        cls,
        s3_uri: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        transform: Transform = identity,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        enable_sharding: bool = False,
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        """The objects under a prefix. Arguments as for `S3MapDataset.from_prefix`, and `enable_sharding`."""
        config = store_config(s3client_config, region, endpoint)
        listing = Listing(config, url=s3_uri, schemes=cls._schemes, any_scheme="ObjectIterableDataset")
        return cls._from_listing(listing, config, transform, reader_constructor, enable_sharding=enable_sharding)

    @classmethod
    def from_objects(
        cls,
        object_uris: str | Iterable[str],
        *,
        region: str | None = None,
        endpoint: str | None = None,
        transform: Transform = identity,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        enable_sharding: bool = False,
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        """The objects that are named, in that order; nothing is listed.

        Under torch.distributed they stay each rank's own: with `enable_sharding` all ranks should name the same.
        """
        config = store_config(s3client_config, region, endpoint)
        listing = Listing(config, objects=object_uris, schemes=cls._schemes, any_scheme="ObjectIterableDataset")
        return cls._from_listing(listing, config, transform, reader_constructor, enable_sharding=enable_sharding)

    @classmethod
    def _from_listing(
        cls,
        listing: Listing,
        config: StoreConfig,
        transform: Transform,
        reader_constructor: ReaderConstructor | None,
        *,
        enable_sharding: bool,
    ) -> Self:
        dataset = cls.__new__(cls)
        dataset._set_up(listing, config, transform, reader_constructor, enable_sharding=enable_sharding)
        return dataset
