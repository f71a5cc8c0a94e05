"""Loaders that feed a trainer batches of objects: torchobj's, and others under torch's own, in the same permutation.
`loop` measures them.

A trainer receives every byte as uint8. Each rival collates to one flat tensor with lengths, allocated in shared memory
if a worker does it: with the fewest copies possible. Where the samples are tensors or decoded photos, the default
collation stacks them.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch.utils.data

from benchmarks.harness.rivals import objects
from benchmarks.lab.location import Location
from benchmarks.lab.objects import Family
from benchmarks.lab.photos import DECODERS


@dataclass(frozen=True)
class Plan:
    """What is fed, and how."""

    location: Location
    family: Family
    batch: int
    workers: int
    context: str = "fork"
    elastic: bool = False
    """With torchobj's sampler, which knows the next epoch; otherwise torch's `shuffle=True`."""
    lookahead: int | None = None
    seed: int = 7
    budget_bytes: int | None = None
    """torchobj's memory budget; None for its default."""
    samples: str = "bytes"
    """Or "tensors", or "photos", which a decoder makes samples of."""
    decoder: str = ""

    def names(self) -> list[str]:
        """Keys, without the prefix of a location."""
        return self.family.names()

    def urls(self) -> list[str]:
        return [self.location.url(name) for name in self.names()]

    def arguments(self) -> dict[str, Any]:
        """Returns the DataLoader arguments that all feeds share."""
        context = {"multiprocessing_context": self.context, "persistent_workers": True} if self.workers else {}
        return {"batch_size": self.batch, "num_workers": self.workers, **context}


class Flat(NamedTuple):
    """A batch of a rival. Numbers are lists: another tensor would be another shared-memory file."""

    data: torch.Tensor
    ends: list[int]
    names: list[str]


def flat(samples: Sequence[tuple[str, Any]]) -> Flat:
    """Collates names and bytes."""
    parts = [np.frombuffer(content, np.uint8) for _, content in samples]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    if torch.utils.data.get_worker_info() is None:
        data = torch.empty(ends[-1], dtype=torch.uint8)
    else:
        # As torch's default_collate does, so that sending does not copy.
        data = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(ends[-1]))  # type: ignore[call-overload]
    np.concatenate(parts, out=data.numpy())
    return Flat(data, ends, [name for name, _ in samples])


@dataclass(frozen=True)
class Feed:
    """A loader to measure. Its batches are `Flat`, or lists of names and one tensor: uint8 (samples, bytes) or float
    (samples, 3, 224, 224).
    """

    modules: tuple[str, ...]
    """What its first use imports."""
    dataset: Callable[[Plan], Any]
    """Returns a dataset whose samples are pairs of name and content."""

    def loader(self, plan: Plan) -> Any:
        """Returns torch's DataLoader in the plan's order."""
        dataset, collate = self.dataset(plan), flat if plan.samples == "bytes" else None
        if plan.samples == "photos":
            dataset = _Decoding(dataset, DECODERS[plan.decoder])
        order = {"shuffle": True, "generator": torch.Generator().manual_seed(plan.seed)}
        return torch.utils.data.DataLoader(dataset, collate_fn=collate, **order, **plan.arguments())

    def unpacked(self, batch: Any) -> tuple[list[str], int, Callable[[int], torch.Tensor]]:
        """Returns the names of a batch's objects, the number of bytes, and a function that returns one sample."""
        if isinstance(batch, Flat):
            data, ends = batch.data, batch.ends
            return batch.names, len(data), lambda position: data[ends[position - 1] if position else 0 : ends[position]]
        names, samples = batch
        return list(map(_name_of, names)), samples.nbytes, samples.__getitem__


def _name_of(key_or_url: str) -> str:
    return "/".join(key_or_url.rsplit("/", 2)[-2:])


class _Named(torch.utils.data.Dataset[Any]):
    """A dataset of pairs of names and contents."""

    def __init__(self, names: list[str], contents: Any = None) -> None:
        self._names, self._contents = names, contents

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[str, Any]:
        return self._names[index], self._contents[index]


class _Decoding(torch.utils.data.Dataset[Any]):
    """Decodes the photos of a dataset of names and bytes."""

    def __init__(self, inner: Any, decode: Callable[[Any], torch.Tensor]) -> None:
        self._inner, self._decode = inner, decode

    def __len__(self) -> int:
        return len(self._inner)

    def __getitems__(self, indices: list[int]) -> list[tuple[str, torch.Tensor]]:
        if hasattr(self._inner, "__getitems__"):
            samples = self._inner.__getitems__(indices)
        else:
            samples = [self._inner[index] for index in indices]
        return [(name, self._decode(content)) for name, content in samples]


def _named_tensor(reader: Any) -> tuple[str, torch.Tensor]:
    return reader.key, torch.frombuffer(reader, dtype=torch.uint8)


def _named_photo(decode: Callable[[Any], torch.Tensor], reader: Any) -> tuple[str, torch.Tensor]:
    return reader.key, decode(reader.getbuffer())


class _Objects(_Named):
    """Reads by a client of `objects`, which each worker makes at its first sample."""

    def __init__(self, plan: Plan, make: type[objects.BucketClient]) -> None:
        super().__init__(plan.names())
        self._location, self._make = plan.location, make

    @functools.cached_property
    def _client(self) -> objects.BucketClient:
        return self._make(self._location)

    def __getitem__(self, index: int) -> tuple[str, Any]:
        name = self._names[index]
        return name, self._client.get(self._location.key(name), 0)


class _Batches(_Objects):
    """The dozen lines that a user would write: one event loop per worker gathers a batch."""

    def __getitems__(self, indices: list[int]) -> list[tuple[str, Any]]:
        names = [self._names[index] for index in indices]
        return list(zip(names, self._client.get_many(list(map(self._location.key, names))), strict=True))


def _read_whole(reader: Any) -> tuple[str, bytes]:
    return reader.key, reader.read()


def _connected(plan: Plan) -> Any:
    """s3torchconnector's `S3MapDataset`, one object per call."""
    from s3torchconnector import S3MapDataset

    return S3MapDataset.from_objects(plan.urls(), transform=_read_whole, **plan.location.s3torchconnector())


class _NamedBatches(_Named):
    """Adds names to what a dataset reads by `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> list[tuple[str, Any]]:
        contents = self._contents.__getitems__(indices)
        return [(self._names[index], content) for index, content in zip(indices, contents, strict=True)]


def streaming_raw(location: Location, family: Family, **settings: Any) -> Any:
    """litData's `StreamingRawDataset`, given the list of objects instead of listing them."""
    from litdata.raw.dataset import StreamingRawDataset
    from litdata.raw.indexer import BaseIndexer, FileMetadata

    files = [FileMetadata(location.url(name), family.size) for name in family.names()]

    class Known(BaseIndexer):
        def discover_files(self, input_dir: str, storage_options: Any) -> list[FileMetadata]:
            del input_dir, storage_options
            return files

        def build_or_load_index(self, *args: Any, **kwargs: Any) -> list[FileMetadata]:
            del args, kwargs
            return files

    options = {"endpoint_url": location.endpoint_url, "region_name": location.region}
    return StreamingRawDataset(location.url(""), indexer=Known(), storage_options=options, **settings)


def _streamed(plan: Plan) -> Any:
    return _NamedBatches(plan.names(), streaming_raw(plan.location, plan.family))


def _zeros(plan: Plan) -> Any:
    return _Named(plan.names(), [bytes(plan.family.size)] * plan.family.count)


def _in_memory(plan: Plan) -> Any:
    """Tensors, or bytes of photos, that are in memory before the loader starts."""
    contents: Any = [bytearray().join(plan.family.pieces(index)) for index in range(plan.family.count)]
    if plan.samples == "tensors":
        contents = [torch.frombuffer(content, dtype=torch.uint8) for content in contents]
    return _Named(plan.names(), contents)


_OURS = ("torchobj.loader", "torchobj.datasets")


def _listed(plan: Plan) -> Any:
    import torchobj

    transform: Any = {
        "bytes": None,
        "tensors": _named_tensor,
        "photos": functools.partial(_named_photo, DECODERS.get(plan.decoder)),
    }[plan.samples]
    return torchobj.ObjectMapDataset.from_objects(plan.urls(), config=plan.location.config(), transform=transform)


class Torchobj(Feed):
    """`torchobj.DataLoader` over `ObjectMapDataset`. A batch is a `RaggedBatch` of views, unless a transform returns
    tensors, or decodes photos.
    """

    def loader(self, plan: Plan) -> Any:
        import torchobj

        if plan.budget_bytes is not None:
            torchobj.set_memory_budget(plan.budget_bytes)
        dataset = self.dataset(plan)
        order: dict[str, Any]
        if plan.elastic:
            order = {"sampler": torchobj.ElasticDistributedSampler(dataset, num_replicas=1, rank=0, seed=plan.seed)}
        else:
            order = {"shuffle": True, "generator": torch.Generator().manual_seed(plan.seed)}
        return torchobj.DataLoader(dataset, lookahead=plan.lookahead, **order, **plan.arguments())

    def unpacked(self, batch: Any) -> tuple[list[str], int, Callable[[int], torch.Tensor]]:
        if isinstance(batch, list):
            return super().unpacked(batch)
        return list(map(_name_of, batch.urls)), self._bytes(batch), batch.__getitem__

    def _bytes(self, batch: Any) -> int:
        return int(batch.offsets[-1])


class TorchobjFlat(Torchobj):
    """Like `Torchobj`, for a trainer that needs one tensor as the rivals return: the trainer copies the bytes once."""

    def _bytes(self, batch: Any) -> int:
        return len(batch.data)


class TorchobjOtel(Torchobj):
    """Like `Torchobj`, with the instruments of OpenTelemetry, which no SDK reads."""

    def loader(self, plan: Plan) -> Any:
        import torchobj.otel

        torchobj.otel.install()
        return super().loader(plan)


#: The same loop on data in memory, where all objects are the same zeros: the baseline for memory growth.
ZEROS = Feed((), _zeros)
CLIENTS: dict[str, Feed] = {
    "torchobj": Torchobj(_OURS, _listed),
    "torchobj, one tensor": TorchobjFlat(_OURS, _listed),
    "torchobj, otel": TorchobjOtel((*_OURS, "torchobj.otel"), _listed),
    # `__getitems__` with `obstore.get_async`.
    "getitems": Feed(("obstore", "obstore.store"), lambda plan: _Batches(plan, objects.Obstore)),
    "s3torchconnector": Feed(("s3torchconnector",), _connected),
    # `get_object`, one object per call.
    "boto3": Feed(("boto3", "botocore.config"), lambda plan: _Objects(plan, objects.Boto3GetObject)),
    "litData": Feed(("litdata.raw",), _streamed),
    "torch, RAM": Feed((), _in_memory),
}


def epochs(loader: Any) -> Iterator[int]:
    """Yields epoch numbers without end, and sets each on the loader's sampler."""
    for epoch in itertools.count():
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield epoch
