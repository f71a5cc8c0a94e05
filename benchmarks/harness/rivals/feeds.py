"""Loaders that feed a trainer batches of objects: torchobj's, and others under torch's own, in the same permutation.
`loop` measures them.

A trainer receives every byte as uint8. Each rival collates to one flat tensor with lengths, allocated in shared memory
if a worker does it: with the fewest copies possible. The samples of "tensors" and "photos" are tensors, which the
default collation stacks.
"""

import abc
import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch.utils.data

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
    decoder: str | None = None
    """The objects are photos, which this decoder makes samples of."""

    def names(self) -> list[str]:
        """Keys, without the prefix of a location."""
        return self.family.names()

    def arguments(self) -> dict[str, Any]:
        """Returns the DataLoader arguments that all feeds share."""
        context = {"multiprocessing_context": self.context, "persistent_workers": True} if self.workers else {}
        return {"batch_size": self.batch, "num_workers": self.workers, **context}


class Feed(Protocol):
    """A loader to measure."""

    def loader(self, plan: Plan) -> Any:
        """Returns a DataLoader in the plan's order."""

    def names(self, batch: Any) -> list[str]:
        """Returns the names of a batch's objects."""

    def bytes(self, batch: Any) -> int:
        """Returns the number of object bytes in the batch."""

    def content(self, batch: Any, position: int) -> torch.Tensor:
        """Returns one object of a batch as uint8."""


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


def torch_loader(dataset: Any, plan: Plan, **arguments: Any) -> Any:
    """Returns torch's DataLoader in the plan's order."""
    generator = torch.Generator().manual_seed(plan.seed)
    return torch.utils.data.DataLoader(dataset, shuffle=True, generator=generator, **plan.arguments(), **arguments)


class _Rival(abc.ABC):
    """A dataset under torch's DataLoader."""

    @abc.abstractmethod
    def dataset(self, plan: Plan) -> Any:
        """Returns a dataset whose samples are pairs of name and bytes."""

    def loader(self, plan: Plan) -> Any:
        return torch_loader(self.dataset(plan), plan, collate_fn=flat)

    def names(self, batch: Flat) -> list[str]:
        return batch.names

    def bytes(self, batch: Flat) -> int:
        return len(batch.data)

    def content(self, batch: Flat, position: int) -> torch.Tensor:
        return batch.data[batch.ends[position - 1] if position else 0 : batch.ends[position]]


class Torchobj:
    """`torchobj.DataLoader` over `ObjectMapDataset` without a transform: a batch is a `RaggedBatch` of views."""

    modules = ("torchobj.loader", "torchobj.datasets")
    transform: Any = None

    def loader(self, plan: Plan) -> Any:
        import torchobj

        if plan.budget_bytes is not None:
            torchobj.set_memory_budget(plan.budget_bytes)
        urls = [plan.location.url(name) for name in plan.names()]
        config = plan.location.config()
        dataset = torchobj.ObjectMapDataset.from_objects(urls, config=config, transform=self.transform)
        order: dict[str, Any]
        if plan.elastic:
            order = {"sampler": torchobj.ElasticDistributedSampler(dataset, num_replicas=1, rank=0, seed=plan.seed)}
        else:
            order = {"shuffle": True, "generator": torch.Generator().manual_seed(plan.seed)}
        return torchobj.DataLoader(dataset, lookahead=plan.lookahead, **order, **plan.arguments())

    def names(self, batch: Any) -> list[str]:
        return ["/".join(url.rsplit("/", 2)[1:]) for url in batch.urls]

    def bytes(self, batch: Any) -> int:
        return int(batch.offsets[-1])

    def content(self, batch: Any, position: int) -> torch.Tensor:
        view: torch.Tensor = batch[position]
        return view


class TorchobjFlat(Torchobj):
    """Like `Torchobj`, for a trainer that needs one tensor as the rivals return: the trainer copies the bytes once."""

    def bytes(self, batch: Any) -> int:
        return len(batch.data)


class _Named(torch.utils.data.Dataset[Any]):
    """A dataset of pairs of names and contents."""

    def __init__(self, names: list[str], contents: Any) -> None:
        self._names, self._contents = names, contents

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[str, Any]:
        return self._names[index], self._contents[index]


class _GetItems(_Named):
    """The dozen lines that a user would write: one event loop per worker gathers a batch."""

    def __init__(self, location: Location, names: list[str]) -> None:
        super().__init__(names, None)
        self._location = location
        self._runner: asyncio.Runner | None = None
        self._store: Any = None

    def __getitems__(self, indices: list[int]) -> list[tuple[str, Any]]:
        if self._runner is None:
            self._store = self._location.obstore()
            self._runner = asyncio.Runner()
        return self._runner.run(self._gather([self._names[index] for index in indices]))

    async def _gather(self, names: list[str]) -> list[tuple[str, Any]]:
        return await asyncio.gather(*map(self._read, names))

    async def _read(self, name: str) -> tuple[str, Any]:
        import obstore

        answer = await obstore.get_async(self._store, self._location.key(name))
        return name, await answer.bytes_async()


class GetItems(_Rival):
    """`__getitems__` with `obstore.get_async`."""

    modules = ("obstore", "obstore.store")

    def dataset(self, plan: Plan) -> Any:
        return _GetItems(plan.location, plan.names())


def _read_whole(reader: Any) -> tuple[str, bytes]:
    return reader.key, reader.read()


class S3TorchConnector(_Rival):
    """s3torchconnector's `S3MapDataset`, one object per call."""

    modules = ("s3torchconnector",)

    def dataset(self, plan: Plan) -> Any:
        from s3torchconnector import S3MapDataset

        urls = [plan.location.url(name) for name in plan.names()]
        return S3MapDataset.from_objects(urls, transform=_read_whole, **plan.location.s3torchconnector())


class _Boto3Items(_Named):
    def __init__(self, location: Location, names: list[str]) -> None:
        super().__init__(names, None)
        self._location = location
        self._client: Any = None

    def __getitem__(self, index: int) -> tuple[str, bytes]:
        if self._client is None:
            self._client = self._location.boto3()
        name = self._names[index]
        answer = self._client.get_object(Bucket=self._location.bucket, Key=self._location.key(name))
        return name, answer["Body"].read()


class Boto3(_Rival):
    """boto3's `get_object`, one object per call."""

    modules = ("boto3", "botocore.config")

    def dataset(self, plan: Plan) -> Any:
        return _Boto3Items(plan.location, plan.names())


class _NamedBatches(_Named):
    """Adds names to what a dataset reads by `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> list[tuple[str, Any]]:
        contents = self._contents.__getitems__(indices)
        return [(self._names[index], content) for index, content in zip(indices, contents, strict=True)]


class LitData(_Rival):
    """litData's `StreamingRawDataset`, given the list of objects instead of listing them."""

    modules = ("litdata.raw",)

    def dataset(self, plan: Plan) -> Any:
        from litdata.raw.dataset import StreamingRawDataset
        from litdata.raw.indexer import BaseIndexer, FileMetadata

        location = plan.location
        folder = f"s3://{location.bucket}/{location.prefix}"
        files = [FileMetadata(folder + name, plan.family.size) for name in plan.names()]

        class Known(BaseIndexer):
            def discover_files(self, input_dir: str, storage_options: Any) -> list[FileMetadata]:
                del input_dir, storage_options
                return files

            def build_or_load_index(self, *args: Any, **kwargs: Any) -> list[FileMetadata]:
                del args, kwargs
                return files

        options = {"endpoint_url": location.endpoint_url, "region_name": location.region}
        inner = StreamingRawDataset(folder, indexer=Known(), storage_options=options)
        return _NamedBatches(plan.names(), inner)


class Memory(_Rival):
    """The same loop on data in memory, where all objects are the same zeros: the baseline for memory growth."""

    def dataset(self, plan: Plan) -> Any:
        return _Named(plan.names(), [bytes(plan.family.size)] * plan.family.count)


class _Stacked:
    """Batches are pairs of names and one tensor: uint8 (samples, bytes) or float (samples, 3, 224, 224)."""

    def names(self, batch: Any) -> list[str]:
        return ["/".join(name.rsplit("/", 2)[-2:]) for name in batch[0]]

    def bytes(self, batch: Any) -> int:
        return int(batch[1].nbytes)

    def content(self, batch: Any, position: int) -> torch.Tensor:
        row: torch.Tensor = batch[1][position]
        return row


def _named_tensor(reader: Any) -> tuple[str, torch.Tensor]:
    return reader.key, torch.frombuffer(reader, dtype=torch.uint8)


def _named_sample(decode: Callable[[Any], torch.Tensor], reader: Any) -> tuple[str, torch.Tensor]:
    return reader.key, decode(reader.getbuffer())


class TorchobjTensors(_Stacked, Torchobj):
    """`torchobj.DataLoader` with a transform that returns a tensor, or decodes a photo, and the default collation."""

    def loader(self, plan: Plan) -> Any:
        decode = DECODERS.get(plan.decoder or "")
        self.transform = _named_tensor if decode is None else functools.partial(_named_sample, decode)
        return super().loader(plan)


class RamTensors(_Stacked):
    """torch's DataLoader over tensors that are in memory before it starts."""

    modules = ()

    def loader(self, plan: Plan) -> Any:
        contents = (bytearray().join(plan.family.pieces(index)) for index in range(plan.family.count))
        tensors = [torch.frombuffer(content, dtype=torch.uint8) for content in contents]
        return torch_loader(_Named(plan.names(), tensors), plan)


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


class RamPhotos(_Stacked):
    """torch's DataLoader, whose workers decode photos that are in memory before it starts."""

    modules = ()

    def dataset(self, plan: Plan) -> Any:
        """Returns a dataset whose samples are pairs of name and bytes."""
        return _Named(plan.names(), [b"".join(plan.family.pieces(index)) for index in range(plan.family.count)])

    def loader(self, plan: Plan) -> Any:
        return torch_loader(_Decoding(self.dataset(plan), DECODERS[plan.decoder or ""]), plan)


class GetItemsPhotos(RamPhotos):
    modules = GetItems.modules
    dataset = GetItems.dataset


class S3TorchConnectorPhotos(RamPhotos):
    modules = S3TorchConnector.modules
    dataset = S3TorchConnector.dataset


CLIENTS: dict[str, Any] = {
    "torchobj": Torchobj,
    "torchobj, one tensor": TorchobjFlat,
    "getitems": GetItems,
    "s3torchconnector": S3TorchConnector,
    "boto3": Boto3,
    "litData": LitData,
    "torchobj, tensors": TorchobjTensors,
    "torch, RAM": RamTensors,
    "torchobj, photos": TorchobjTensors,
    "torch, RAM, photos": RamPhotos,
    "getitems, photos": GetItemsPhotos,
    "s3torchconnector, photos": S3TorchConnectorPhotos,
}


def epochs(loader: Any) -> Iterator[int]:
    """Yields epoch numbers without end, and sets each on the loader's sampler."""
    for epoch in itertools.count():
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield epoch
