"""The storage reader and the storage writer for `torch.distributed.checkpoint`.

`load_items` reads the items, and `save_items` writes them, or `tensor_files` for safetensors; this module reads and
writes the metadata, or the index, which commits them.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchobj.checkpoint.checkpoint_dir import was_refused
from torchobj.checkpoint.dcp.folder_metadata import check_unchanged, folder_metadata
from torchobj.checkpoint.dcp.load_items import ShortFileError, load_items
from torchobj.checkpoint.dcp.metadata import dump_metadata, load_metadata
from torchobj.checkpoint.dcp.object_names import METADATA, rank_prefix, ranked
from torchobj.checkpoint.dcp.removal import DistributedDir
from torchobj.checkpoint.dcp.replicated import replicated_items
from torchobj.checkpoint.dcp.save_items import RankReport, write_items
from torchobj.checkpoint.dcp.tensor_files import TensorFiles, check_tensors, weights_in, write_tensors
from torchobj.checkpoint.safetensors import names
from torchobj.config import StoreConfig
from torchobj.exceptions import (
    BucketNotFoundError,
    CheckpointError,
    ConfigError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from torchobj.ranks.machine import machine
from torchobj.store import ObjectInfo
from torchobj.store.conditions import check_condition
from torchobj.store.transfers import ByteProgress, ProgressOption
from torchobj.urls import SCHEMES, parse_url

__all__ = ["CheckpointStorage", "NewFolderWriter", "StorageReader", "StorageWriter"]

logger = logging.getLogger("torchobj")

#: Version of the metadata format: torch's `CURRENT_DCP_VERSION`, a name that torch 2.6 does not have.
_DCP_VERSION = "1.0.0"

_Result = TypeVar("_Result")


class CheckpointStorage:
    """Base of the storage reader and the storage writer, before torch's base: their folder and configuration.

    Args:
        url: Folder of the checkpoint.
        config: Settings of the store.

    Raises:
        ConfigError: `url` is not a URL of a store, or `config` is not a configuration.
    """

    #: Schemes of the URLs that it accepts.
    _schemes: ClassVar[tuple[str, ...]] = SCHEMES

    def __init__(self, url: str, config: StoreConfig | None) -> None:
        super().__init__()
        self._config = config
        self._checkpoint = self._dir(url)
        #: Identifies this save or load in the metadata.
        self._id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> str:
        """URL of the checkpoint."""
        return self._checkpoint.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.checkpoint_id!r})"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether `checkpoint_id` is a URL of a store."""
        try:
            return isinstance(checkpoint_id, str) and bool(parse_url(checkpoint_id, cls._schemes))
        except ConfigError:
            return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Starts a new save or load, at `checkpoint_id` if given.

        Raises:
            ConfigError: `checkpoint_id` is not a URL of a store.
        """
        if checkpoint_id:
            self._checkpoint = self._dir(checkpoint_id)
        self._id = str(uuid.uuid4())

    def _dir(self, url: str | os.PathLike[str]) -> DistributedDir:
        if not isinstance(url, str):
            raise ConfigError(f"checkpoint_id={url!r}: must be a URL as a str; a path would lose one of its slashes")
        parse_url(url, self._schemes)
        return DistributedDir(url, self._config)


def _done(result: _Result) -> Future[_Result]:
    future: Future[_Result] = Future()
    future.set_result(result)
    return future


class StorageReader(CheckpointStorage, TorchStorageReader):
    """Loads distributed checkpoints from a store that torch 2.6 or later, s3torchconnector or torchobj wrote.

    Reads ranges of all files in parallel, directly into the memory of the tensors. Of a tensor with another sharding
    than when it was saved, it reads only the required ranges. It compares the checksums in the files of all tensors
    that are read whole. Unpickling the metadata executes no code from it. A reader can be pickled.

    A folder without `.metadata` may also be one of safetensors: written by `StorageWriter(format="safetensors")` or
    torch's `HuggingFaceStorageWriter`, or a model of the Hugging Face Hub. Its files have no checksums.

    Tensors that several ranks load whole, such as those of DDP or of the replicas of HSDP, are read once by the ranks
    of a machine, as `torchobj.load(share="auto")` reads.

    Args:
        url: Folder of the checkpoint: `s3://bucket/step-100`, `gs://bucket/step-100`, `file:///folder` or `memory://name/folder`.
        verify: Compare checksums.
        share: `"auto"`, or None: each rank reads all of its tensors for itself.
        progress: Receives a `torchobj.files.Progress` of the bytes that this rank loads, about every 0.1 s and at the
            end; True shows a bar on stderr. An exception that it raises ends the load.
        config: Settings of the store.

    Raises:
        ConfigError: `url` is not a URL of a store.

    Example:
        ```python
        reader = torchobj.checkpoint.StorageReader("s3://bucket/step-100")
        torch.distributed.checkpoint.load(state_dict, storage_reader=reader)
        ```
    """

    def __init__(
        self,
        url: str,
        *,
        verify: bool = True,
        share: Literal["auto"] | None = "auto",
        progress: ProgressOption = None,
        config: StoreConfig | None = None,
    ) -> None:
        super().__init__(url, config)
        if share not in ("auto", None):
            raise ConfigError(f"share={share!r}: must be 'auto' or None")
        self._counted = ByteProgress(progress)
        self._verify, self._share = verify, share
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Starts a new load, from `checkpoint_id` if given.

        Raises:
            ConfigError: `checkpoint_id` is not a URL of a store.
        """
        super().reset(checkpoint_id)
        self._metadata = None

    # torch passes keywords only to signatures with the name `kwargs`.
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Returns the metadata of the checkpoint, or with `rank` the metadata that this rank wrote.

        Raises:
            ObjectNotFoundError: The checkpoint does not exist.
            CheckpointError: The object is not metadata, or names a class that metadata does not need; or a file of
                safetensors is damaged, or the parts of a tensor do not cover it.
        """
        name = ranked(METADATA, kwargs.get("rank"))
        try:
            metadata = load_metadata(self._checkpoint.get(name), self._checkpoint.url_of(name))
        except BucketNotFoundError:
            raise
        except ObjectNotFoundError:
            found = folder_metadata(self._checkpoint, self._config) if kwargs.get("rank") is None else None
            if found is None:
                raise
            logger.debug("%s: not verified: files of safetensors have no checksums", self.checkpoint_id)
            metadata = found
        # Metadata of another version of torch may not have the field.
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self._id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001, ARG002
        """Takes the metadata of the checkpoint.

        Raises:
            CheckpointError: The metadata has no table of items.
        """
        if not isinstance(metadata.storage_data, dict):
            raise CheckpointError(f"{self.checkpoint_id}: the metadata has no table of items (storage_data)")
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan, with the machine of this rank."""
        return plan if self._share is None else dataclasses.replace(plan, storage_data=machine())

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans, each with the items that other ranks of the machine load as well."""
        if self._share is None or self._metadata is None:
            return plans
        found = replicated_items(plans, [plan.storage_data for plan in plans], self._metadata)
        return [dataclasses.replace(plan, storage_data=items) for plan, items in zip(plans, found, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Loads the items of the rank into the destinations of the planner.

        Raises:
            IntegrityError: Bytes differ from what was written; the message names tensor and file.
            CheckpointError: The checkpoint does not have an item, or has an invalid one.
            ObjectChangedError: Another save replaced a file during the load.
            StoreError: A request failed.
        """
        self._counted.begin()
        loaded = self._load(plan, planner)
        self._counted.finish()
        return loaded

    def _load(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._metadata is None:
            raise CheckpointError(f"{self.checkpoint_id}: set_up_storage_reader was not called")
        infos = [self._metadata.storage_data.get(item.storage_index) for item in plan.items]
        metadata, counted = self._metadata, self._counted
        # Without collectives there are no plans of other ranks.
        replicated = plan.storage_data if isinstance(plan.storage_data, list) else []
        arguments: Any = {"replicated": replicated, "config": self._config, "verify": self._verify, "counted": counted}
        try:
            load_items(self._checkpoint, metadata, plan.items, planner, **arguments)
        except ShortFileError:
            check_unchanged(self._checkpoint, infos)
            raise
        check_unchanged(self._checkpoint, infos)
        return _done(None)


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

    With `format="safetensors"` the files are those of torch's `HuggingFaceStorageWriter`, of a state that has tensors
    only. If each tensor is whole, they are a folder of weights as `torchobj.load` reads it, with an index. Otherwise
    each rank writes shards, which `StorageReader` loads with any sharding. With `consolidate` these are in the folder
    `sharded`, and the coordinator joins them to such a folder of weights, in about 512 MiB of memory. The weights that
    are in the folder are deleted first, and the index is written last: a save that fails or is killed leaves a folder
    without an index. A tensor that has several names is written for each.

    Args:
        url: Folder of the checkpoint: `s3://bucket/step-100`, `gs://bucket/step-100`, `file:///folder` or `memory://name/folder`.
        format: `"safetensors"`, or None for torch's own format.
        fqn_to_index_mapping: For safetensors the number of the file of each tensor, from 1 on; None: one file, or with
            whole tensors on several ranks one file for each.
        consolidate: For safetensors: write files of whole tensors, divided exactly as the mapping says.
        thread_count: Number of files for the items of a rank. One is enough: its parts are sent in parallel. Not for
            safetensors.
        prefix_strategy: Returns how the names of the files of a rank start, given its number; `__<rank>_` if None. The
            strategies of s3torchconnector are in `torchobj.s3torchconnector.dcp`. Not for safetensors.
        overwrite: Replace an existing checkpoint.
        progress: Receives a `torchobj.files.Progress` of the bytes that this rank saves, as they are sent; True shows
            a bar on stderr. An exception that it raises ends the save on all ranks.
        config: Settings of the store.

    Raises:
        ConfigError: `url` is not a URL of a store, or an argument is invalid, or is not for this format.

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
        format: names.Format = None,  # noqa: A002  the argument of `torchobj.save`
        fqn_to_index_mapping: Mapping[str, int] | None = None,
        consolidate: bool = False,
        thread_count: int = 1,
        prefix_strategy: Callable[[int], str] | None = None,
        overwrite: bool = True,
        progress: ProgressOption = None,
        config: StoreConfig | None = None,
    ) -> None:
        if not isinstance(thread_count, int) or thread_count < 1:
            raise ConfigError(f"thread_count={thread_count!r}: must be an int of 1 or more")
        check_condition(overwrite, None)
        #: How tensors are divided into files of safetensors; None for torch's own format.
        self._tensor_files: TensorFiles | None = None
        if names.is_safetensors(None, format):
            if thread_count != 1 or prefix_strategy is not None:
                raise ConfigError("thread_count and prefix_strategy are not for format='safetensors'")
            self._tensor_files = TensorFiles(fqn_to_index_mapping, consolidate=consolidate)
        elif fqn_to_index_mapping is not None or consolidate:
            raise ConfigError("fqn_to_index_mapping and consolidate are only for format='safetensors'")
        super().__init__(url, config)
        self._counted = ByteProgress(progress)
        self._thread_count = thread_count
        self._prefix_of = prefix_strategy or rank_prefix
        self._overwrite = overwrite
        #: The rank, if each rank writes its own metadata.
        self._rank: int | None = None
        self._metadata_name = METADATA
        #: CRC-32 of each file of the last save, by name, on the coordinator.
        self.checksums: dict[str, int] = {}
        #: Size of each of these files in bytes.
        self.sizes: dict[str, int] = {}

    def storage_meta(self) -> StorageMeta:
        """Returns the description of this save for the metadata."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._id)

    # torch passes keywords only to signatures with the name `kwargs`.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001, ARG002
        """Takes torch's choice: one metadata object for all ranks, or one for each rank.

        Raises:
            ConfigError: Each rank would write its own metadata, which files of safetensors do not have.
        """
        self._rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")
        if self._tensor_files is not None and self._rank is not None:
            raise ConfigError(
                "use_collectives=False: not for format='safetensors', whose files the ranks name together"
            )
        self._metadata_name = ranked(METADATA, self._rank) if self._tensor_files is None else names.INDEX

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan; if each rank writes its own metadata, with the prefix of its files.

        Raises:
            CheckpointError: The checkpoint exists, and `overwrite` is false.
            ConfigError: The state has values that are not tensors, and the format is safetensors.
        """
        if self._tensor_files is not None:
            check_tensors(plan.items)
        return plan if self._rank is None else self._with_prefixes({self._rank: plan})[0]

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns the plans with the prefix of each rank's files, or for safetensors with the file of each item.

        Raises:
            CheckpointError: The checkpoint exists, and `overwrite` is false.
            ConfigError: `fqn_to_index_mapping` has no number for a tensor.
        """
        if self._tensor_files is not None:
            files = self._tensor_files.names(plans)
            self._clear()
            return [dataclasses.replace(plan, storage_data=of_plan) for plan, of_plan in zip(plans, files, strict=True)]
        return plans if self._rank is not None else self._with_prefixes(dict(enumerate(plans)))

    def _with_prefixes(self, plans: dict[int, SavePlan]) -> list[SavePlan]:
        if not self._overwrite and self._checkpoint.head(self._metadata_name) is not None:
            raise self._exists()
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(self._prefix_of(rank)))
            for rank, plan in plans.items()
        ]

    def _clear(self) -> None:
        """Deletes the weights in the folder, so that no file of another save is read with those of this one.

        Raises:
            CheckpointError: There are some, or another checkpoint, and `overwrite` is false.
        """
        found = weights_in(self._checkpoint)
        if found and not self._overwrite:
            raise self._exists(found[0])
        if METADATA in found:
            self._checkpoint.delete(sorted(self._names_of_previous(METADATA)))
        # The index or the metadata first: without it the folder has no checkpoint.
        for names_of_kind in (found[:1], found[1:]):
            self._checkpoint.delete(names_of_kind)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the items of the rank. A failure is part of the result; `finish` raises it on all ranks."""
        try:
            self._counted.begin()
            checkpoint, placed, items, counted = self._checkpoint, plan.storage_data, plan.items, self._counted
            if self._tensor_files is not None:
                results = write_tensors(checkpoint, placed, items, planner, counted=counted)
            else:
                results = write_items(checkpoint, placed.prefix, items, planner, self._thread_count, counted=counted)
            self._counted.finish()
        except BaseException as error:  # noqa: BLE001  the coordinator raises it, on all ranks
            results = [RankReport({}, error, "".join(traceback.format_exception(error))).result()]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the checkpoint by writing its metadata, or for safetensors the index.

        Raises:
            CheckpointError: A planned item was not written; or the checkpoint exists now, and `overwrite` is false; or
                another process swept the files of this save.
            StoreError: The metadata could not be written.
            BaseException: The failure of the first rank that failed. A note names the rank.
        """
        self.checksums = {}
        self.sizes = sizes = dict[str, int]()
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
            data: bytes | None = None
            previous: tuple[set[str], list[ObjectInfo]] | None = None
            if self._tensor_files is not None:
                data = self._tensor_files.index(self._checkpoint, metadata, sizes, self._config)
            else:
                data, previous = dump_metadata(metadata), self._previous(sizes)
        except BaseException:
            self._checkpoint.discard(sizes)
            raise
        if data is not None:
            self._commit(data, sizes)
        if previous is not None:
            self._tidy(sizes, *previous)

    def _previous(self, sizes: dict[str, int]) -> tuple[set[str], list[ObjectInfo]]:
        """Returns the files of the checkpoint that is replaced, and the objects in the folder.

        Raises:
            CheckpointError: A file of this save is missing, or has another size.
        """
        replaced = self._names_of_previous(self._metadata_name) - sizes.keys()
        # Immediately before the metadata is written: another process may have swept the files since.
        return replaced, self._listed(sizes)

    def _tidy(self, sizes: dict[str, int], replaced: set[str], listed: list[ObjectInfo]) -> None:
        """Deletes the files of the replaced checkpoint, and those of killed saves. Failures are only logged."""
        with self._logged(f"files of the previous checkpoint could not be deleted: {', '.join(sorted(replaced))}"):
            self._checkpoint.delete(sorted(replaced))
        with self._logged("files of killed saves could not be deleted"):
            for left in self._checkpoint.sweep_expired(listed, sizes, _delimiter(sizes)):
                logger.info("deleted a file of a save that was killed: %s", self._checkpoint.url_of(left.key))

    def _commit(self, metadata: bytes, sizes: dict[str, int]) -> None:
        """Writes the metadata. If it certainly was not written, deletes the files of this save."""
        unknown = f"it is unknown whether {self.checkpoint_id} was saved; its files were not deleted"
        try:
            self._put_metadata(metadata)
        except PreconditionFailedError:
            # A PUT whose response was lost is retried, and then finds its own object.
            try:
                found = self._checkpoint.find(self._metadata_name)
            except StoreError as error:
                error.add_note(unknown)
                raise
            if found != metadata:
                self._checkpoint.discard(sizes)
                raise self._exists() from None
        except StoreError as error:
            if was_refused(error):
                self._checkpoint.discard(sizes)
            else:
                error.add_note(unknown)
            raise

    def _put_metadata(self, data: bytes) -> None:
        self._checkpoint.store.put(self._checkpoint.key(self._metadata_name), data, overwrite=self._overwrite)

    @contextlib.contextmanager
    def _logged(self, failure: str) -> Iterator[None]:
        """Logs an error of the block: the checkpoint is saved."""
        try:
            yield
        except StoreError as error:
            logger.warning("%s is saved, but %s: %s", self.checkpoint_id, failure, error)

    def _listed(self, sizes: dict[str, int]) -> list[ObjectInfo]:
        """Returns the objects in the folder: below it too if a prefix names folders.

        Args:
            sizes: Size of each file of this save in bytes, by name.

        Raises:
            CheckpointError: A file of this save is missing, or has another size.
        """
        listed = self._checkpoint.objects("", _delimiter(sizes))
        # Listings may have no sizes.
        found = {info.key: sizes.get(info.key) if info.size is None else info.size for info in listed}
        lost = sorted(name for name, size in sizes.items() if found.get(name) != size)
        if lost:
            message = "another process swept files of this save; give sweep() an older_than_s longer than a save takes"
            raise CheckpointError(f"{self.checkpoint_id}: {message}: {len(lost)} of {len(sizes)}, such as {lost[0]}")
        return listed

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

    def _exists(self, name: str | None = None) -> CheckpointError:
        # The message of torch's own writer.
        url = self._checkpoint.url_of(name or self._metadata_name)
        return CheckpointError(f"Checkpoint already exists and overwrite=False: {url}")

    def _names_of_previous(self, metadata: str) -> set[str]:
        """Returns the files of the checkpoint that this save replaces, which its metadata names."""
        if not self._overwrite:
            return set()
        try:
            files = self._checkpoint.files_of(metadata)
        except CheckpointError as error:
            logger.warning("replacing %s; its old files are not deleted: %s", self.checkpoint_id, error)
            return set()
        if files is not None:
            logger.info("replacing %s", self._checkpoint.url_of(metadata))
        return files or set()


class NewFolderWriter(StorageWriter):
    """Writes into a folder that no other save has used, and whose objects the caller lists before it commits them."""

    def __init__(self, url: str, counted: ByteProgress, config: StoreConfig | None) -> None:
        super().__init__(url, config=config)
        self._counted = counted

    def _previous(self, sizes: dict[str, int]) -> tuple[set[str], list[ObjectInfo]]:  # noqa: ARG002  nothing is there
        return set(), []

    def _tidy(self, sizes: dict[str, int], replaced: set[str], listed: list[ObjectInfo]) -> None:
        """Deletes nothing: the folder had no other files."""


def _delimiter(names: Iterable[str]) -> str | None:
    """Returns by what the folder is listed: objects in its subfolders only if a prefix names folders."""
    return None if any("/" in name for name in names) else "/"


def _check_written(reports: list[tuple[int, RankReport]], ranks: int) -> None:
    """Raises the error of the first rank that failed, with a note for each failed rank if there are several ranks.

    Raises:
        CheckpointError: Several ranks wrote one file.
    """
    failed = [(rank, report.error, report.trace) for rank, report in reports if report.error is not None]
    if failed:
        _, error, _ = failed[0]
        for rank, _, trace in failed if ranks > 1 else ():
            error.add_note(f"on rank {rank}:\n{trace}")
        raise error
    written = collections.Counter(name for _, report in reports for name in report.checksums)
    for name, count in written.items():
        if count > 1:
            # Plans that a planner caches were named in another save.
            raise CheckpointError(f"{count} ranks wrote {name}: save without enable_plan_caching")
