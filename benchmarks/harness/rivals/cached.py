"""Clients that read epochs of small objects, in one shuffled order, with what an earlier epoch left on the local disk:
`cache.py` measures them with `timed`.
"""

import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.measure import Worker
from benchmarks.lab.location import Location
from benchmarks.lab.objects import Family

_BATCH, _WORKERS = 64, 2
#: Epochs are repeated for at least this time, unless one leaves files for the next.
_LEAST_S = 1.0

#: Numbers of objects, their contents, and the number of bytes.
Batches = Iterator[tuple[Sequence[int], Sequence[Any], int]]


@dataclass
class Epochs(Worker):
    """Reads all objects, whose bytes reach the loop in batches. What precedes it, such as an epoch, is not measured."""

    form: "Form"
    location: Location
    family: Family
    folder: str
    """The same objects as local files, which are in the page cache."""
    caches: str
    """Folder of all caches, which is deleted after the last measurement."""

    def __post_init__(self) -> None:
        self.cache = tempfile.mkdtemp(dir=self.caches)
        self.config = self.location.config()
        self.client = self.form.open(self)

    def warm(self) -> None:
        for _ in range(self.form.epochs_before):
            self._epoch()
            self.form.settle(self)

    def run(self) -> int:
        started_s, found = time.perf_counter(), 0
        while not found or (self.form.repeats and time.perf_counter() - started_s < _LEAST_S):
            found += self._epoch()
        return found

    def _epoch(self) -> int:
        found = total = 0
        for numbers, _, size in self.form.batches(self):
            found += len(numbers)
            total += size
        if (found, total) != (self.family.count, self.family.count * self.family.size):
            raise AssertionError(f"{found} samples of {total} bytes instead of {self.family.count}")
        return found

    def check(self) -> None:
        for numbers, contents, _ in self.form.batches(self):
            for number, content in zip(numbers, contents, strict=True):
                if (content if isinstance(content, bytes) else content.numpy().tobytes()) != b"".join(
                    self.family.pieces(number)
                ):
                    raise AssertionError(f"object {number} differs")
        self.form.settle(self)
        # ext4 searches for an inode that was not deleted within the last minute: files that were deleted now would make
        # the next cache slower.
        for path in Path(self.cache).rglob("*"):
            if path.is_file():
                os.truncate(path, 0)


@dataclass(frozen=True)
class Form:
    """A client, and what it does before it is measured."""

    modules: tuple[str, ...]
    """What its first use imports."""
    batches: Callable[[Epochs], Batches]
    """Reads an epoch."""
    open: Callable[[Epochs], Any] = lambda _: None
    """Makes what each epoch uses."""
    epochs_before: int = 1
    """Number of epochs that are not measured."""
    repeats: bool = True
    settle: Callable[[Epochs], None] = lambda _: None
    """Waits until what an epoch has read is on the disk."""

    def __call__(self, location: Location, **job: Any) -> Epochs:
        return Epochs(self, location, **job)


def _order(count: int) -> list[int]:
    import torch

    numbers: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(7)).tolist()
    return numbers


def _listed(job: Epochs, *, cached: bool, transform: Any = None) -> Any:
    """`ObjectMapDataset` of objects with the sizes and versions of the store."""
    import torchobj

    config = job.config
    if cached:
        config = config.replaced(cache=torchobj.CacheOptions(folder=job.cache, min_free_bytes=0))
    keys = [job.location.key(name) for name in job.family.names()]
    found = job.location.store().head_many(keys)
    # The server of the lab lists nothing.
    columns = [
        np.zeros(len(keys), np.int32).tobytes(),
        *_texts(keys),
        np.array([head.size for head in found], np.int64).tobytes(),
        *_texts([head.version for head in found]),
    ]
    builder = torchobj._torchobj.ManifestBuilder()
    builder.add([f"s3://{job.location.bucket}"], columns)
    return torchobj.ObjectMapDataset(torchobj.Manifest(builder.finish()), config=config, transform=transform)


def _texts(texts: Sequence[str]) -> tuple[bytes, bytes]:
    """The offsets of texts, and the texts."""
    encoded = [text.encode() for text in texts]
    return np.cumsum([0, *map(len, encoded)]).astype(np.int32).tobytes(), b"".join(encoded)


def _named_tensor(reader: Any) -> tuple[int, Any]:
    import torch

    return int(reader.key.rsplit("/", 1)[1]), torch.frombuffer(reader, dtype=torch.uint8)


def _arguments() -> dict[str, Any]:
    """The loaders of a training: workers that stay, and batches of one tensor."""
    import torch

    order = torch.Generator().manual_seed(7)
    workers = {"num_workers": _WORKERS, "multiprocessing_context": "fork", "persistent_workers": True}
    return {"batch_size": _BATCH, "shuffle": True, "generator": order, **workers}


def _training(job: Epochs) -> Any:
    import torchobj

    return torchobj.DataLoader(_listed(job, cached=True, transform=_named_tensor), **_arguments())


def _training_on_files(job: Epochs) -> Any:
    import torch

    dataset: Any = _Files(job, as_tensors=True)
    return torch.utils.data.DataLoader(dataset, **_arguments())


def _stacked(job: Epochs) -> Batches:
    for numbers, stacked in job.client:
        yield numbers.tolist(), stacked, stacked.nbytes


def _loaded(job: Epochs) -> Batches:
    import torch

    import torchobj

    order = torch.Generator().manual_seed(7)
    for batch in torchobj.DataLoader(job.client, batch_size=_BATCH, shuffle=True, generator=order):
        yield [int(url.rsplit("/", 1)[1]) for url in batch.urls], batch, int(batch.offsets[-1])


def _written(_: Epochs) -> None:
    import torchobj

    while torchobj.metrics()["torchobj.cache_pending"]:
        time.sleep(0.01)


def _counted(numbers: Sequence[int], contents: Sequence[bytes]) -> tuple[Sequence[int], Sequence[bytes], int]:
    return numbers, contents, sum(map(len, contents))


def _batched(read: Callable[[Epochs, int], Any]) -> Callable[[Epochs], Batches]:
    def batches(job: Epochs) -> Batches:
        order = _order(job.family.count)
        for at in range(0, len(order), _BATCH):
            numbers = order[at : at + _BATCH]
            yield _counted(numbers, [read(job, number) for number in numbers])

    return batches


class _Files:
    """A dataset of the user's own, over local files."""

    def __init__(self, job: Epochs, *, as_tensors: bool = False) -> None:
        self._folder, self._count, self._as_tensors = Path(job.folder), job.family.count, as_tensors

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[int, Any]:
        import torch

        content = (self._folder / str(number)).read_bytes()
        return number, torch.frombuffer(bytearray(content), dtype=torch.uint8) if self._as_tensors else content


def _by_torch(job: Epochs) -> Batches:
    import torch

    order = torch.Generator().manual_seed(7)
    dataset: Any = job.client
    for batch in torch.utils.data.DataLoader(
        dataset, batch_size=_BATCH, shuffle=True, generator=order, collate_fn=list
    ):
        yield _counted([number for number, _ in batch], [content for _, content in batch])


def _pread(job: Epochs, number: int) -> bytes:
    descriptor = os.open(f"{job.folder}/{number}", os.O_RDONLY)
    try:
        return os.pread(descriptor, job.family.size, 0)
    finally:
        os.close(descriptor)


def _msc(job: Epochs) -> Any:
    """multi-storage-client with a cache, and otherwise its defaults."""
    from multistorageclient import StorageClient, StorageClientConfig

    location = job.location
    options = {"base_path": location.bucket, "endpoint_url": location.endpoint_url, "region_name": location.region}
    settings = {
        "profiles": {"bench": {"storage_provider": {"type": "s3", "options": options}}},
        "cache": {"size": "100G", "location": job.cache},
    }
    return StorageClient(StorageClientConfig.from_dict(settings, profile="bench"))


def _by_msc(job: Epochs, number: int) -> Any:
    return job.client.read(job.location.key(f"{job.family.name}{number}"))


def _raw(job: Epochs) -> Any:
    """litData's `StreamingRawDataset` with a cache, and otherwise its defaults."""
    from benchmarks.harness.rivals.feeds import streaming_raw

    return streaming_raw(job.location, job.family, cache_dir=job.cache, cache_files=True)


def _by_raw(job: Epochs) -> Batches:
    order = _order(job.family.count)
    for at in range(0, len(order), _BATCH):
        numbers = order[at : at + _BATCH]
        yield _counted(numbers, job.client.__getitems__(numbers))


def _published(job: Epochs) -> None:
    """Waits for the threads that write the cache of litData, which `__getitems__` does not."""
    while sum(path.name.isdecimal() for path in Path(job.cache).rglob("*")) < job.family.count:
        time.sleep(0.01)


_OURS = ("torchobj", "torchobj.loader", "torchobj.datasets.map")
_CACHED = functools.partial(_listed, cached=True)
CLIENTS = {
    # The second epoch, from the cache.
    "torchobj": Form(_OURS, _loaded, _CACHED, settle=_written),
    # The first one, which fills it.
    "torchobj, first epoch": Form(_OURS, _loaded, _CACHED, 0, repeats=False, settle=_written),
    # Every epoch is read from the store.
    "torchobj, no cache": Form(_OURS, _loaded, functools.partial(_listed, cached=False)),
    "torchobj, first epoch, no cache": Form(_OURS, _loaded, functools.partial(_listed, cached=False), 0, repeats=False),
    # The same objects as files in the page cache.
    "torch, files": Form(("torch.utils.data",), _by_torch, _Files),
    "torchobj, 2 workers": Form(_OURS, _stacked, _training, settle=_written),
    "torch, files, 2 workers": Form(("torch.utils.data",), _stacked, _training_on_files),
    "pread": Form(("torch",), _batched(_pread)),
    "multi-storage-client": Form(
        ("torch", "multistorageclient", "multistorageclient.providers.s3"), _batched(_by_msc), _msc
    ),
    "litData (raw)": Form(("torch", "litdata.raw"), _by_raw, _raw, settle=_published),
}
