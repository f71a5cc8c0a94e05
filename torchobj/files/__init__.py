"""Transfers whole files and folders. Does not import torch.

`upload_file` and `download_file` transfer one file, `upload` and `download` a tree (`transfers`), whose files are
selected by `patterns`; `upload_stream` writes an object of unknown length from a pipe or an iterator (`streams`).
`Progress`, `Transfer` and `TreeTransfer` are their results, `TransferError` is raised for the files that failed.
"""

from torchobj.exceptions import TransferError
from torchobj.files.streams import upload_stream
from torchobj.files.transfers import TreeTransfer, download, download_file, upload, upload_file
from torchobj.store.transfers import Progress, Transfer

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
