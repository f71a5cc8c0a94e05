"""`TarMapDataset`: random access to the samples of tar shards."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.config import StoreConfig
from torchobj.config.checks import check, check_callable
from torchobj.datasets.containers.shared_index import SharedIndex
from torchobj.datasets.containers.tar_samples import Decode, Sample, check_decode, decoded
from torchobj.datasets.failures import OnError
from torchobj.datasets.listing import Shards, listing_of
from torchobj.datasets.objects import ObjectDataset
from torchobj.datasets.samples import Sample_co
from torchobj.shards.index import TarIndex
from torchobj.shards.shard_urls import TAR_SUFFIXES, checked_urls
from torchobj.urls import parse_url

__all__ = ["TarMapDataset"]


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
        config: Settings of the store.
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
        config: StoreConfig | None = None,
        on_error: OnError = "raise",
    ) -> None:
        is_index = index is None or isinstance(index, (TarIndex, str, os.PathLike))
        check("index", index, "a TarIndex, or the path or URL of its file", ok=is_index)
        check_callable("transform", transform)
        self._decode, self.transform = check_decode(decode), transform
        self._listing = listing_of(Shards(checked_urls(urls), TAR_SUFFIXES), parse_url, config)
        super().__init__(config=self._listing.config, on_error=on_error)
        self._index = SharedIndex(self._listing, index, self._decode)

    def __repr__(self) -> str:
        shown = ", ".join(filter(None, (self._listing.name, repr(self._index), self._listing.skipped)))
        return f"<{type(self).__name__} of {shown}, on_error={self._torchobj.failures.on_error!r}>"

    @property
    def index(self) -> TarIndex:
        """The index of the shards, which is read or built at the first access.

        Raises:
            TarIndexError: The given index lacks a shard, or is for another version of it.
            TarError: A shard is not a tar file, or is damaged.
            StoreError: A shard or the index cannot be read.
        """
        return self._index.get()

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
