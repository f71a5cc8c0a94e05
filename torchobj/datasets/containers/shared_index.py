"""`SharedIndex`: the index of the tar shards of a listing, once for all ranks and DataLoader workers."""

import logging
import os
from typing import Any

from torchobj.datasets.containers.tar_samples import Decode, warn_of_decode
from torchobj.datasets.listing import BY_WORKERS, Listing
from torchobj.ranks import broadcast
from torchobj.shards.index import TarIndex
from torchobj.shards.index_file import TarShard
from torchobj.workers import process
from torchobj.workers.shared_table import SharedTable

logger = logging.getLogger("torchobj")


class SharedIndex:
    """The index of the shards of a listing, which is read or built at the first use. Workers share its memory.

    Args:
        listing: The shards.
        given: An index, or the path or URL of its file. None: the files beside the shards, or their headers.
        decode: Warns if none of the fields of the samples is decoded.
    """

    def __init__(
        self,
        listing: Listing,
        given: TarIndex | str | os.PathLike[str] | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._listing, self._given, self._decode = listing, given, decode or {}
        #: Shards, samples and members of the index, once it was read.
        self._tables: tuple[tuple[TarShard, ...], SharedTable, SharedTable] | None = None
        self._index: TarIndex | None = None
        self._lock = process.ProcessLock()

    def __repr__(self) -> str:
        return "not indexed yet" if self._tables is None else f"{len(self._tables[1])} samples"

    @property
    def is_found(self) -> bool:
        """Whether the index was read."""
        return self._tables is not None

    def get(self) -> TarIndex:
        """The index. Rank 0 reads it for all ranks."""
        index = self._index
        # The tables change their memory when they are first sent to a spawned worker.
        if index is None or self._tables is None or index.samples is not self._tables[1].table:
            with self._lock:
                if self._tables is None:
                    found = self._found()
                    self._tables = found.shards, SharedTable(found.samples), SharedTable(found.members)
                    self._given = None
                shards, samples, members = self._tables
                index = self._index = TarIndex(shards, samples.table, members.table)
        return index

    def _found(self) -> TarIndex:
        listing = self._listing
        name = f"the index of {listing.name}"
        if process.is_first_to_repeat("index"):
            logger.warning(BY_WORKERS, listing.name, "reads the index")
        with process.logged_once(name):
            manifest = listing.objects(warns=False)

            def read() -> TarIndex:
                index = TarIndex.load_or_build(manifest, self._given, listing.config)
                warn_of_decode(self._decode, index.fields, listing.name)
                return index

            index = broadcast.broadcast(name, read, TarIndex.from_bytes)
            return TarIndex.load_or_build(manifest, index)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_index": None}
