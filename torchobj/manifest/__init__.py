"""`Manifest`, a compact list of objects (`manifest`), and its table in a Parquet file (`parquet`). No torch.

`pages` bounds what a Parquet file of unknown origin decodes to; `shards` and `datasets` use it for theirs.
"""

from torchobj.manifest.manifest import Manifest

__all__ = ["Manifest"]
