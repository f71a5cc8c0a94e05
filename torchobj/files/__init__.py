"""Transfers whole files and folders. Does not import torch.

`upload_file` and `download_file` transfer one file, `upload` and `download` a tree (`transfers`); `upload_stream`
writes an object of unknown length from a pipe or an iterator (`streams`). `Progress`, `Transfer` and `TreeTransfer` are
their results (`results`), `TransferError` is raised for the files of a tree that failed. `attributes` are those of
objects.
"""

from torchobj.exceptions import TransferError
from torchobj.files.results import Progress, Transfer, TreeTransfer
from torchobj.files.streams import upload_stream
from torchobj.files.transfers import download, download_file, upload, upload_file

__all__ = [
    "Progress",
    "Transfer",
    "TransferError",
    "TreeTransfer",
    "download",
    "download_file",
    "upload",
    "upload_file",
    "upload_stream",
]
