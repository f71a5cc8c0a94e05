"""Clients that read samples of tar shards, or the same objects one by one: `shards.py` measures them with `timed`."""

import io
import random
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass
class Samples(Worker):
    """Iterates over all samples once; each has a body and a label."""

    location: Location
    """The bucket of the shards."""
    files: list[str]
    """The shards as local files."""
    names: list[str]
    """Names of the shards in the bucket."""
    count: int
    """Number of samples of all shards."""
    index: str
    """Local path of their index."""
    objects: list[str]
    """Names of the bodies as objects."""

    def __post_init__(self) -> None:
        self._urls, self._config = [self.location.url(name) for name in self.names], self.location.config()
        self.open()

    def open(self) -> None:
        """Makes the client."""

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
        if found != self.count:
            raise AssertionError(f"{found} samples instead of {self.count}")
        return found

    def check(self) -> None:
        expected = (read for file in self.files for read in read_tar(file))
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
        shards = [memoryview(Path(file).read_bytes()) for file in self.files]
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


class Torchobj(Samples):
    """`TarIterableDataset` over the bucket."""

    modules = ("torchobj", "torchobj.datasets.tar_stream")

    def samples(self) -> Iterable[dict[str, Any]]:
        import torchobj

        return torchobj.TarIterableDataset(self._urls, shuffle_shards=False, config=self._config)


class InMemory(Torchobj):
    """`TarIterableDataset` over a store in memory: with its prefetcher, positions and handling of errors."""

    def open(self) -> None:
        import torchobj

        store = torchobj.Store("memory://shards")
        for number, file in enumerate(self.files):
            store.put(f"{number}.tar", Path(file).read_bytes())
        self._urls = [f"memory://shards/{number}.tar" for number in range(len(self.files))]
        self._config = None


class Webdataset(Samples):
    """webdataset's pipeline over local files."""

    modules = ("webdataset",)

    def streams(self) -> Iterator[dict[str, Any]]:
        for file in self.files:
            with Path(file).open("rb") as stream:
                yield {"url": file, "stream": stream}

    def samples(self) -> Iterable[dict[str, Any]]:
        from webdataset.tariterators import group_by_keys, tar_file_expander

        found: Iterable[dict[str, Any]] = group_by_keys(tar_file_expander(self.streams()))
        return found


class WebdatasetInMemory(Webdataset):
    """webdataset's pipeline over memory."""

    def open(self) -> None:
        self._shards = [Path(file).read_bytes() for file in self.files]

    def streams(self) -> Iterator[dict[str, Any]]:
        for file, shard in zip(self.files, self._shards, strict=True):
            yield {"url": file, "stream": io.BytesIO(shard)}


class WebdatasetConnector(Webdataset):
    """webdataset's pipeline with readers of s3torchconnector."""

    modules = ("webdataset", "s3torchconnector")

    def streams(self) -> Iterator[dict[str, Any]]:
        from s3torchconnector import S3Checkpoint

        checkpoint = S3Checkpoint(**self.location.s3torchconnector())
        for url in self._urls:
            with checkpoint.reader(url) as stream:
                yield {"url": url, "stream": stream}


class ShuffledShards(Samples):
    """A shuffled epoch of `TarMapDataset`, with an index, by a loader without workers."""

    modules = ("torchobj", "torchobj.loader", "torchobj.datasets.tar_map", "torchobj.datasets.map", "pyarrow.parquet")

    def open(self) -> None:
        import torchobj

        self._dataset: Any = torchobj.TarMapDataset(self._urls, self.index, config=self._config)
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


class ShuffledObjects(ShuffledShards):
    """The bodies as objects, by `ObjectMapDataset`."""

    def open(self) -> None:
        import torchobj

        urls = [self.location.url(name) for name in self.objects]
        self._dataset = torchobj.ObjectMapDataset.from_objects(urls, config=self._config)


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
    import webdataset

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:03d}.tar" for number in range(shards)]
    each = len(bodies) // shards
    for number, path in enumerate(paths):
        if path.exists():
            continue
        partial = path.with_suffix(".partial")
        with webdataset.TarWriter(str(partial)) as tar:
            for at in range(number * each, (number + 1) * each):
                tar.write({"__key__": f"{at:08d}", "bin": bodies[at], "cls": str(at).encode()})
        partial.replace(path)
    return paths
