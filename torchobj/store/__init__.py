"""Reads, writes and lists a bucket or folder. Does not import torch.

`Store` is the entry point (`store`), `reads` reads objects of several buckets in one call, `file_objects` opens objects
as files. `object_info` describes objects, listings and unfinished uploads; `attributes` are headers and metadata of
written objects, `conditions` are the conditions of a write. `transfers` sends one file to a store or receives it;
`concurrency` runs several such calls at the same time.
`buffers` converts the caller's memory, that of tensors by `tensor_memory`.
"""

from torchobj.store.object_info import Listing, ListPage, ObjectInfo, UnfinishedUpload
from torchobj.store.store import Store, list_buckets

__all__ = ["ListPage", "Listing", "ObjectInfo", "Store", "UnfinishedUpload", "list_buckets"]
