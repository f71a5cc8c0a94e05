"""What feeds a trainer batches of objects: torchobj's loader, and others under torch's own, in one permutation. Leaves
measuring to `loop`.

A trainer gets every byte as uint8. Each rival is collated to one flat tensor with its lengths, allocated in shared
memory where a worker does it: no copy is left out that could be, and none is added.
"""

import abc
import asyncio
import importlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch.utils.data

from benchmarks.lab.boto import boto_client
from benchmarks.lab.objects import Family
from benchmarks.lab.place import Place


@dataclass(frozen=True)
class Plan:
    """What is fed, and how."""

    place: Place
    family: Family
    batch: int
    workers: int
    context: str = "fork"
    elastic: bool = False
    """Ordered by torchobj's sampler, which knows the next epoch; otherwise by torch's `shuffle=True`."""
    lookahead: int | None = None
    seed: int = 7
    budget_bytes: int | None = None
    """Of memory for torchobj; None for its default."""

    def names(self) -> list[str]:
        """Keys, without the prefix of a place."""
        return self.family.names()

    def arguments(self) -> dict[str, Any]:
        """Those of a DataLoader that are everybody's."""
        context = {"multiprocessing_context": self.context, "persistent_workers": True} if self.workers else {}
        return {"batch_size": self.batch, "num_workers": self.workers, **context}


class Feed(Protocol):
    """What is measured."""

    def loader(self, plan: Plan) -> Any:
        """A DataLoader in the plan's order."""

    def names(self, batch: Any) -> list[str]:
        """The names of a batch's objects."""

    def bytes(self, batch: Any) -> int:
        """How many bytes of objects are in the batch."""

    def content(self, batch: Any, position: int) -> torch.Tensor:
        """One object of a batch: uint8."""


class Flat(NamedTuple):
    """A batch of the rivals. Numbers are lists: a tensor more would be a shared memory file more."""

    data: torch.Tensor
    ends: list[int]
    names: list[str]


def flat(samples: Sequence[tuple[str, Any]]) -> Flat:
    """Collates names with bytes."""
    parts = [np.frombuffer(content, np.uint8) for _, content in samples]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    if torch.utils.data.get_worker_info() is None:
        data = torch.empty(ends[-1], dtype=torch.uint8)
    else:
        # As torch's default_collate does, so that sending copies nothing.
        data = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(ends[-1]))  # type: ignore[call-overload]
    np.concatenate(parts, out=data.numpy())
    return Flat(data, ends, [name for name, _ in samples])


class _Rival(abc.ABC):
    """A dataset under torch's DataLoader."""

    @abc.abstractmethod
    def dataset(self, plan: Plan) -> Any:
        """Its samples are names with bytes."""

    def loader(self, plan: Plan) -> Any:
        generator = torch.Generator().manual_seed(plan.seed)
        dataset = self.dataset(plan)
        return torch.utils.data.DataLoader(
            dataset, shuffle=True, generator=generator, collate_fn=flat, **plan.arguments()
        )

    def names(self, batch: Flat) -> list[str]:
        return batch.names

    def bytes(self, batch: Flat) -> int:
        return len(batch.data)

    def content(self, batch: Flat, position: int) -> torch.Tensor:
        return batch.data[batch.ends[position - 1] if position else 0 : batch.ends[position]]


class Torchobj:
    """`torchobj.DataLoader` over `S3MapDataset` without a transform: a `RaggedBatch`, whose objects are views."""

    modules = ("torchobj.loader", "torchobj.datasets")

    def loader(self, plan: Plan) -> Any:
        import torchobj

        if plan.budget_bytes is not None:
            torchobj.set_budget(plan.budget_bytes)
        place = plan.place
        urls = [f"s3://{place.bucket}/{place.key(name)}" for name in plan.names()]
        dataset = torchobj.S3MapDataset.from_objects(urls, region=place.region, endpoint=place.endpoint_url)
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
    """The same, for a trainer that wants one tensor, as the rivals give: its bytes are copied once, there."""

    def bytes(self, batch: Any) -> int:
        return len(batch.data)


class _GetItems(torch.utils.data.Dataset[Any]):
    """The dozen lines that anyone can write: a batch is gathered at once, on one event loop in each worker."""

    def __init__(self, place: Place, names: list[str]) -> None:
        self._place, self._names = place, names
        self._runner: asyncio.Runner | None = None
        self._store: Any = None

    def __len__(self) -> int:
        return len(self._names)

    def __getitems__(self, indices: list[int]) -> list[tuple[str, Any]]:
        if self._runner is None:
            from obstore.store import S3Store

            place, options = self._place, {"allow_http": True}
            path_style = {"endpoint": place.endpoint_url, "virtual_hosted_style_request": False}
            self._store = S3Store(place.bucket, region=place.region, client_options=options, **path_style)
            self._runner = asyncio.Runner()
        return self._runner.run(self._gather([self._names[index] for index in indices]))

    async def _gather(self, names: list[str]) -> list[tuple[str, Any]]:
        return await asyncio.gather(*map(self._read, names))

    async def _read(self, name: str) -> tuple[str, Any]:
        import obstore

        answer = await obstore.get_async(self._store, self._place.key(name))
        return name, await answer.bytes_async()


class GetItems(_Rival):
    """`__getitems__` with `obstore.get_async`."""

    modules = ("obstore", "obstore.store")

    def dataset(self, plan: Plan) -> Any:
        return _GetItems(plan.place, plan.names())


def _read_whole(reader: Any) -> tuple[str, bytes]:
    return reader.key, reader.read()


class S3TorchConnector(_Rival):
    """s3torchconnector's `S3MapDataset`, an object a call."""

    modules = ("s3torchconnector",)

    def dataset(self, plan: Plan) -> Any:
        from s3torchconnector import S3ClientConfig, S3MapDataset

        place = plan.place
        return S3MapDataset.from_objects(
            [f"s3://{place.bucket}/{place.key(name)}" for name in plan.names()],
            region=place.region or "us-east-1",
            endpoint=place.endpoint_url,
            transform=_read_whole,
            s3client_config=S3ClientConfig(force_path_style=place.endpoint_url is not None),
        )


class _Boto3Items(torch.utils.data.Dataset[Any]):
    def __init__(self, place: Place, names: list[str]) -> None:
        self._place, self._names = place, names
        self._client: Any = None

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[str, bytes]:
        if self._client is None:
            self._client = boto_client(self._place)
        name = self._names[index]
        answer = self._client.get_object(Bucket=self._place.bucket, Key=self._place.key(name))
        return name, answer["Body"].read()


class Boto3(_Rival):
    """boto3's `get_object`, an object a call."""

    modules = ("boto3", "botocore.config")

    def dataset(self, plan: Plan) -> Any:
        return _Boto3Items(plan.place, plan.names())


class _Named(torch.utils.data.Dataset[Any]):
    """Puts names beside what a dataset reads by `__getitems__`."""

    def __init__(self, inner: Any, names: list[str]) -> None:
        self._inner, self._names = inner, names

    def __len__(self) -> int:
        return len(self._names)

    def __getitems__(self, indices: list[int]) -> list[tuple[str, Any]]:
        contents = self._inner.__getitems__(indices)
        return [(self._names[index], content) for index, content in zip(indices, contents, strict=True)]


class LitData(_Rival):
    """litData's `StreamingRawDataset`, told what is there in place of a listing."""

    modules = ("litdata.raw",)

    def dataset(self, plan: Plan) -> Any:
        from litdata.raw.dataset import StreamingRawDataset
        from litdata.raw.indexer import BaseIndexer, FileMetadata

        place = plan.place
        folder = f"s3://{place.bucket}/{place.prefix}"
        files = [FileMetadata(folder + name, plan.family.size) for name in plan.names()]

        class Known(BaseIndexer):
            def discover_files(self, input_dir: str, storage_options: Any) -> list[FileMetadata]:
                del input_dir, storage_options
                return files

            def build_or_load_index(self, *args: Any, **kwargs: Any) -> list[FileMetadata]:
                del args, kwargs
                return files

        options = {"endpoint_url": place.endpoint_url, "region_name": place.region}
        inner = StreamingRawDataset(folder, indexer=Known(), storage_options=options)
        return _Named(inner, plan.names())


class _Memory(torch.utils.data.Dataset[Any]):
    def __init__(self, family: Family, names: list[str]) -> None:
        self._names, self._content = names, bytes(family.size)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[str, bytes]:
        return self._names[index], self._content


class Memory(_Rival):
    """The same loop on data in memory, all objects the same zeros: what growth of memory is measured against."""

    def dataset(self, plan: Plan) -> Any:
        return _Memory(plan.family, plan.names())


FEEDS: dict[str, Any] = {
    "torchobj": Torchobj,
    "torchobj, one tensor": TorchobjFlat,
    "getitems": GetItems,
    "s3torchconnector": S3TorchConnector,
    "boto3": Boto3,
    "litData": LitData,
}


def load(name: str) -> Feed:
    """A feed, with everything imported that its first use would import."""
    feed = FEEDS[name]()
    for module in feed.modules:
        importlib.import_module(module)
    made: Feed = feed
    return made


def epochs(loader: Any) -> Iterator[int]:
    """The numbers of epochs, for ever; the loader's sampler is told each."""
    for epoch in itertools.count():
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield epoch
