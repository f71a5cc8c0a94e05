"""Clients that read samples of tar shards, or the same objects one by one: `shards.py` measures them with `timed`."""

import io
import random
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Worker
from benchmarks.lab.location import Location

#: Passes are repeated for at least this time.
_LEAST_S = 1.0


def read_tar(path: str) -> Iterator[tuple[str, bytes]]:
    """The members of a local tar file."""
    with tarfile.open(path) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                yield member.name, file.read()


class Samples(Worker):
    """Iterates over all samples once; each has a body and a label.

    Args:
        location: The bucket of the shards.
        files: The shards as local files.
        names: Names of the shards in the bucket.
        samples: Number of samples of all shards.
        index: Local path of their index.
        objects: Names of the bodies as objects.
    """

    def __init__(
        self, location: Location, files: list[str], names: list[str], samples: int, index: str, objects: list[str]
    ) -> None:
        self._location, self._files, self._samples, self._index = location, files, samples, index
        self._urls = [location.url(name) for name in names]
        self._objects = [location.url(name) for name in objects]
        self.open()

    def open(self) -> None:
        """Imports and makes the client."""

    def samples(self) -> Iterable[dict[str, Any]]:
        """The samples."""
        raise NotImplementedError

    def run(self) -> int:
        started_s, found = time.perf_counter(), 0
        while not found or time.perf_counter() - started_s < _LEAST_S:
            found += self.one_pass()
        return found

    def one_pass(self) -> int:
        """Reads all samples; returns their number."""
        found = total = 0
        for sample in self.samples():
            found += 1
            total += len(sample["bin"])
        if found != self._samples:
            raise AssertionError(f"{found} samples instead of {self._samples}")
        return found

    def check(self) -> None:
        expected = (read for file in self._files for read in read_tar(file))
        for sample in self.samples():
            for name in ("bin", "cls"):
                if sample[name] != next(expected)[1]:
                    raise AssertionError(f"{sample['__key__']}.{name} differs from that of tarfile")


class Parsed(Samples):
    """The native reader over memory, and its dicts."""

    modules = ("torchobj",)

    def open(self) -> None:
        from torchobj._torchobj import Buffer

        # Ranges as the dataset reads them.
        step = 4 << 20
        shards = [memoryview(Path(file).read_bytes()) for file in self._files]
        self._shards = [[Buffer(shard[at : at + step]) for at in range(0, len(shard), step)] for shard in shards]

    def samples(self) -> Iterator[dict[str, Any]]:
        from torchobj._torchobj import TarReader

        for url, ranges in zip(self._urls, self._shards, strict=True):
            reader = TarReader(url)
            for data in ranges:
                for _, _, _, sample in reader.push(data):
                    yield sample
            for _, _, _, sample in reader.finish():
                yield sample


class InMemory(Samples):
    """`TarIterableDataset` over a store in memory: with its prefetcher, positions and handling of errors."""

    modules = ("torchobj", "torchobj.datasets.tar_stream")

    def open(self) -> None:
        import torchobj

        store = torchobj.Store("memory://shards")
        self._memory = []
        for number, file in enumerate(self._files):
            store.put(f"{number}.tar", Path(file).read_bytes())
            self._memory.append(f"memory://shards/{number}.tar")

    def samples(self) -> Iterable[dict[str, Any]]:
        import torchobj

        return torchobj.TarIterableDataset(self._memory, shuffle_shards=False)


class Torchobj(Samples):
    """`TarIterableDataset` over the bucket."""

    modules = ("torchobj", "torchobj.datasets.tar_stream")

    def samples(self) -> Iterable[dict[str, Any]]:
        import torchobj

        config = self._location.config()
        return torchobj.TarIterableDataset(self._urls, shuffle_shards=False, config=config)


class Webdataset(Samples):
    """webdataset's pipeline over local files."""

    modules = ("webdataset",)

    def streams(self) -> Iterator[dict[str, Any]]:
        for file in self._files:
            with Path(file).open("rb") as stream:
                yield {"url": file, "stream": stream}

    def samples(self) -> Iterable[dict[str, Any]]:
        from webdataset.tariterators import group_by_keys, tar_file_expander

        found: Iterable[dict[str, Any]] = group_by_keys(tar_file_expander(self.streams()))
        return found


class WebdatasetInMemory(Webdataset):
    """webdataset's pipeline over memory."""

    def open(self) -> None:
        self._shards = [Path(file).read_bytes() for file in self._files]

    def streams(self) -> Iterator[dict[str, Any]]:
        for file, shard in zip(self._files, self._shards, strict=True):
            yield {"url": file, "stream": io.BytesIO(shard)}


class WebdatasetConnector(Webdataset):
    """webdataset's pipeline with readers of s3torchconnector."""

    modules = ("webdataset", "s3torchconnector")

    def streams(self) -> Iterator[dict[str, Any]]:
        from s3torchconnector import S3Checkpoint

        checkpoint = S3Checkpoint(**self._location.s3torchconnector())
        for url in self._urls:
            with checkpoint.reader(url) as stream:
                yield {"url": url, "stream": stream}


class _Shuffled(Samples):
    """A shuffled epoch of a map-style dataset by a loader without workers."""

    modules = ("torchobj", "torchobj.loader", "torchobj.datasets.tar_map", "torchobj.datasets.map", "pyarrow.parquet")

    def dataset(self) -> Any:
        raise NotImplementedError

    def open(self) -> None:
        self._dataset = self.dataset()
        # Reads the index.
        len(self._dataset)

    def one_pass(self) -> int:
        import torch

        import torchobj

        order = torch.Generator().manual_seed(random.Random(1).randrange(1 << 30))
        loader: Any = torchobj.DataLoader(
            self._dataset, batch_size=32, shuffle=True, generator=order, collate_fn=list, lookahead=None
        )
        return sum(len(batch) for batch in loader)

    def check(self) -> None:
        """The samples are compared by the tests."""


class ShuffledShards(_Shuffled):
    """`TarMapDataset`, with an index."""

    def dataset(self) -> Any:
        import torchobj

        return torchobj.TarMapDataset(self._urls, self._index, config=self._location.config())


class ShuffledObjects(_Shuffled):
    """The bodies as objects, by `ObjectMapDataset`."""

    def dataset(self) -> Any:
        import torchobj

        return torchobj.ObjectMapDataset.from_objects(self._objects, config=self._location.config())


CLIENTS: dict[str, type[Samples]] = {
    "torchobj": Torchobj,
    "torchobj parse": Parsed,
    "torchobj, memory store": InMemory,
    "webdataset, memory": WebdatasetInMemory,
    "webdataset, local files": Webdataset,
    "webdataset, s3torchconnector": WebdatasetConnector,
    "shuffled shards": ShuffledShards,
    "shuffled objects": ShuffledObjects,
}


def write_shards(folder: Path, bodies: Sequence[Any], shards: int) -> list[Path]:
    """Writes tar files of samples with a body and a label, unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:03d}.tar" for number in range(shards)]
    each = len(bodies) // shards
    for number, path in enumerate(paths):
        if path.exists():
            continue
        partial = path.with_suffix(".partial")
        with tarfile.open(partial, "w") as tar:
            for at in range(number * each, (number + 1) * each):
                for name, data in ((f"{at:08d}.bin", bodies[at]), (f"{at:08d}.cls", str(at).encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        partial.replace(path)
    return paths
