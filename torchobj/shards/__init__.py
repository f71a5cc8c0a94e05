"""Tar shards in the format of webdataset: finds, writes and indexes them. Does not import torch.

`shard_urls` finds the shards of a dataset. `ShardWriter` divides samples into shards, each of which a `TarWriter`
writes (`writer`); `members` encodes samples, `pack` packs existing objects (`packing`). `TarIndex` (`index`) has the
ranges of all samples, from the headers of shards or from Parquet files (`index_file`).
"""

from torchobj.shards.index import TarIndex
from torchobj.shards.packing import pack
from torchobj.shards.writer import ShardWriter, TarWriter

__all__ = ["ShardWriter", "TarIndex", "TarWriter", "pack"]
