"""Tar shards in the format of webdataset: finds, writes and indexes them. Does not import torch.

`shard_urls` finds the shards of a dataset. `ShardWriter` (`writer`) divides samples into shards, each of which a
`TarWriter` (`tar_writer`) writes; `members` encodes samples, `packing` packs existing objects. `TarIndex` (`index`) has
the ranges of all samples: `index_build` reads them from the headers of shards, `index_file` from Parquet files, whose
tables `index_table` converts.
"""

from torchobj.shards.index import TarIndex
from torchobj.shards.tar_writer import TarWriter
from torchobj.shards.writer import ShardWriter

__all__ = ["ShardWriter", "TarIndex", "TarWriter"]
