"""What `torch.distributed.checkpoint` saves through. Leaves the items to `writing`, their bytes to `file`."""

import dataclasses
import logging
import os
import uuid
from datetime import datetime
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchobj.checkpoint.dcp.attempt import RECORDS, discard, records_of_files
from torchobj.checkpoint.dcp.contents import files_of
from torchobj.checkpoint.dcp.manifest import Manifest, WrittenFile
from torchobj.checkpoint.dcp.metadata import dump_metadata
from torchobj.checkpoint.dcp.place import MANIFEST, METADATA, Placed, ranked
from torchobj.checkpoint.dcp.prefix import DefaultPrefixStrategy, S3PrefixStrategyBase
from torchobj.checkpoint.dcp.sweeping import sweep_expired
from torchobj.checkpoint.dcp.writing import FailedWrite, InfoOfLast, write_items
from torchobj.checkpoint.refusal import was_refused
from torchobj.config import S3ClientConfig, StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, PreconditionFailedError, StoreError
from torchobj.store import ObjectInfo

__all__ = ["StorageWriter"]

logger = logging.getLogger("torchobj")

#: torch's number of the form (`CURRENT_DCP_VERSION`), which older ones have no name for.
_DCP_VERSION = "1.0.0"


class StorageWriter(Placed, TorchStorageWriter):
    """Saves distributed checkpoints to a store.

    The checkpoint exists when its `.metadata` does, which is written last, by one PUT. Each save writes files of its
    own: one that fails, or is killed, leaves the checkpoint that was there before as it was. A save that has replaced
    another deletes that one's files. A save that fails deletes its own, on all ranks; one that is killed leaves them,
    and the next save or `torchobj.checkpoint.sweep` deletes them after a day. Any failure of any rank is raised on all
    of them.

    The files are what torch's own writer makes: `FsspecReader` and s3torchconnector read them, and torch 2.6 and later.
    Tensors are sent from their own memory, in parallel parts: they must not change before the save returns. Can be
    pickled, as URL and settings, for `async_save` in a process.

    Args:
        url: The checkpoint's folder: `s3://bucket/step-100`, `file:///folder` or `memory://name/folder`.
        thread_count: Into how many files a rank's items are divided. One will do: its parts are sent in parallel.
        prefix_strategy: How the names of a rank's files begin.
        overwrite: Whether an existing checkpoint may be replaced.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: In place of the configuration's.

    Raises:
        ConfigError: No URL, or no number of threads.

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
        prefix_strategy: S3PrefixStrategyBase | None = None,
        overwrite: bool = True,
        config: StoreConfig | S3ClientConfig | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        if not isinstance(thread_count, int) or thread_count < 1:
            raise ConfigError(f"thread_count={thread_count!r}: must be an int of 1 or more")
        super().__init__(url, config, region, endpoint_url)
        self._thread_count = thread_count
        self._prefix_strategy = prefix_strategy or DefaultPrefixStrategy()
        self._overwrite = overwrite
        self._save_id = str(uuid.uuid4())
        #: Set where each rank writes metadata of its own.
        self._rank: int | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, to another URL where one is given.

        Raises:
            ConfigError: It is no URL.
        """
        super().reset(checkpoint_id)
        self._save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """What the metadata says of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    # torch looks for the name `kwargs` in these signatures.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001, ARG002
        """Hears whether all ranks save one checkpoint, or each rank its own metadata."""
        self._rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is; where each rank is alone, with the names of its files.

        Raises:
            CheckpointError: There is a checkpoint, and it may not be replaced.
        """
        if self._rank is None:
            return plan
        self._check_may_be_made()
        return dataclasses.replace(plan, storage_data=_StoragePrefix(self._prefix_strategy(self._rank)))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans with the names of each rank's files.

        Raises:
            CheckpointError: There is a checkpoint, and it may not be replaced.
        """
        if self._rank is not None:
            return plans
        self._check_may_be_made()
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(self._prefix_strategy(rank)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the rank's items, and returns when they are stored, or when that has failed: `finish` raises then."""
        try:
            results = write_items(self._place, plan.storage_data.prefix, plan.items, planner, self._thread_count)
        except BaseException as error:  # noqa: BLE001  the coordinator raises it, on all ranks
            results = [FailedWrite(error)]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Makes the checkpoint, by its metadata.

        Raises:
            CheckpointError: Something that was planned was not written; or there is a checkpoint by now that may not
                be replaced; or another process has swept this save's files.
            StoreError: The metadata could not be stored.
            BaseException: What kept a rank from writing. Its note names the rank.
        """
        files: list[WrittenFile] = []
        stored: dict[MetadataIndex, _StorageInfo] = {}
        failed: list[tuple[int, FailedWrite]] = []
        for rank, result in ((rank, result) for rank, of_rank in enumerate(results) for result in of_rank):
            info = result.storage_data
            if isinstance(result, FailedWrite):
                failed.append((rank, result))
                continue
            if isinstance(info, InfoOfLast):
                files.append(info.file)
                info = info.plain()
            stored[result.index] = info
        names = {file.name for file in files}
        try:
            _check_written(failed, len(results))
            self._check_complete(metadata, stored)
            metadata.version = _DCP_VERSION
            metadata.storage_data = stored
            metadata.storage_meta = self.storage_meta()
            replaced = self._names_of_previous() - names
            manifest = Manifest(self._save_id, tuple(sorted(files)), tuple(sorted(replaced)))
            data = dump_metadata(metadata)
            # As late as the old manifest is still there: a sweep may have marked a record by now.
            records, now = self._listed_records(names)
            self._place.put(ranked(MANIFEST, self._rank), manifest.dump())
        except BaseException as error:
            discard(self._place, names, [failure.error for _, failure in failed] or [error])
            raise
        self._commit(data, names)
        self._delete(replaced | {record.name for record in records_of_files(names)})
        self._sweep(records, now)

    def _commit(self, metadata: bytes, names: set[str]) -> None:
        """Puts the metadata. A checkpoint that certainly was not made leaves no files."""
        try:
            self._put_metadata(metadata)
        except (StoreError, CheckpointError) as error:
            if isinstance(error, CheckpointError) or was_refused(error):
                discard(self._place, {*names, ranked(MANIFEST, self._rank)}, [error])
            else:
                error.add_note(f"whether {self.checkpoint_id} was saved is not known; its files are kept for now")
            raise

    def _listed_records(self, names: set[str]) -> tuple[list[ObjectInfo], datetime | None]:
        """The records of other saves, and the time by the store's clock.

        Raises:
            CheckpointError: A record of these files is gone, or was swept.
        """
        listed = {info.key: info for info in self._place.objects(RECORDS)}
        own = {record.name: len(record.dump()) for record in records_of_files(names)}
        found = [listed.pop(name, None) for name in own]
        if [info and info.size for info in found] != list(own.values()):
            message = "another process has swept files of this save: a save is to be younger than what sweep() deletes"
            raise CheckpointError(f"{self.checkpoint_id}: {message}")
        # Records are renewed: this is a little before now.
        times = [info.last_modified for info in found if info is not None and info.last_modified is not None]
        return list(listed.values()), max(times, default=None)

    def _delete(self, names: set[str]) -> None:
        """Deletes what has no use any more. The save has succeeded by now, whatever comes of it."""
        try:
            self._place.delete(sorted(names))
        except StoreError as error:
            left = ", ".join(sorted(names))
            logger.warning("%s is saved; files of before may be left there: %s: %s", self.checkpoint_id, left, error)

    def _sweep(self, records: list[ObjectInfo], now: datetime | None) -> None:
        """Deletes what saves left that were killed. The save has succeeded by now, whatever comes of it."""
        try:
            for name in sweep_expired(self._place, records, now):
                logger.info("deleted what a save left that did not end: %s", self._place.url_of(name))
        except StoreError as error:
            logger.warning("%s is saved; what earlier saves left may be there: %s", self.checkpoint_id, error)

    def _check_complete(self, metadata: Metadata, stored: dict[MetadataIndex, _StorageInfo]) -> None:
        """Every chunk that the metadata names was written by some rank."""
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

    def _metadata_name(self) -> str:
        return ranked(METADATA, self._rank)

    def _check_may_be_made(self) -> None:
        """Raises where there is a checkpoint that may not be replaced."""
        if self._place.has(self._metadata_name()):
            if not self._overwrite:
                raise self._exists()
            logger.info("%s is replaced", self._place.url_of(self._metadata_name()))

    def _exists(self) -> CheckpointError:
        # The words of torch's own writer.
        return CheckpointError(
            f"Checkpoint already exists and overwrite=False: {self._place.url_of(self._metadata_name())}"
        )

    def _names_of_previous(self) -> set[str]:
        """The files of the checkpoint that this save replaces; none of a save that is running."""
        if not self._overwrite:
            return set()
        try:
            previous = files_of(self._place, self._rank)
        except CheckpointError as error:
            logger.warning("%s is replaced, but its files are kept: %s", self.checkpoint_id, error)
            return set()
        return previous.files if previous.has_metadata else set()

    def _put_metadata(self, data: bytes) -> None:
        key = self._place.key(self._metadata_name())
        try:
            self._place.store.put(key, data, if_none_match=not self._overwrite)
        except PreconditionFailedError:
            # A PUT whose answer was lost is sent again, and meets what it has written itself.
            if self._place.find(self._metadata_name()) != data:
                raise self._exists() from None


def _check_written(failed: list[tuple[int, FailedWrite]], ranks: int) -> None:
    """Raises the error of the first rank that failed; among several ranks with a note of which failed, and where."""
    if not failed:
        return
    error = failed[0][1].error
    if ranks > 1:
        for rank, failure in failed:
            error.add_note(f"on rank {rank}:\n{failure.trace}")
    raise error
