"""`TarMapDataset`: random access to the samples of tar shards."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.config.checks import check
from torchobj.datasets import manifest_broadcast, worker_process
from torchobj.datasets.base import Sample_co
from torchobj.datasets.failures import OnError
from torchobj.datasets.objects import ObjectDataset
from torchobj.datasets.shared_table import SharedTable
from torchobj.datasets.tar_samples import Decode, Sample, check_decode, decoded, warn_of_decode
from torchobj.manifest import Manifest
from torchobj.shards.index import TarIndex
from torchobj.shards.index_file import TarShard
from torchobj.shards.shard_urls import checked_urls, find_shards
from torchobj.urls import shown_url

__all__ = ["TarMapDataset"]

logger = logging.getLogger("torchobj")


class TarMapDataset(ObjectDataset[Sample_co]):
    """A map-style dataset of the samples of tar shards in WebDataset format, in any order.

    A sample is read as a range of its shard; with `torchobj.DataLoader` it is read ahead, and samples that follow each
    other in the order and in the shard are read with one request. So a sampler may shuffle all samples, and the dataset
    can be resumed and divided among ranks as every map-style dataset.

    The shards are found, and their index is read or built, when the length or a sample is first needed; under
    torch.distributed by rank 0 for all ranks. Workers share its memory. Needs pyarrow: `pip install
    torchobj[manifest]`.

    Args:
        urls: The shards: a URL, a pattern with braces or wildcards, a prefix that ends with a slash (below which names
            with a part that begins with `_` or `.` are skipped), or a list of these. Compressed shards have no random
            access.
        index: A `TarIndex`, or the path or URL of a file that `TarIndex.save` or `torchobj index` wrote. None: the
            files beside the shards, `<URL of the shard>.index.parquet`, as `ShardWriter` and `torchobj index` write
            them; the headers of shards without a current one are read, without the bodies of large members.
        decode: Callables by extension, such as `{"jpg": torchobj.decode.image}`, each of which receives a `Buffer`.
        transform: Converts a sample, after `decode`. None: the sample is a dict of extension to `Buffer`, or to what
            `decode` returned, with `__key__` and `__url__`, as that of webdataset. The buffers of a sample share its
            memory, which lives as long as one of them.
        region, endpoint_url: Override those of `config`.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        on_error: Action for a sample that cannot be read or decoded: `raise`; `replace` it by the next one that can; or
            a callable that receives index, URL of the shard and exception and returns a sample. The exception has notes
            with the key and the extension.

    Attributes:
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.

    Raises:
        ConfigError: An argument is invalid. No request is sent here.

    Example:
        >>> import torchobj
        >>> with torchobj.ShardWriter("memory://shards/train-%06d.tar", maxcount=2) as writer:
        ...     for number in range(5):
        ...         _ = writer.write({"__key__": f"{number:04d}", "txt": f"sample {number}", "cls": number % 2})
        >>> dataset = torchobj.TarMapDataset(
        ...     "memory://shards/train-{000000..000002}.tar",
        ...     decode={"txt": torchobj.decode.text, "cls": torchobj.decode.json},
        ... )
        >>> len(dataset), dataset[3]
        (5, {'__key__': '0003', '__url__': 'memory://shards/train-000001.tar', 'cls': 1, 'txt': 'sample 3'})
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        index: TarIndex | str | os.PathLike[str] | None = None,
        *,
        decode: Decode | None = None,
        transform: Callable[[dict[str, Any]], Sample_co] | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        on_error: OnError = "raise",
    ) -> None:
        self._urls = checked_urls(urls)
        is_index = index is None or isinstance(index, (TarIndex, str, os.PathLike))
        check("index", index, "a TarIndex, or the path or URL of its file", ok=is_index)
        check("transform", transform, "callable, or None", ok=transform is None or callable(transform))
        self._decode, self.transform = check_decode(decode), transform
        self._config = store_config(config, region, endpoint_url, url=self._urls[0])
        super().__init__(config=self._config, on_error=on_error)
        self._given: TarIndex | str | os.PathLike[str] | None = index
        #: Shards, samples and members of the index, once it was read.
        self._tables: tuple[tuple[TarShard, ...], SharedTable, SharedTable] | None = None
        self._index: TarIndex | None = None
        #: Describes the names below prefixes that are not data, in the process that listed.
        self._skipped = ""
        # By process, because a lock may be held by another thread at the time of a fork.
        self._locks: dict[int, contextlib.AbstractContextManager[Any]] = {}

    @property
    def name(self) -> str:
        """Describes the shards in messages."""
        first, others = shown_url(self._urls[0]), len(self._urls) - 1
        return first + (f" and {others} more" if others else "")

    def __repr__(self) -> str:
        found = "not indexed yet" if self._tables is None else f"{len(self._tables[1])} samples"
        shown = ", ".join(filter(None, (self.name, found, self._skipped)))
        return f"<{type(self).__name__} of {shown}, on_error={self._torchobj_failures.on_error!r}>"

    @property
    def index(self) -> TarIndex:
        """The index of the shards, which is read or built at the first access.

        Raises:
            TarIndexError: The given index lacks a shard, or is for another version of it.
            TarError: A shard is not a tar file, or is damaged.
            StoreError: A shard or the index cannot be read.
        """
        index = self._index
        # The tables change their memory when they are first sent to a spawned worker.
        if index is None or self._tables is None or index.samples is not self._tables[1].table:
            with self._locks.setdefault(os.getpid(), threading.RLock()):
                if self._tables is None:
                    found = self._found()
                    self._tables = found.shards, SharedTable(found.samples), SharedTable(found.members)
                    self._given = None
                shards, samples, members = self._tables
                index = self._index = TarIndex(shards, samples.table, members.table)
        return index

    def _found(self) -> TarIndex:
        if worker_process.is_first_to_repeat("index"):
            logger.warning(
                "%s: each DataLoader worker reads the index itself, and again in each epoch without "
                "persistent_workers; call len(dataset) before the loop to do so once for all workers",
                self.name,
            )
        with worker_process.logged_once(f"index of {self.name}"):
            manifest, _ = manifest_broadcast.broadcast(f"the shards {self.name}", self._shards)

            def built() -> TarIndex:
                index = TarIndex.load_or_build(manifest, self._given, self._config)
                warn_of_decode(self._decode, index.fields, self.name)
                return index

            index = manifest_broadcast.broadcast_value(f"the index of {self.name}", built, TarIndex.from_bytes)
            return TarIndex.load_or_build(manifest, index)

    def _shards(self) -> Manifest:
        found = find_shards(self._urls, self._config)
        self._skipped = str(found)
        return found.manifest

    @override
    def _torchobj_prepare(self) -> None:
        super()._torchobj_prepare()
        len(self)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.index)

    @override
    def objects_at(self, index: int) -> Sequence[ObjectRef]:
        shard, begin, end = self.index.data_range(index)
        return [ObjectRef(shard.name, begin, end, shard.size, shard.version)]

    @override
    def build(self, index: int, readers: Sequence[ObjectReader]) -> Any:
        [reader] = readers
        found = self.index.sample(index)
        data, begin = reader.buffer, found.members[0].offset
        assert data is not None  # noqa: S101  the bytes of a dataset's readers are in memory
        sample = Sample(__key__=found.key, __url__=found.url)
        for field, offset, size in found.members:
            sample[field] = data.view(offset - begin, offset - begin + size)
        decoded(sample, self._decode)
        return sample if self.transform is None else self.transform(sample)

    def __getstate__(self) -> dict[str, Any]:
        if worker_process.is_pickling_for_spawn():
            len(self)
        return {name: value for name, value in self.__dict__.items() if name not in ("_index", "_locks")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._index, self._locks = None, {}
