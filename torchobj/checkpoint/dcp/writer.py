"""What `torch.distributed.checkpoint` saves through. Leaves the items to `writing`, their bytes to `file`."""

import dataclasses
import logging
import os
import uuid
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchobj.checkpoint.dcp.manifest import Manifest, WrittenFile
from torchobj.checkpoint.dcp.metadata import dump_metadata, load_metadata
from torchobj.checkpoint.dcp.place import MANIFEST, METADATA, Placed, is_item_file, ranked
from torchobj.checkpoint.dcp.prefix import DefaultPrefixStrategy, S3PrefixStrategyBase
from torchobj.checkpoint.dcp.writing import InfoOfLast, write_items
from torchobj.config import S3ClientConfig, StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, PreconditionFailedError, StoreError

__all__ = ["StorageWriter"]

logger = logging.getLogger("torchobj")

#: torch's number of the form (`CURRENT_DCP_VERSION`), which older ones have no name for.
_DCP_VERSION = "1.0.0"


class StorageWriter(Placed, TorchStorageWriter):
    """Saves distributed checkpoints to a store.

    The checkpoint exists when its `.metadata` does, which is written last, by one PUT. Each save writes files of its
    own: one that fails, or is killed, leaves the checkpoint that was there before as it was. When a save has replaced
    another one, the files of that are deleted, and those of a save that ended just before its `.metadata`; what cannot
    be deleted is named in a warning. Any failure of any rank is raised on all of them.

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
        #: The metadata and the manifest that were there before this save.
        self._previous: bytes | None = None
        self._previous_manifest: Manifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, to another URL where one is given.

        Raises:
            ConfigError: It is no URL.
        """
        super().reset(checkpoint_id)
        self._save_id = str(uuid.uuid4())
        self._previous = self._previous_manifest = None

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
        self._look_for_previous()
        return dataclasses.replace(plan, storage_data=_StoragePrefix(self._prefix_strategy(self._rank)))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans with the names of each rank's files.

        Raises:
            CheckpointError: There is a checkpoint, and it may not be replaced.
        """
        if self._rank is not None:
            return plans
        self._look_for_previous()
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(self._prefix_strategy(rank)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the rank's items, and returns when they are stored.

        Raises:
            StoreError: What kept one of them from being stored.
        """
        results = write_items(self._place, plan.storage_data.prefix, plan.items, planner, self._thread_count)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Makes the checkpoint, by its metadata.

        Raises:
            CheckpointError: Something that was planned was not written; or there is a checkpoint by now that may not
                be replaced.
            StoreError: The metadata could not be stored.
        """
        files: list[WrittenFile] = []
        stored: dict[MetadataIndex, _StorageInfo] = {}
        for result in (result for of_rank in results for result in of_rank):
            info = result.storage_data
            if isinstance(info, InfoOfLast):
                files.append(info.file)
                info = info.plain()
            stored[result.index] = info
        self._check_complete(metadata, stored)
        metadata.version = _DCP_VERSION
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        replaced = self._names_of_previous() - {file.name for file in files}
        manifest = Manifest(self._save_id, tuple(sorted(files)), tuple(sorted(replaced)))
        self._place.store.put(self._place.key(ranked(MANIFEST, self._rank)), manifest.dump())
        self._put_metadata(dump_metadata(metadata))
        self._previous = self._previous_manifest = None
        self._delete(replaced)

    def _delete(self, replaced: set[str]) -> None:
        """Deletes files that no checkpoint has any more. The save has succeeded by now, whatever comes of it."""
        if not replaced:
            return
        try:
            self._place.store.delete([self._place.key(name) for name in replaced])
        except StoreError as error:
            names = ", ".join(sorted(replaced))
            logger.warning(
                "%s is saved; files of before that may be left there: %s: %s", self.checkpoint_id, names, error
            )

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

    def _look_for_previous(self) -> None:
        self._previous = self._place.find(self._metadata_name())
        if self._previous is not None:
            if not self._overwrite:
                raise self._exists()
            logger.info("%s is replaced", self._place.url_of(self._metadata_name()))
        # Not later: the manifest of a save that runs meanwhile is no business of this one.
        name = ranked(MANIFEST, self._rank)
        data = self._place.find(name)
        try:
            self._previous_manifest = None if data is None else Manifest.load(data, self._place.url_of(name))
        except CheckpointError as error:
            logger.warning("%s: files that it alone names are kept", error)

    def _exists(self) -> CheckpointError:
        return CheckpointError(f"{self._place.url_of(self._metadata_name())} exists, and overwrite=False")

    def _names_of_previous(self) -> set[str]:
        """The files that have no use after this save: of the checkpoint that was there, and of saves that failed."""
        manifest, previous = self._previous_manifest, self._previous
        names: set[str] = set()
        if manifest is not None and previous is not None and manifest.save_id.encode() in previous:
            # It is of the save that wrote the metadata, which takes much longer to read.
            names.update(file.name for file in manifest.files)
        else:
            # A save that ended between its manifest and its metadata left its id in the first alone.
            names.update(() if manifest is None else manifest.names())
            names.update(() if previous is None else self._names_in(previous))
        ours = {name for name in names if is_item_file(name)}
        if ours != names:
            kept = sorted(map(repr, names - ours))
            logger.warning("%s: are no files of a checkpoint, and kept: %s", self.checkpoint_id, ", ".join(kept))
        return ours

    def _names_in(self, metadata: bytes) -> set[str]:
        url = self._place.url_of(self._metadata_name())
        try:
            return {info.relative_path for info in load_metadata(metadata, url).storage_data.values()}
        except (CheckpointError, AttributeError, TypeError) as error:
            logger.warning("%s is replaced, but its files are kept, for it cannot be read: %s", url, error)
            return set()

    def _put_metadata(self, data: bytes) -> None:
        key = self._place.key(self._metadata_name())
        try:
            self._place.store.put(key, data, if_none_match=not self._overwrite)
        except PreconditionFailedError:
            # A PUT whose answer was lost is sent again, and meets what it has written itself.
            if self._place.find(self._metadata_name()) != data:
                raise self._exists() from None
