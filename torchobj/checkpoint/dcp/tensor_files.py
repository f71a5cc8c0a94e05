"""Files of safetensors of a distributed checkpoint, as torch's `HuggingFaceStorageWriter` names them.

The coordinator names the file of each item, and each rank writes its own. If each tensor is whole, only an index is
missing. Otherwise each rank writes a shard of what it has, and `consolidation` joins them.
"""

import collections
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchobj.checkpoint.archive.device_memory import BLOCKS_BYTES, check_memory
from torchobj.checkpoint.archive.plan import is_memory
from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.dcp.consolidation import consolidate
from torchobj.checkpoint.dcp.folder_metadata import file_metadata, folder_metadata
from torchobj.checkpoint.dcp.object_names import METADATA
from torchobj.checkpoint.dcp.removal import DistributedDir
from torchobj.checkpoint.dcp.save_items import (
    STAGED_BYTES,
    ItemFile,
    RankReport,
    close_files,
    expect_items,
    opened_files,
)
from torchobj.checkpoint.safetensors import names
from torchobj.checkpoint.safetensors.folder import index_of
from torchobj.checkpoint.safetensors.header import encoded
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError
from torchobj.store.transfers import ByteProgress

__all__ = ["TensorFiles", "check_tensors", "weights_in", "write_tensors"]

#: Folder of the shards of a checkpoint that is consolidated, as torch names it.
SHARDED = "sharded/"


class TensorFiles:
    """How the tensors of a checkpoint are divided into files.

    Args:
        fqn_to_index_mapping: The number of the file of each tensor, from 1 on. None: one file.
        consolidate: Whether the files have whole tensors, divided like this.

    Raises:
        ConfigError: The mapping is not one of names to numbers.
    """

    def __init__(self, fqn_to_index_mapping: Mapping[str, int] | None, *, consolidate: bool) -> None:
        mapping = fqn_to_index_mapping
        if mapping is not None and (
            not isinstance(mapping, Mapping)
            or not mapping
            or not all(isinstance(name, str) and type(number) is int and number > 0 for name, number in mapping.items())
        ):
            given = reprlib.repr(mapping)
            raise ConfigError(f"fqn_to_index_mapping={given}: must be the number of the file of each tensor, from 1 on")
        if type(consolidate) is not bool:
            raise ConfigError(f"consolidate={consolidate!r}: must be a bool")
        self._mapping = None if mapping is None else dict(mapping)
        self._count = 1 if mapping is None else max(mapping.values())
        self._consolidate = consolidate

    def name_of(self, tensor: str) -> str:
        """Returns the name of the file with a whole tensor.

        Raises:
            ConfigError: The mapping does not have the tensor.
        """
        return names.shard(self._number(tensor), self._count)

    def _number(self, tensor: str) -> int:
        if self._mapping is None:
            return 1
        if tensor not in self._mapping:
            raise ConfigError(f"fqn_to_index_mapping: has no number for {tensor}")
        return self._mapping[tensor]

    def names(self, plans: Sequence[SavePlan]) -> list[list[str]]:
        """Returns the name of the file of each item, for each rank.

        Raises:
            ConfigError: The mapping does not have a tensor.
        """
        items = [(rank, item) for rank, plan in enumerate(plans) for item in plan.items]
        writers = sorted({(self._number(item.index.fqn), rank) for rank, item in items})
        is_whole = all(data.chunk.sizes == data.size for _, item in items if (data := item.tensor_data) is not None)
        if is_whole and len({number for number, _ in writers}) == len(writers):
            return [[self.name_of(item.index.fqn) for item in plan.items] for plan in plans]
        if is_whole and not self._consolidate:
            order = {writer: names.shard(at, len(writers)) for at, writer in enumerate(writers, 1)}
            return [
                [order[self._number(item.index.fqn), rank] for item in plan.items] for rank, plan in enumerate(plans)
            ]
        return self._shards(plans)

    def index(
        self, checkpoint: DistributedDir, metadata: Metadata, sizes: dict[str, int], config: StoreConfig | None
    ) -> bytes | None:
        """Joins shards if whole tensors are wanted. Returns the index of the files of whole tensors, if there are any.

        Args:
            checkpoint: Folder of the checkpoint.
            metadata: What was saved, with the file of each item.
            sizes: Receives the sizes of the files that this writes.
            config: Settings of the store.

        Raises:
            CheckpointError: A shard is damaged, or missing.
            StoreError: A request failed.
        """
        files = {index.fqn: info.relative_path for index, info in metadata.storage_data.items()}
        if any(map(names.is_tensor_shard, files.values())):
            return None
        if any(name.startswith(SHARDED) for name in files.values()):
            shards = CheckpointDir(checkpoint.url_of(SHARDED), config)
            found = folder_metadata(shards, config)
            if found is None:
                raise CheckpointError(f"{shards.url}: another process deleted the files of this save")
            files = consolidate(shards, found, checkpoint, self.name_of, sizes)
        return index_of(files, sum(info.length for info in metadata.storage_data.values()))

    def _shards(self, plans: Sequence[SavePlan]) -> list[list[str]]:
        of_plans, writer = [], 1
        for plan in plans:
            # A file has a name once: a second chunk of a tensor is in another one.
            seen = collections.Counter[str]()
            of_plan = []
            for item in plan.items:
                name = item.index.fqn
                of_plan.append(names.tensor_shard(writer + seen[name], self._number(name), self._count))
                seen[name] += 1
            of_plans.append([SHARDED + name if self._consolidate else name for name in of_plan])
            writer += max(seen.values(), default=1)
        return of_plans


def check_tensors(items: Sequence[WriteItem]) -> None:
    """Checks that a state has only tensors.

    Raises:
        ConfigError: It has other values; the message names them.
    """
    others = sorted({item.index.fqn for item in items if item.type is WriteItemType.BYTE_IO})
    if others:
        some = ", ".join(others[:5])
        raise ConfigError(
            f"{some}: not tensors ({len(others)} of {len(items)} items): safetensors has only tensors; save the others "
            "without format='safetensors', or remove them from the state"
        )


def weights_in(checkpoint: CheckpointDir) -> list[str]:
    """Lists the weights in a folder, whatever wrote them, and metadata of torch's own format: the index first."""
    listed = {info.key for info in (*checkpoint.objects("", "/"), *checkpoint.objects(f"{SHARDED}shard-", "/"))}
    found = {name for name in listed if name == METADATA or names.is_of_model(name.removeprefix(SHARDED))}
    return sorted(found, key=lambda name: (name != names.INDEX, name))


def write_tensors(
    checkpoint: DistributedDir,
    files: Sequence[str],
    items: Sequence[WriteItem],
    planner: SavePlanner,
    *,
    counted: ByteProgress,
) -> list[WriteResult]:
    """Writes the tensors of a rank. Returns when all files are stored.

    Args:
        checkpoint: Folder of the checkpoint.
        files: The name of the file of each item.
        items: Items to write. The planner resolves those of a file together, on this thread.
        counted: Receives the number of bytes of items that are sent.

    Returns:
        A result for each item, and the rank's report.

    Raises:
        ConfigError: safetensors cannot represent a tensor.
        CheckpointError: The memory of a tensor was freed.
        StoreError: A file could not be stored. The stored files are deleted.
    """
    expect_items(items, counted)
    of_files: dict[str, dict[str, WriteItem]] = {}
    for name, item in zip(files, items, strict=True):
        of_files.setdefault(name, {})[item.index.fqn] = item
    with opened_files(checkpoint) as opened:
        results = []
        for name, of_file in of_files.items():
            tensors = {fqn: _resolved(planner, item) for fqn, item in of_file.items()}
            header, order = encoded(tensors, file_metadata(of_file))
            is_copied = not all(map(is_memory, tensors.values()))
            limit_bytes = STAGED_BYTES if is_copied else None if counted.arrived is None else BLOCKS_BYTES
            file = ItemFile(checkpoint, name, limit_bytes, counted)
            opened.append(file)
            file.add_bytes(memoryview(header))
            for fqn in order:
                file.add_tensor(tensors[fqn])
                length = file.length - file.offset
                results.append(WriteResult(of_file[fqn].index, length, _StorageInfo(name, file.offset, length)))
        checksums = close_files(opened)
    return [*results, RankReport(checksums).result()] if items else []


def _resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """Returns the tensor of an item.

    Raises:
        ConfigError: safetensors cannot represent it.
        CheckpointError: Its memory was freed.
    """
    name = item.index.fqn
    data: Any = planner.resolve_data(item)
    tensor: torch.Tensor = data.detach()
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if is_wrapper or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ConfigError(
            f"{name}: a {type(tensor).__name__} of {tensor.layout} and {tensor.dtype} on {tensor.device}: "
            "safetensors has only dense tensors"
        )
    check_memory(tensor, name)
    return tensor
