"""Map-style datasets: one object is one sample."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from torchobj._torchobj import ObjectReader
from torchobj.config import StoreConfig
from torchobj.datasets.base import PerObjectDataset
from torchobj.datasets.failures import FailurePolicy, OnError
from torchobj.datasets.listing import OnChange
from torchobj.datasets.samples import MapStyleDataset, Sample_co, Samples
from torchobj.manifest import Manifest
from torchobj.manifest.manifest import key_filter
from torchobj.reading.reader_constructor import ReaderConstructor

__all__ = ["ObjectMapDataset"]


class ObjectMapDataset(PerObjectDataset[Sample_co], MapStyleDataset[Sample_co]):
    """A map-style dataset of objects of any scheme: under a prefix in key order, by name, or of a manifest.

    The prefix is listed once, when the length or a sample is first needed; under torch.distributed by rank 0 for all
    ranks. Spawned workers receive the listing from their parent. Forked workers inherit it if the parent has it, which
    shuffling and distributed samplers ensure; otherwise call `len(dataset)` before the loop, or each worker lists by
    itself and logs a warning. A DataLoader reads all objects of a batch in one call.

    Args:
        source: The URL of a prefix, `s3://bucket/prefix/`, `gs://bucket/prefix/`, `file:///folder/` or
            `memory://name/prefix`; the prefix is raw, `train` also selects `training/x`. Or URLs of objects, as for
            `from_objects`, or a `Manifest`, as for `from_manifest`.
        transform: Converts a reader to a sample. None: the sample is the reader, and the default collation builds a
            `RaggedBatch`.
        glob: Pattern for the part of a key after the prefix. `*` matches within a path component, `**` across them.
        suffixes: Selects keys that end with this suffix, or with any of several.
        limit: Maximum number of objects, the first in key order.
        on_change: What to do if an object has another version or size than in the listing or the manifest: `raise` an
            `ObjectChangedError`, or `accept` the object as it is now.
        allow_empty: Whether a prefix or manifest without any object is a dataset without samples, and logged. False: it
            is an error at the first use, on all ranks; a rank or worker without objects of its own is none.
        config: Settings of the store.
        on_error: Action for a sample that cannot be read or transformed: `raise`; `replace` it by the next one that
            can; or a callable that receives index, URL and exception and returns a sample. The first failure of each
            process is logged.
        reader_constructor: Kind of reader for `transform`, from `S3ReaderConstructor`. None: `sequential()`.

    Attributes:
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.

    Raises:
        ConfigError: An argument is invalid. No request is sent here.
        ObjectNotFoundError: At the first use: there are no objects; with the nearest keys. See `allow_empty`.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://pictures")
        >>> for key in ("train/b", "train/a", "test/c"):
        ...     _ = store.put(key, key.encode())
        >>> dataset = ObjectMapDataset("memory://pictures/train/", transform=lambda reader: reader.read())
        >>> len(dataset), dataset[0], dataset[-1]
        (2, b'train/a', b'train/b')
    """

    def __init__(
        self,
        source: str | Iterable[str] | Manifest,
        *,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        glob: str | None = None,
        suffixes: str | Sequence[str] | None = None,
        limit: int | None = None,
        on_change: OnChange = "raise",
        allow_empty: bool = False,
        config: StoreConfig | None = None,
        on_error: OnError = "raise",
        reader_constructor: ReaderConstructor | None = None,
    ) -> None:
        chosen = key_filter(glob, suffixes, limit)
        options = {"chosen": chosen, "on_change": on_change, "allow_empty": allow_empty}
        self._set_up(source, transform, config, reader_constructor, **options)
        self._torchobj = Samples(self._sample_source, FailurePolicy.of_map_style(on_error))

    _construct = __init__

    def __len__(self) -> int:
        return len(self.manifest)

    def __iter__(self) -> Iterator[Sample_co]:
        return (self[index] for index in range(len(self)))
