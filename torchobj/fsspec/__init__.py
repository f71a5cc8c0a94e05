"""fsspec file systems over `Store`, for S3 and GCS, and their registration.

Frameworks open `s3://` and `gs://` paths through fsspec: pandas, Hugging Face datasets, Lightning for checkpoints and
logs, `torch.distributed.checkpoint` for URLs. fsspec itself supports neither; s3fs and gcsfs do. pyarrow does not ask
fsspec about URLs: pass one of these file systems as its `filesystem`.
Nothing is registered without a call of `register`, except for `tobj+s3://` and `tobj+gs://`, which fsspec finds in an
installed package. Does not import torch.

`file_system` holds the classes, `many_objects` their methods for many objects and local files; `files` the files that
are written; `instances` caches file systems by configuration; `options` translates those of s3fs and gcsfs, with the
credentials in `passed_credentials`; `registry` holds `register`.
"""

from torchobj.fsspec.file_system import GCSFileSystem, ObjectFileSystem
from torchobj.fsspec.registry import register

__all__ = ["GCSFileSystem", "ObjectFileSystem", "register"]
