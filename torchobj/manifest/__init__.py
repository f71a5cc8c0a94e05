"""`Manifest`, a compact list of objects (`manifest`), and its table in a Parquet file (`parquet`). No torch."""

from torchobj.manifest.manifest import Manifest

__all__ = ["Manifest"]
