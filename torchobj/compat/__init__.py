"""The names of s3torchconnector: also attributes of `torchobj`, such as `torchobj.S3Checkpoint`. Does not import torch.

`S3MapDataset` and `S3IterableDataset` are names of torchobj too, and are in `datasets`; `torchobj.dcp` has the names of
`s3torchconnector.dcp`.
"""

from torchobj._torchobj import ObjectReader
from torchobj.compat.reader_constructor import S3ReaderConstructor
from torchobj.compat.s3_checkpoint import S3Checkpoint
from torchobj.config import S3ClientConfig
from torchobj.exceptions import StoreError
from torchobj.store.file_objects import ObjectWriter

__all__ = ["S3Checkpoint", "S3ClientConfig", "S3Exception", "S3Reader", "S3ReaderConstructor", "S3Writer"]

#: The exception.
S3Exception = StoreError
#: The file for reading.
S3Reader = ObjectReader
#: The file for writing.
S3Writer = ObjectWriter
