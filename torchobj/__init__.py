"""Train from object storage: PyTorch datasets and checkpoints for S3, GCS and files, with a Rust core.

`Store` reads, writes and lists a bucket (`store`) · `files` transfers whole files and folders · `decode` turns objects
into images, arrays and tensors · `ObjectMapDataset` and others are datasets (`datasets`) · `ShardWriter` and
`TarIndex` write and index tar shards (`shard_writer`, `tar_index`) · `save` and `load` are for
checkpoints, `S3Checkpoint` and `open` return files over objects (`checkpoint`) · `StoreConfig` holds the settings
(`config`) · exceptions are in `exceptions`. Importing torchobj and using a store do not import torch; names that need
it are loaded at their first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchobj import _shutdown, decode, files
from torchobj._torchobj import Buffer, ObjectReader, ObjectRef, __version__
from torchobj.compat import S3Checkpoint, S3ClientConfig, S3Exception, S3Reader, S3ReaderConstructor, S3Writer
from torchobj.config import FileOptions, GCSOptions, S3Options, StoreConfig, load_config
from torchobj.datasets.memory_budget import set_budget, set_memory_budget
from torchobj.exceptions import StoreError, TorchobjError
from torchobj.manifest import Manifest
from torchobj.shards.index import TarIndex
from torchobj.shards.tar_writer import TarWriter
from torchobj.shards.writer import ShardWriter
from torchobj.store import ListPage, ObjectInfo, Store, UnfinishedUpload
from torchobj.store.file_objects import ObjectWriter, open  # noqa: A004  the builtin's name, as in io and gzip
from torchobj.store.reads import get, get_many
from torchobj.urls import Url, parse_url

if TYPE_CHECKING:
    from torchobj import checkpoint, collate, datasets, dcp, fsspec, lightning, loader, wds  # noqa: F401  lazy modules
    from torchobj.checkpoint.load import load
    from torchobj.checkpoint.save import save
    from torchobj.datasets.groups import GroupDataset
    from torchobj.datasets.image_folder import ImageFolder
    from torchobj.datasets.interleave import InterleaveDataset
    from torchobj.datasets.iterable import ObjectIterableDataset
    from torchobj.datasets.map import ObjectMapDataset
    from torchobj.datasets.objects import ObjectDataset
    from torchobj.datasets.one_provider import GCSIterableDataset, GCSMapDataset, S3IterableDataset, S3MapDataset
    from torchobj.datasets.parquet import ParquetIterableDataset
    from torchobj.datasets.ragged import RaggedBatch
    from torchobj.datasets.table import TableDataset
    from torchobj.datasets.tar_map import TarMapDataset
    from torchobj.datasets.tar_stream import TarIterableDataset
    from torchobj.loader import DataLoader, ElasticDistributedSampler, LookaheadBatchSampler, attach
    from torchobj.transformers import LookaheadCallback as LookaheadCallback

_shutdown.register()

#: Names that need torch, and their modules.
_LAZY = {
    "DataLoader": "torchobj.loader",
    "ElasticDistributedSampler": "torchobj.loader",
    "GCSIterableDataset": "torchobj.datasets.one_provider",
    "GCSMapDataset": "torchobj.datasets.one_provider",
    "GroupDataset": "torchobj.datasets.groups",
    "ImageFolder": "torchobj.datasets.image_folder",
    "InterleaveDataset": "torchobj.datasets.interleave",
    "LookaheadBatchSampler": "torchobj.loader",
    # Needs transformers, and is therefore not in __all__.
    "LookaheadCallback": "torchobj.transformers",
    "ObjectDataset": "torchobj.datasets.objects",
    "ObjectIterableDataset": "torchobj.datasets.iterable",
    "ObjectMapDataset": "torchobj.datasets.map",
    "ParquetIterableDataset": "torchobj.datasets.parquet",
    "RaggedBatch": "torchobj.datasets.ragged",
    "S3IterableDataset": "torchobj.datasets.one_provider",
    "S3MapDataset": "torchobj.datasets.one_provider",
    "TableDataset": "torchobj.datasets.table",
    "TarIterableDataset": "torchobj.datasets.tar_stream",
    "TarMapDataset": "torchobj.datasets.tar_map",
    "attach": "torchobj.loader",
    "load": "torchobj.checkpoint.load",
    "save": "torchobj.checkpoint.save",
}

#: Modules of integrations, and those that need torch.
_LAZY_MODULES = {"checkpoint", "collate", "datasets", "dcp", "fsspec", "lightning", "loader", "wds"}

__all__ = [
    "Buffer",
    "DataLoader",
    "ElasticDistributedSampler",
    "FileOptions",
    "GCSIterableDataset",
    "GCSMapDataset",
    "GCSOptions",
    "GroupDataset",
    "ImageFolder",
    "InterleaveDataset",
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
    "ParquetIterableDataset",
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
    "ShardWriter",
    "Store",
    "StoreConfig",
    "StoreError",
    "TableDataset",
    "TarIndex",
    "TarIterableDataset",
    "TarMapDataset",
    "TarWriter",
    "TorchobjError",
    "UnfinishedUpload",
    "Url",
    "__version__",
    "attach",
    "collate",
    "decode",
    "files",
    "get",
    "get_many",
    "load",
    "load_config",
    "open",
    "parse_url",
    "save",
    "set_budget",
    "set_memory_budget",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"torchobj.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'torchobj' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # Without what inspect.getmembers would import and may not be installed.
    return sorted([*__all__, "checkpoint", "exceptions"])
