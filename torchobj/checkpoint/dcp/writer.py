"""The storage writer for `torch.distributed.checkpoint`. `save_items` writes the items; this module commits them."""

import dataclasses
import logging
import os
import uuid
from collections.abc import Callable, Collection
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchobj.checkpoint.dcp.checkpoint_storage import CheckpointStorage
from torchobj.checkpoint.dcp.leftovers import discard, sweep_expired
from torchobj.checkpoint.dcp.metadata import dump_metadata
from torchobj.checkpoint.dcp.object_names import METADATA, ranked
from torchobj.checkpoint.dcp.removal import files_of
from torchobj.checkpoint.dcp.save_items import RankReport, write_items
from torchobj.checkpoint.server import was_refused
from torchobj.config import S3ClientConfig, StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, PreconditionFailedError, StoreError
from torchobj.store import ObjectInfo

__all__ = ["StorageWriter"]

logger = logging.getLogger("torchobj")

#: Version of the metadata format: torch's `CURRENT_DCP_VERSION`, a name that torch 2.6 does not have.
_DCP_VERSION = "1.0.0"


class StorageWriter(CheckpointStorage, TorchStorageWriter):
    """Saves distributed checkpoints to a store.

    One PUT of `.metadata`, after everything else, commits the checkpoint. Each save writes files with new names, so a
    save that fails or is killed does not change an existing checkpoint. After it has replaced a checkpoint, a save
    deletes the files of the old one. A save that fails deletes its own files, on all ranks. The files of a save that is
    killed remain until a save to the folder, a day later, or `torchobj.checkpoint.sweep` deletes them; only the latter
    aborts unfinished uploads. A failure of one rank is raised on all ranks.

    The files have torch's own format: torch 2.6 and later, `FsspecReader` and s3torchconnector read them. Tensors are
    sent from their own memory, in parallel parts: do not change them before the save returns. A writer can be pickled,
    for `async_save` in a process.

    Args:
        url: Folder of the checkpoint: `s3://bucket/step-100`, `gs://bucket/step-100`, `file:///folder` or `memory://name/folder`.
        thread_count: Number of files for the items of a rank. One is enough: its parts are sent in parallel.
        prefix_strategy: Returns how the names of the files of a rank start, given its number; `__<rank>_` if None. The
            strategies of s3torchconnector are in `torchobj.dcp`.
        overwrite: Replace an existing checkpoint.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: Override those of the configuration.

    Raises:
        ConfigError: `url` is not a URL of a store, or `thread_count` is not a positive int.

    Example:
        ```python
        writer = torchobj.checkpoint.StorageWriter("s3://bucket/step-100")
        torch.distributed.checkpoint.save(state_dict, storage_writer=writer)
        ```
    """

    def __init__(
        self,
        url: str,
        *,
        thread_count: int = 1,
        prefix_strategy: Callable[[int], str] | None = None,
        overwrite: bool = True,
        config: StoreConfig | S3ClientConfig | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        if not isinstance(thread_count, int) or thread_count < 1:
            raise ConfigError(f"thread_count={thread_count!r}: must be an int of 1 or more")
        super().__init__(url, config, region, endpoint_url)
        self._thread_count = thread_count
        self._prefix_of = prefix_strategy or _default_prefix
        self._overwrite = overwrite
        self._save_id = str(uuid.uuid4())
        #: The rank, if each rank writes its own metadata.
        self._rank: int | None = None
        self._metadata_name = METADATA
        #: CRC-32 of each file of the last save, by name, on the coordinator.
        self.checksums: dict[str, int] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Starts a new save, to `checkpoint_id` if given.

        Raises:
            ConfigError: `checkpoint_id` is not a URL of a store.
        """
        super().reset(checkpoint_id)
        self._save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """Returns the description of this save for the metadata."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    # torch passes keywords only to signatures with the name `kwargs`.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001, ARG002
        """Takes torch's choice: one metadata object for all ranks, or one for each rank."""
        self._rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")
        self._metadata_name = ranked(METADATA, self._rank)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan; if each rank writes its own metadata, with the prefix of its files.

        Raises:
            CheckpointError: The checkpoint exists, and `overwrite` is false.
        """
        return plan if self._rank is None else self._with_prefixes({self._rank: plan})[0]

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns the plans with the prefix of each rank's files.

        Raises:
            CheckpointError: The checkpoint exists, and `overwrite` is false.
        """
        return plans if self._rank is not None else self._with_prefixes(dict(enumerate(plans)))

    def _with_prefixes(self, plans: dict[int, SavePlan]) -> list[SavePlan]:
        if not self._overwrite and self._checkpoint.has(self._metadata_name):
            raise self._exists()
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(self._prefix_of(rank)))
            for rank, plan in plans.items()
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the items of the rank. A failure is part of the result; `finish` raises it on all ranks."""
        try:
            results = write_items(self._checkpoint, plan.storage_data.prefix, plan.items, planner, self._thread_count)
        except BaseException as error:  # noqa: BLE001  the coordinator raises it, on all ranks
            results = [RankReport.of_failure(error).result()]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the checkpoint by writing its metadata.

        Raises:
            CheckpointError: A planned item was not written; or the checkpoint exists now, and `overwrite` is false; or
                another process swept the files of this save.
            StoreError: The metadata could not be written.
            BaseException: The failure of the first rank that failed. A note names the rank.
        """
        self.checksums = {}
        sizes: dict[str, int] = {}
        stored: dict[MetadataIndex, _StorageInfo] = {}
        reports: list[tuple[int, RankReport]] = []
        for rank, result in ((rank, result) for rank, of_rank in enumerate(results) for result in of_rank):
            info = result.storage_data
            if isinstance(info, RankReport):
                reports.append((rank, info))
                self.checksums |= info.checksums
                continue
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
            stored[result.index] = info
        try:
            _check_written(reports, len(results))
            self._check_complete(metadata, stored)
            metadata.version = _DCP_VERSION
            metadata.storage_data = stored
            metadata.storage_meta = self.storage_meta()
            data = dump_metadata(metadata)
            replaced = self._names_of_previous() - sizes.keys()
            # Immediately before the metadata is written: another process may have swept the files since.
            listed = self._listed(sizes)
        except BaseException:
            discard(self._checkpoint, sizes)
            raise
        self._commit(data, sizes)
        self._delete(replaced)
        self._sweep(listed, sizes)

    def _commit(self, metadata: bytes, names: Collection[str]) -> None:
        """Writes the metadata. If it certainly was not written, deletes the files."""
        try:
            self._put_metadata(metadata)
        except (StoreError, CheckpointError) as error:
            if isinstance(error, CheckpointError) or was_refused(error):
                discard(self._checkpoint, names)
            else:
                error.add_note(f"it is unknown whether {self.checkpoint_id} was saved; its files were not deleted")
            raise

    def _listed(self, sizes: dict[str, int]) -> list[ObjectInfo]:
        """Returns the objects in the folder: below it too if a prefix names folders.

        Args:
            sizes: Size of each file of this save in bytes, by name.

        Raises:
            CheckpointError: A file of this save is missing, or has another size.
        """
        listed = self._checkpoint.objects("", None if any("/" in name for name in sizes) else "/")
        # Listings may have no sizes.
        found = {info.key: sizes.get(info.key) if info.size is None else info.size for info in listed}
        lost = sorted(name for name, size in sizes.items() if found.get(name) != size)
        if lost:
            message = "another process swept files of this save; give sweep() an older_than_s longer than a save takes"
            raise CheckpointError(f"{self.checkpoint_id}: {message}: {len(lost)} of {len(sizes)}, such as {lost[0]}")
        return listed

    def _delete(self, names: set[str]) -> None:
        """Deletes files that the committed checkpoint does not use. A failure is only logged."""
        try:
            self._checkpoint.delete(sorted(names))
        except StoreError as error:
            left = ", ".join(sorted(names))
            logger.warning(
                "%s is saved, but files of the previous checkpoint could not be deleted: %s: %s",
                self.checkpoint_id,
                left,
                error,
            )

    def _sweep(self, listed: list[ObjectInfo], own: Collection[str]) -> None:
        """Deletes files of killed saves, after the checkpoint was committed. A failure is only logged."""
        try:
            for name in sweep_expired(self._checkpoint, listed, own):
                logger.info("deleted a file of a save that was killed: %s", self._checkpoint.url_of(name))
        except StoreError as error:
            logger.warning("%s is saved, but files of killed saves could not be deleted: %s", self.checkpoint_id, error)

    def _check_complete(self, metadata: Metadata, stored: dict[MetadataIndex, _StorageInfo]) -> None:
        """Raises if no rank wrote one of the chunks in the metadata."""
        described = metadata.state_dict_metadata.items()
        counts = (len(what.chunks) if isinstance(what, TensorStorageMetadata) else 1 for _, what in described)
        if len(stored) == sum(counts):
            return
        for name, what in described:
            chunks = [chunk.offsets for chunk in what.chunks] if isinstance(what, TensorStorageMetadata) else [None]
            for offsets in chunks:
                if MetadataIndex(name, offsets) not in stored:
                    at = "" if offsets is None else f" at {tuple(offsets)}"
                    raise CheckpointError(f"{self.checkpoint_id}: {name}{at} was planned, and no rank wrote it")

    def _exists(self) -> CheckpointError:
        # The message of torch's own writer.
        return CheckpointError(
            f"Checkpoint already exists and overwrite=False: {self._checkpoint.url_of(self._metadata_name)}"
        )

    def _names_of_previous(self) -> set[str]:
        """Returns the files of the checkpoint that this save replaces."""
        if not self._overwrite:
            return set()
        try:
            files = files_of(self._checkpoint, self._metadata_name)
        except CheckpointError as error:
            logger.warning("replacing %s; its old files are not deleted: %s", self.checkpoint_id, error)
            return set()
        if files is not None:
            logger.info("replacing %s", self._checkpoint.url_of(self._metadata_name))
        return files or set()

    def _put_metadata(self, data: bytes) -> None:
        key = self._checkpoint.key(self._metadata_name)
        try:
            self._checkpoint.store.put(key, data, overwrite=self._overwrite)
        except PreconditionFailedError:
            # A PUT whose response was lost is retried, and then finds its own object.
            if self._checkpoint.find(self._metadata_name) != data:
                raise self._exists() from None


def _default_prefix(rank: int) -> str:
    return f"__{rank}_"


def _check_written(reports: list[tuple[int, RankReport]], ranks: int) -> None:
    """Raises the error of the first rank that failed, with a note for each failed rank if there are several ranks."""
    failed = [(rank, report) for rank, report in reports if report.error is not None]
    if not failed:
        return
    error = failed[0][1].error
    assert error is not None  # noqa: S101  selected above
    if ranks > 1:
        for rank, report in failed:
            error.add_note(f"on rank {rank}:\n{report.trace}")
    raise error
