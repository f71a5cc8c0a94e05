"""Train from object storage: PyTorch datasets and checkpoints for S3, GCS and files, with a Rust core.

`Store` reads, writes and lists a bucket (`store`) · `files` transfers whole files and folders · `decode` turns objects
into images, arrays and tensors · `ObjectMapDataset` and others are datasets (`datasets`) of a `Manifest` (`manifest`)
or of tar shards (`shards`), which a `DataLoader` reads ahead (`loader`) · `save`, `load`, `stream_tensors` and
`CheckpointManager` are for weights and checkpoints (`checkpoint`) · `metrics` counts requests (`telemetry`) ·
`StoreConfig` holds the settings (`config`) · exceptions are in `exceptions`, URLs in `urls`. `fsspec`, `wds`,
`lightning`, `transformers`, `accelerate`, `torch_checkpointing` and `otel` connect other libraries. The names of
s3torchconnector (`s3torchconnector`), such as `S3Checkpoint`, are attributes too, but `dir()` omits them.

Importing torchobj and using a store do not import torch; names that need it are loaded at their first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchobj import _shutdown, decode, files
from torchobj._torchobj import Buffer, ObjectReader, ObjectRef, __version__
from torchobj.checkpoint.archive import failed_save
from torchobj.config import (
    AdvancedOptions,
    CacheOptions,
    FileOptions,
    GCSOptions,
    PriceOptions,
    S3Options,
    StoreConfig,
    load_config,
)
from torchobj.exceptions import StoreError, TorchobjError
from torchobj.manifest import Manifest
from torchobj.s3torchconnector.names import S3Checkpoint as S3Checkpoint
from torchobj.s3torchconnector.names import S3ClientConfig as S3ClientConfig
from torchobj.s3torchconnector.names import S3Exception as S3Exception
from torchobj.s3torchconnector.names import S3Reader as S3Reader
from torchobj.s3torchconnector.names import S3ReaderConstructor as S3ReaderConstructor
from torchobj.s3torchconnector.names import S3Writer as S3Writer
from torchobj.shards import ShardWriter
from torchobj.store import ObjectInfo, Store
from torchobj.store.file_objects import ObjectWriter, open  # noqa: A004  the builtin's name, as in io and gzip
from torchobj.store.reads import get, get_many
from torchobj.telemetry import metrics
from torchobj.workers.memory_budget import set_memory_budget

if TYPE_CHECKING:
    from torchobj import accelerate as accelerate
    from torchobj import checkpoint as checkpoint
    from torchobj import collate as collate
    from torchobj import datasets as datasets
    from torchobj import fsspec as fsspec
    from torchobj import lightning as lightning
    from torchobj import loader as loader
    from torchobj import otel as otel
    from torchobj import torch_checkpointing as torch_checkpointing
    from torchobj import transformers as transformers
    from torchobj import wds as wds
    from torchobj.checkpoint import CheckpointManager
    from torchobj.checkpoint.archive.load import load
    from torchobj.checkpoint.archive.save import save
    from torchobj.checkpoint.safetensors.stream import stream_tensors
    from torchobj.datasets.containers.parquet import ParquetIterableDataset
    from torchobj.datasets.containers.tar_map import TarMapDataset
    from torchobj.datasets.containers.tar_stream import TarIterableDataset
    from torchobj.datasets.folders.groups import GroupDataset
    from torchobj.datasets.folders.image_folder import ImageFolder
    from torchobj.datasets.iterable import ObjectIterableDataset
    from torchobj.datasets.map import ObjectMapDataset
    from torchobj.datasets.mixing.interleave import interleave
    from torchobj.datasets.objects import ObjectDataset
    from torchobj.datasets.table import TableDataset
    from torchobj.loader import DataLoader, ElasticDistributedSampler, LookaheadBatchSampler, attach
    from torchobj.s3torchconnector.datasets import S3IterableDataset, S3MapDataset

_shutdown.register()
failed_save.register()

#: Names that need torch, and their modules.
_LAZY = {
    "CheckpointManager": "torchobj.checkpoint.steps.manager",
    "DataLoader": "torchobj.loader",
    "ElasticDistributedSampler": "torchobj.loader",
    "GroupDataset": "torchobj.datasets.folders.groups",
    "ImageFolder": "torchobj.datasets.folders.image_folder",
    "LookaheadBatchSampler": "torchobj.loader",
    "ObjectDataset": "torchobj.datasets.objects",
    "ObjectIterableDataset": "torchobj.datasets.iterable",
    "ObjectMapDataset": "torchobj.datasets.map",
    "ParquetIterableDataset": "torchobj.datasets.containers.parquet",
    "S3IterableDataset": "torchobj.s3torchconnector.datasets",
    "S3MapDataset": "torchobj.s3torchconnector.datasets",
    "TableDataset": "torchobj.datasets.table",
    "TarIterableDataset": "torchobj.datasets.containers.tar_stream",
    "TarMapDataset": "torchobj.datasets.containers.tar_map",
    "attach": "torchobj.loader",
    "interleave": "torchobj.datasets.mixing.interleave",
    "load": "torchobj.checkpoint.archive.load",
    "save": "torchobj.checkpoint.archive.save",
    "stream_tensors": "torchobj.checkpoint.safetensors.stream",
}

#: Modules that are imported at their first use: those that need torch, and integrations, which need another library.
_LAZY_MODULES = {
    "accelerate",
    "checkpoint",
    "collate",
    "datasets",
    "fsspec",
    "lightning",
    "loader",
    "otel",
    "torch_checkpointing",
    "transformers",
    "wds",
}

__all__ = [
    "AdvancedOptions",
    "Buffer",
    "CacheOptions",
    "CheckpointManager",
    "DataLoader",
    "ElasticDistributedSampler",
    "FileOptions",
    "GCSOptions",
    "GroupDataset",
    "ImageFolder",
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
    "PriceOptions",
    "S3IterableDataset",
    "S3MapDataset",
    "S3Options",
    "ShardWriter",
    "Store",
    "StoreConfig",
    "StoreError",
    "TableDataset",
    "TarIterableDataset",
    "TarMapDataset",
    "TorchobjError",
    "__version__",
    "attach",
    "decode",
    "files",
    "get",
    "get_many",
    "interleave",
    "load",
    "load_config",
    "metrics",
    "open",
    "save",
    "set_memory_budget",
    "stream_tensors",
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
