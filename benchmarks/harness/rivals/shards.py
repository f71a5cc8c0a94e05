"""Clients that read samples of tar shards, or the same objects one by one: `shards.py` measures them with `timed`."""

import io
import random
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Worker
from benchmarks.lab.location import Location

Sample = dict[str, Any]
#: Passes are repeated for at least this time.
_LEAST_S = 1.0
_BLOCK_SAMPLES = 2048


def _requests() -> int:
    """Number of GET requests of torchobj in this process; 0 for other clients."""
    if "torchobj" not in sys.modules:
        return 0
    import torchobj

    return int(torchobj.metrics()["torchobj.requests.get.ok"])


def read_tar(path: str) -> Iterator[tuple[str, bytes]]:
    """The members of a local tar file."""
    with tarfile.open(path) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                yield member.name, file.read()


@dataclass
class Reading(Worker):
    """Iterates over all samples; each has a body and a label."""

    form: "Form"
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
        self.urls, self.config = [self.location.url(name) for name in self.names], self.location.config()
        self.client = self.form.open(self)

    def run(self) -> int:
        started_s, found, before = time.perf_counter(), 0, _requests()
        while not found or time.perf_counter() - started_s < _LEAST_S:
            found += self._one_pass()
        self.counters = {"get": _requests() - before}
        return found

    def _one_pass(self) -> int:
        """Reads all samples; returns their number."""
        found = total = 0
        for sample in self.form.samples(self):
            found += 1
            total += len(sample["bin"]) if self.form.compared else 0
        if found != self.count:
            raise AssertionError(f"{found} samples instead of {self.count}")
        return found

    def check(self) -> None:
        expected = (read for file in self.files for read in read_tar(file))
        for sample in self.form.samples(self) if self.form.compared else ():
            for name in ("bin", "cls"):
                if sample[name] != next(expected)[1]:
                    raise AssertionError(f"{sample['__key__']}.{name} differs from that of tarfile")


@dataclass(frozen=True)
class Form:
    """A client, and what it reads from."""

    modules: tuple[str, ...]
    """What its first use imports."""
    samples: Callable[[Reading], Iterable[Any]]
    """Returns the samples."""
    open: Callable[[Reading], Any] = lambda _: None
    """Makes what each pass uses."""
    compared: bool = True
    """Whether samples are dicts in the order of the shards; others are compared by the tests only."""

    def __call__(self, location: Location, **job: Any) -> Reading:
        return Reading(self, location, **job)


def _contents(job: Reading) -> list[bytes]:
    return [Path(file).read_bytes() for file in job.files]


def _ranges(job: Reading) -> list[list[Any]]:
    """The shards in memory, in ranges as the dataset reads them."""
    from torchobj._torchobj import Buffer

    step = 4 << 20
    shards = map(memoryview, _contents(job))
    return [[Buffer(shard[at : at + step]) for at in range(0, len(shard), step)] for shard in shards]


def _parsed(job: Reading) -> Iterator[Sample]:
    from torchobj._torchobj import TarReader

    for url, ranges in zip(job.urls, job.client, strict=True):
        reader = TarReader(url)
        for data in ranges:
            for _, _, _, sample in reader.push(data):
                yield sample
        for _, _, _, sample in reader.finish():
            yield sample


def _streamed(job: Reading) -> Iterable[Sample]:
    import torchobj

    urls, config = job.client or (job.urls, job.config)
    return torchobj.TarIterableDataset(urls, shuffle_shards=False, config=config)


def _in_memory(job: Reading) -> Any:
    import torchobj

    store = torchobj.Store("memory://shards")
    for number, content in enumerate(_contents(job)):
        store.put(f"{number}.tar", content)
    return [f"memory://shards/{number}.tar" for number in range(len(job.files))], None


def _by_webdataset(streams: Callable[[Reading], Iterator[Any]]) -> Callable[[Reading], Iterable[Sample]]:
    """webdataset's pipeline over open files."""

    def samples(job: Reading) -> Iterable[Sample]:
        from webdataset.tariterators import group_by_keys, tar_file_expander

        found: Iterable[Sample] = group_by_keys(tar_file_expander({"url": "", "stream": each} for each in streams(job)))
        return found

    return samples


def _local(job: Reading) -> Iterator[Any]:
    for file in job.files:
        with Path(file).open("rb") as stream:
            yield stream


def _connected(job: Reading) -> Iterator[Any]:
    from s3torchconnector import S3Checkpoint

    checkpoint = S3Checkpoint(**job.location.s3torchconnector())
    for url in job.urls:
        with checkpoint.reader(url) as stream:
            yield stream


def _indexed(job: Reading) -> Any:
    import torchobj

    dataset = torchobj.TarMapDataset(job.urls, job.index, config=job.config)
    # Reads the index.
    len(dataset)
    return dataset


def _bodies(job: Reading) -> Any:
    import torchobj

    urls = [job.location.url(name) for name in job.objects]
    return torchobj.ObjectMapDataset.from_objects(urls, config=job.config)


def _shuffled(job: Reading) -> Iterator[Any]:
    """A shuffled epoch of a map-style dataset by a loader without workers."""
    return _epoch(job, _in_any_order(range(job.count)))


def _shuffled_in_blocks(job: Reading) -> Iterator[Any]:
    """An epoch of blocks of neighbouring samples: the blocks are shuffled, and each within itself."""
    starts = _in_any_order(range(0, job.count, _BLOCK_SAMPLES))
    blocks = (range(start, min(start + _BLOCK_SAMPLES, job.count)) for start in starts)
    return _epoch(job, [at for block in blocks for at in _in_any_order(block)])


def _in_any_order(indices: Sequence[int]) -> list[int]:
    return random.Random(1).sample(indices, len(indices))


def _epoch(job: Reading, order: list[int]) -> Iterator[Any]:
    import torchobj

    # An order of the user's is drawn ahead in the process of the loop only if asked.
    loader = torchobj.DataLoader(job.client, 32, sampler=order, lookahead=len(order), collate_fn=list)
    return (sample for batch in loader for sample in batch)


_STREAM = ("torchobj", "torchobj.datasets.containers.tar_stream")
_MAP = (
    "torchobj",
    "torchobj.loader",
    "torchobj.datasets.containers.tar_map",
    "torchobj.datasets.map",
    "pyarrow.parquet",
)

CLIENTS = {
    # `TarIterableDataset` over the bucket.
    "torchobj": Form(_STREAM, _streamed),
    # The native reader over memory, and its dicts.
    "torchobj parse": Form(("torchobj",), _parsed, _ranges),
    # `TarIterableDataset` over a store in memory: with its prefetcher, positions and handling of errors.
    "torchobj, memory store": Form(_STREAM, _streamed, _in_memory),
    "webdataset, memory": Form(("webdataset",), _by_webdataset(lambda job: map(io.BytesIO, job.client)), _contents),
    "webdataset, local files": Form(("webdataset",), _by_webdataset(_local)),
    "webdataset, s3torchconnector": Form(("webdataset", "s3torchconnector"), _by_webdataset(_connected)),
    # `TarMapDataset`, with an index.
    "shuffled shards": Form(_MAP, _shuffled, _indexed, compared=False),
    "shards shuffled in blocks": Form(_MAP, _shuffled_in_blocks, _indexed, compared=False),
    # The bodies as objects, by `ObjectMapDataset`.
    "shuffled objects": Form(_MAP, _shuffled, _bodies, compared=False),
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
