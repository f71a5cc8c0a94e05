"""Train from object storage: PyTorch datasets and checkpoints for S3, with a Rust core.

The map: `Store` reads, writes and lists a bucket (`store`) · `S3MapDataset` and its kin are datasets (`datasets`) ·
`save` and `load` are for checkpoints, `S3Checkpoint` and `open` are files over objects (`checkpoint`) · `StoreConfig`
says how (`config`) · every exception is in `exceptions`. Importing torchobj, and using a store, imports no torch: what
needs it is loaded at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchobj import _process
from torchobj._torchobj import Buffer, Manifest, ObjectReader, ObjectRef, __version__
from torchobj.checkpoint.files import ObjectWriter, open  # noqa: A004  the builtin's name, as in io and gzip
from torchobj.config import FileOptions, S3ClientConfig, S3Options, StoreConfig
from torchobj.exceptions import StoreError, TorchobjError
from torchobj.memory import set_budget
from torchobj.store import ListPage, ObjectInfo, Store, UnfinishedUpload, get_many
from torchobj.urls import Url, parse_url

if TYPE_CHECKING:
    from torchobj.checkpoint.load import load
    from torchobj.checkpoint.s3 import S3Checkpoint
    from torchobj.checkpoint.save import save
    from torchobj.datasets.iterable import ObjectIterableDataset, S3IterableDataset
    from torchobj.datasets.map import ObjectMapDataset, S3MapDataset
    from torchobj.datasets.objects import ObjectDataset
    from torchobj.datasets.ragged import RaggedBatch
    from torchobj.datasets.readers import S3ReaderConstructor
    from torchobj.loader import DataLoader, ElasticDistributedSampler, LookaheadBatchSampler, attach
    from torchobj.loader.callback import LookaheadCallback as LookaheadCallback

_process.install()

#: The exception of s3torchconnector by its name.
S3Exception = StoreError
#: The reader of s3torchconnector by its name.
S3Reader = ObjectReader
#: The writer of s3torchconnector by its name.
S3Writer = ObjectWriter

#: What needs torch, and where it lives.
_LAZY = {
    "DataLoader": "torchobj.loader",
    "ElasticDistributedSampler": "torchobj.loader",
    "LookaheadBatchSampler": "torchobj.loader",
    # Needs transformers too, and is in no __all__: `from torchobj import *` does not.
    "LookaheadCallback": "torchobj.loader.callback",
    "ObjectDataset": "torchobj.datasets.objects",
    "ObjectIterableDataset": "torchobj.datasets.iterable",
    "ObjectMapDataset": "torchobj.datasets.map",
    "RaggedBatch": "torchobj.datasets.ragged",
    "S3Checkpoint": "torchobj.checkpoint.s3",
    "S3IterableDataset": "torchobj.datasets.iterable",
    "S3MapDataset": "torchobj.datasets.map",
    "S3ReaderConstructor": "torchobj.datasets.readers",
    "attach": "torchobj.loader",
    "load": "torchobj.checkpoint.load",
    "save": "torchobj.checkpoint.save",
}

__all__ = [
    "Buffer",
    "DataLoader",
    "ElasticDistributedSampler",
    "FileOptions",
    "ListPage",
    "LookaheadBatchSampler",
    "Manifest",
    "ObjectDataset",
    "ObjectInfo",
    "ObjectIterableDataset",
    "ObjectMapDataset",
    "ObjectReader",
    "ObjectRef",
    "ObjectWriter",
    "RaggedBatch",
    "S3Checkpoint",
    "S3ClientConfig",
    "S3Exception",
    "S3IterableDataset",
    "S3MapDataset",
    "S3Options",
    "S3Reader",
    "S3ReaderConstructor",
    "S3Writer",
    "Store",
    "StoreConfig",
    "StoreError",
    "TorchobjError",
    "UnfinishedUpload",
    "Url",
    "__version__",
    "attach",
    "get_many",
    "load",
    "open",
    "parse_url",
    "save",
    "set_budget",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'torchobj' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
