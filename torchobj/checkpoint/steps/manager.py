"""Saves and restores the state of objects by step. The content of a save is `state_content`.

A restore is that of one file or of state shards (`restore`).
"""

import logging
import os
import secrets
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any, Literal, overload

import torch

from torchobj.checkpoint.archive.load import effective_weights_only
from torchobj.checkpoint.leftovers import Attempt
from torchobj.checkpoint.matching import Skipped
from torchobj.checkpoint.state.staging import Stager
from torchobj.checkpoint.steps.checkpoints import Checkpoints, NoStepError
from torchobj.checkpoint.steps.commit import Commit, folder_of
from torchobj.checkpoint.steps.local import LocalFiles, LocalSteps
from torchobj.checkpoint.steps.local_copy import LocalCopy, finish_upload
from torchobj.checkpoint.steps.nearest import Copies, newer_copies
from torchobj.checkpoint.steps.pending_save import SaveHandle
from torchobj.checkpoint.steps.prefixes import PrefixMap
from torchobj.checkpoint.steps.restore import SavedState, read_file, read_shards, restore_file, restore_shards
from torchobj.checkpoint.steps.retention import KeepBest
from torchobj.checkpoint.steps.state_content import StateContent
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, ObjectNotFoundError, StoreError
from torchobj.ranks.machine import machine
from torchobj.ranks.meeting import check_same
from torchobj.ranks.shared_read.reads import Peers
from torchobj.store.transfers import ByteProgress, ProgressOption

__all__ = ["CheckpointManager"]

logger = logging.getLogger("torchobj")


class CheckpointManager(Checkpoints):
    """Saves and restores checkpoints by step.

    A step exists if its commit object exists, which is written last. A save that fails, is killed, or loses against
    another writer of the same step is not a checkpoint, and the rules that keep steps do not count it. With
    `torch.distributed`, all ranks call `save`, `save_async`, `restore`, `wait` and `close` in the same order, and get
    the same outcome. `steps`, `latest`, `best` and `metrics` read the store on the calling rank, and may be called on
    one rank only; while no save is running, they return the same on all ranks.

    The latest step is the one with the largest number. To go back to an older step, `delete` the later ones: until new
    steps pass them, one of them remains the latest. Each such save logs a warning. The first save of a manager also
    deletes the objects of saves that were killed more than a day before; those with an unfinished upload are left to
    `sweep`.

    Args:
        url: `s3://bucket/folder`, `gs://bucket/folder`, `file:///folder` or `memory://name/folder`. The manager uses
            `commits/`, `steps/` and `latest.json` in it.
        keep_last: Number of the newest committed steps to keep, by step number and also by commit time, which differ
            after going back to an older step. None keeps all steps, and cannot be combined with other rules.
        keep_every: Keep steps that are multiples of this.
        keep_best: Keep the steps with the best values of a metric: `KeepBest("loss", "min", 2)`, or the same as a
            tuple. The first step that is saved without the metric logs a warning.
        sharded: Whether each rank writes its state shard, by `torch.distributed.checkpoint`. If False, the first rank
            writes the state as one file of `torch.save`.
        local: A folder on a local disk, which no other job uses. A save writes there first, and sends the files to the
            store; a restore reads there what is complete, and also a step whose upload was interrupted, if the ranks
            have all of it. If the disk is full, slow or read-only, a save goes to the store directly, with one warning.
            The disk needs space for `keep_local` + 1 steps. May have other paths on other machines.
        keep_local: Number of steps to keep there.
        process_group: The ranks that save; all if None.
        config: Settings of the store.

    Raises:
        ConfigError: The URL is not that of a folder, a rule is not valid, or this rank is not in `process_group`.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> with CheckpointManager("memory://example/run-1", keep_last=2) as checkpoints:
        ...     for step in (100, 200, 300):
        ...         checkpoints.save(step, {"model": model, "step": step}, metrics={"loss": 1 / step})
        ...     checkpoints.steps(), checkpoints.restore(into={"model": model, "step": 0})["step"]
        ([200, 300], 300)
    """

    def __init__(
        self,
        url: str,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: KeepBest | tuple[Any, ...] | None = None,
        *,
        sharded: bool = False,
        local: str | os.PathLike[str] | None = None,
        keep_local: int = 1,
        process_group: "torch.distributed.ProcessGroup | None" = None,
        config: StoreConfig | None = None,
    ) -> None:
        super().__init__(url, keep_last, keep_every, keep_best, process_group=process_group, config=config)
        self._sharded = sharded
        self._stager = Stager()
        self._local = None if local is None else LocalSteps(local, keep_local, self.url)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        overwrite: bool = False,
        progress: ProgressOption = None,
        deadline_s: float | None = None,
    ) -> None:
        """Saves a step; it is committed when this returns. Waits for a background save first.

        Args:
            step: Number of the step, 0 or more; the same on all ranks.
            state: A dict. Values with `state_dict` and `load_state_dict` (a model, an optimizer, a `DataLoader` or
                `ElasticDistributedSampler` of torchobj, an `RngState`) are saved as their state, also in nested dicts,
                but not in lists. Modules and optimizers are saved as the first rank has them, or, if ranks have other
                parameters, such as the stages of a pipeline, as each has them; any other value that differs among
                ranks is saved for each rank, and a restore gives each its own. Values that a restore
                refuses unless `weights_only=False` are logged. Do not change tensors before this returns.
            metrics: Numbers by name, for `keep_best`; stored in the commit object.
            overwrite: Replace the step if it is committed; the old one exists until the new one is committed. If the
                old commit object cannot be read, the old data becomes a leftover.
            progress: As for `torchobj.save`, on the first rank; as for `StorageWriter`, on each rank, if `sharded`. An
                exception that it raises ends the save, and nothing is committed.
            deadline_s: Time after which the save gives up, in seconds, on all ranks. It does not delete old steps, and
                a background save that runs gets the time first. The state is taken on this thread, which is not
                interrupted, and written on another one. None: no deadline; once `stop_requested` has returned True,
                the rest of that of `on_signal`.

        Raises:
            CheckpointError: The deadline has passed. Nothing is committed, unless the message says that this is not
                known; the process can exit.
            CheckpointError: The step is committed already, or another writer committed it first.
            ConfigError: The step, the state or the metrics are not valid; or the ranks have managers with other
                arguments, or save other steps.
            StoreError: The data could not be written. Nothing is committed, unless a note of the error says that this
                is not known.
            Exception: An earlier background save failed and its error was not retrieved; this save was not started,
                unless it has a deadline.
        """
        content = self._content(state, copy=None, progress=progress)
        self._save(step, metrics, content, overwrite=overwrite, deadline_s=deadline_s)

    def save_async(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        stage: bool = True,
        when_busy: Literal["wait", "fail"] = "wait",
        overwrite: bool = False,
        progress: ProgressOption = None,
    ) -> SaveHandle:
        """Saves a step in the background. Only one save runs at a time.

        Args:
            step, state, metrics, overwrite: As for `save`.
            stage: Whether to make a staged copy of the state, or of this rank's state shard, before this returns. It
                takes as much memory on the CPU, pinned if tensors are on a GPU; the next save reuses it. If False,
                tensors are read while training continues; if one of them was changed by then, the save fails with its
                name and nothing is committed. Changes that bypass autograd, such as through `.data` or a numpy view,
                are not detected, and may be committed in part. Not for sharded states.
            when_busy: If a save is still running: `wait` for it, or `fail`.
            progress: As for `save`. It is called in the thread of the save.

        Returns:
            The running save. If the caller does not retrieve its error, the manager's next call raises it.

        Raises:
            CheckpointError: The step is committed already, or a save is running and `when_busy="fail"`.
            ConfigError: The step, the state or the metrics are not valid, or a tensor cannot be watched.
            Exception: The state cannot be pickled, or an earlier save failed, as for `save`.
        """
        content = self._content(state, copy=bool(stage), progress=progress)
        return self._save_async(step, metrics, content, when_busy=when_busy, overwrite=overwrite)

    def _content(self, state: Mapping[str, Any], *, copy: bool | None, progress: ProgressOption) -> StateContent:
        return StateContent(
            state, self._stager, copy=copy, sharded=self._sharded, progress=progress, config=self._config
        )

    def _local_copy(self, content: StateContent) -> LocalCopy | None:
        local = self._opened()
        return None if local is None else LocalCopy(local, content, self._config)

    def _settings(self, method: str, **arguments: Any) -> dict[str, str]:
        has_local = self._local is not None and not self._closed
        # First: a rank with another value calls another method next.
        return {"local": repr(has_local), **super()._settings(method, sharded=bool(self._sharded), **arguments)}

    @overload
    def restore(
        self,
        step: int | Literal["latest"] = "latest",
        into: MutableMapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = True,
        prefix_map: Mapping[str, str] | None = None,
        weights_only: bool = True,
        missing_ok: Literal[False] = False,
        progress: ProgressOption = None,
    ) -> MutableMapping[str, Any]: ...

    @overload
    def restore(
        self,
        step: int | Literal["latest"] = "latest",
        into: MutableMapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = True,
        prefix_map: Mapping[str, str] | None = None,
        weights_only: bool = True,
        missing_ok: bool,
        progress: ProgressOption = None,
    ) -> MutableMapping[str, Any] | None: ...

    def restore(
        self,
        step: int | Literal["latest"] = "latest",
        into: MutableMapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = True,
        prefix_map: Mapping[str, str] | None = None,
        weights_only: bool = True,
        missing_ok: bool = False,
        progress: ProgressOption = None,
    ) -> MutableMapping[str, Any] | None:
        """Restores a committed step. All ranks call it, and restore the same step.

        Args:
            step: Number of the step, or the latest. With `local`, also one whose upload was interrupted, if the disks
                of all ranks together have it, and it continues the newest step of the store.
            into: A dict as passed to `save`: its tensors are filled in place, its objects load their states, its dicts
                are entered, and other values are replaced, also by lists of another length. An empty dict gets all
                saved entries, with their tensors on the CPU, except in the state dict of an optimizer. It may have
                fewer entries than the checkpoint, but each of them must be complete, unless `strict` is False. None:
                the whole state is returned, with whole tensors also of a sharded checkpoint, which each rank reads. To
                read it on one rank only, use a manager with a `process_group` of this rank. In a sharded checkpoint the
                keys of dicts are strings, unless the dict here has them, and there are no empty dicts.
            map_location: Device of tensors without `into`, as for `torch.load`; the CPU for a sharded checkpoint.
            strict: If False, entries that only the checkpoint has are ignored, and those that it does not have are left
                unchanged, as by `load_state_dict(strict=False)`; a warning names them. Other shapes remain errors.
            prefix_map: Prefixes of saved names, that is of the keys of dicts, and what replaces them:
                `{"_orig_mod.": "", "module.": ""}` for models that `torch.compile` and DDP wrapped. A prefix that is
                replaced by "" is also removed within a name, where a part of it starts; others at the start only. The
                prefix "" stands before all names of a dict of tensors below the top: `{"": "module."}`. The longest
                one applies. A file is then read into new memory on the CPU before it is copied.
            weights_only: Refuse everything but plain data, as `torch.load` does. Always with the environment variable
                `TORCH_FORCE_WEIGHTS_ONLY_LOAD`.
            missing_ok: Whether to return None if no step is committed, as at the first start of a run.
            progress: As for `torchobj.load`, on the calling rank. An exception that it raises is raised on all ranks.

        Returns:
            `into`; without it the state, with states in place of objects.

        Raises:
            CheckpointError: The step is not committed, its data is gone, it was saved with another `sharded`, it does
                not match `into`, `prefix_map` gives two entries one name, or an entry of `into` differed among another
                number of ranks: nothing was changed, unless an object refused its state.
            ConfigError: The step is not valid, arguments exclude each other, or the ranks have managers with other
                arguments, or restore other steps.
            StoreError: The data cannot be read. `into` may be restored in part.
        """
        compared: dict[str, Any] = {"step": step, "strict": bool(strict), "prefix_map": prefix_map}
        if self._sharded:
            # Reading without it takes other collectives.
            compared["into"] = None if into is None else "a dict"
        settings, local, damaged = self._settings("restore", **compared), self._opened(), set[Attempt[int]]()
        while True:
            try:
                found, is_local = self._nearest(step, settings, local, damaged)
            except NoStepError:
                if missing_ok:
                    return None
                raise
            source, folder = f"{self.url}, step {found.step}", f"{self.url}/{folder_of(found.attempt)}"
            has_copy = local is not None and found.attempt not in damaged
            try:
                with self._ranks.meeting() as meeting:
                    self._check_restore(found, into, map_location, source)
                    prefixes, counted = PrefixMap(prefix_map), ByteProgress(progress)
                    allowed_only = effective_weights_only(weights_only is not False)
                    files = local.files_of(found) if local is not None and has_copy else LocalFiles()
                    # Ranks that restore the same names read the same ranges.
                    own = machine(), files, None if into is None else sorted(map(str, into))
                    of_ranks = meeting.gather(own)
                    if of_ranks is not None:
                        meeting.result = secrets.token_bytes(16), of_ranks
                nonce, of_ranks = meeting.result
                saved = SavedState(
                    folder,
                    self._config,
                    files,
                    self._ranks,
                    source,
                    weights_only=allowed_only,
                    peers=Peers(nonce, of_ranks.count(own)),
                    counted=counted,
                    prefixes=prefixes,
                    skipped=None if strict else Skipped([], []),
                )
                restored = self._read(saved, into, map_location)
            except BaseException as error:
                if local is None or not has_copy or not self._is_damaged(found.attempt, local, error):
                    raise
                damaged.add(found.attempt)
                continue
            if local is not None:
                local.restored(found, is_local=is_local)
            saved.log_skipped()
            return restored

    def _read(
        self, saved: SavedState, into: MutableMapping[str, Any] | None, map_location: Any
    ) -> MutableMapping[str, Any]:
        try:
            if into is None:
                into = read_shards(saved) if self._sharded else read_file(saved, map_location)
            elif self._sharded:
                restore_shards(into, saved)
            else:
                restore_file(into, saved)
        except ObjectNotFoundError as gone:
            raise CheckpointError(f"{saved.source}: committed, but its data is gone: {gone}") from gone
        with self._ranks.meeting():
            saved.counted.finish()
        return into

    def _opened(self) -> LocalSteps | None:
        """Returns the copies on the local disk, which it locks at the first call. Collective."""
        # What a closed manager reads, it reads from the bucket.
        if self._local is not None and not self._closed:
            self._local.open(self._ranks, self._settings("local=", step=None))
            return self._local
        return None

    def _nearest(
        self,
        step: int | Literal["latest"],
        settings: Mapping[str, str],
        local: LocalSteps | None,
        damaged: set[Attempt[int]],
    ) -> tuple[Commit, bool]:
        """Returns the commit of the step that all ranks restore, and whether only the local disks have it. Collective.

        The upload of a step that the disks have together, but not each of them, is finished first.
        """
        while True:
            with self._ranks.meeting() as meeting:
                copies = local.copies() if local is not None and local.is_first else []
                of_all: Any = meeting.gather({**settings, "copies": copies})
                if of_all is not None:
                    of_ranks = [each.pop("copies", []) for each in of_all]
                    check_same(of_all)
                    meeting.result = self._selected(step, local, of_ranks, damaged)
            found: Commit | Copies = meeting.result
            if isinstance(found, Commit):
                return found, False
            if local is None or found.is_on(local.disks):
                return found.commit, True
            sent = finish_upload(found, local, self._commits, self._ranks, self._config)
            if sent is not None:
                return sent, False
            damaged.add(found.attempt)

    def _selected(
        self,
        step: int | Literal["latest"],
        local: LocalSteps | None,
        of_ranks: Sequence[Sequence[Commit]],
        damaged: Collection[Attempt[int]],
    ) -> Commit | Copies:
        wanted = self._wanted(step)
        if local is not None:
            newest = self.latest()
            found = None if newest is None else self._committed(newest)
            copies = newer_copies(found, wanted, local.disks, of_ranks, damaged=damaged, source=self.url)
            if copies is not None:
                return copies
            if wanted is None and found is not None:
                return found
        return self._found(step)

    def _is_damaged(self, attempt: Attempt[int], local: LocalSteps, error: BaseException) -> bool:
        """Returns whether the copy of a step that was not restored is damaged on some disk. Collective."""
        with self._ranks.meeting() as meeting:
            is_cause = local.is_first and isinstance(error, CheckpointError | StoreError)
            damage = local.damage(attempt) if is_cause else None
            of_all = meeting.gather(damage)
            if of_all is not None:
                meeting.result = next((each for each in of_all if each is not None), None)
                if meeting.result is not None:
                    logger.warning(
                        "%s: the local copy of step %d is damaged, and is not used: %s",
                        self.url,
                        attempt.checkpoint,
                        meeting.result,
                    )
        if damage is not None:
            local.discard(attempt)
        return meeting.result is not None

    def _check_restore(self, found: Commit, into: Any, map_location: Any, source: str) -> None:
        if found.kind == "folder":
            raise CheckpointError(f"{source}: the files of a folder; restore it with FolderCheckpoints")
        if (found.kind == "dcp") != self._sharded:
            raise CheckpointError(
                f"{source}: saved with sharded={not self._sharded}; pass the same to CheckpointManager"
            )
        if map_location is not None and str(map_location) != "cpu" and self._sharded and into is None:
            raise ConfigError("map_location=: a sharded checkpoint is read to the CPU; move what restore returns")
        if into is not None and not isinstance(into, MutableMapping):
            raise ConfigError(f"into is a {type(into).__name__}: must be a dict, as {{'model': model}}")
        if into is not None and map_location is not None:
            raise ConfigError("map_location= and into= exclude each other: tensors stay on their devices")

    def close(self) -> None:
        """Waits as `wait` does, and frees the memory of staged copies."""
        try:
            super().close()
        finally:
            self._stager.release()
            if self._local is not None:
                self._local.close()
