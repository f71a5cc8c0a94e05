"""The state of objects as the content of a save: one file of the first rank, or the state shard of each rank."""

import contextlib
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from torchobj.checkpoint.archive.entries import flattened
from torchobj.checkpoint.archive.save import save_counted
from torchobj.checkpoint.dcp.object_names import METADATA
from torchobj.checkpoint.dcp.storage import NewFolderWriter
from torchobj.checkpoint.state.staging import Stager, Watch, planned
from torchobj.checkpoint.state.taken import state_to_save
from torchobj.checkpoint.steps.commit import STATE_FILE, Kind, WrittenObject
from torchobj.config import StoreConfig
from torchobj.exceptions import ConfigError
from torchobj.ranks.meeting import Ranks, packed, unpacked
from torchobj.store.transfers import ByteProgress, ProgressOption

__all__ = ["StateContent"]


class StateContent:
    """The state of objects. The ranks meet twice in `stage`; once more if they may have parts of a module.

    Args:
        state: The objects, as passed to `CheckpointManager.save`.
        stager: Makes the staged copy.
        copy: True writes a staged copy; False the state itself, with a watch on its tensors; None the state itself,
            which the caller does not change.
        sharded: Whether each rank writes its state shard; otherwise the first rank writes one file.
        progress: Receives the progress of that file, or of the state shard of each rank.
        config: How the store of the data is reached.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        stager: Stager,
        *,
        copy: bool | None,
        sharded: bool,
        progress: ProgressOption,
        config: StoreConfig | None,
    ) -> None:
        self._state: Any = state
        self._stager, self._copy, self._sharded = stager, copy, sharded
        self.progress, self._config = progress, config
        self._watch: Watch | contextlib.nullcontext[None] = contextlib.nullcontext()

    @property
    def kind(self) -> Kind:
        """The kind of the commit."""
        return "dcp" if self._sharded else "state"

    def stage(self, ranks: Ranks) -> None:
        """Takes the state of the objects. Collective, as `state_dict` may be.

        Raises:
            ConfigError: The state is not valid, a tensor cannot be watched, or `copy` is False for state shards.
            Exception: A value cannot be copied. Every error is raised on all ranks.
        """
        state, self._state = self._state, None
        found = state_to_save(state, ranks, sharded=self._sharded)

        with ranks.meeting() as meeting:
            self._counted = ByteProgress(self.progress)
            if self._sharded:
                if self._copy is False:
                    raise ConfigError("stage=False: a sharded state is always copied first")
                flattened(found.tree)
                self._state = self._stager.stage_shard(found.tree) if self._copy else found.tree
            sent = meeting.gather(packed(found.values))
            if sent is None:
                return
            values = list(map(unpacked, sent))
            if self._sharded:
                self._state = found.with_values(self._state, values)
                flattened(self._state)
                return
            tree = found.with_values(found.tree, values)
            if self._copy is False:
                self._state = planned(tree)
                self._watch = Watch(self._state.tensors, found.tensors)
            else:
                self._state = self._stager.stage(tree) if self._copy else tree

    def write(self, folder: str, writers: Ranks, copied: ByteProgress | None = None) -> Mapping[str, WrittenObject]:
        """Writes this rank's state shard, or the file of the first rank.

        Args:
            folder: As for `Content`.
            writers: As for `Content`.
            copied: For a folder on the local disk: counts the bytes in place of `progress`, and the settings of the
                store do not apply.
        """
        config, counted = (self._config, self._counted) if copied is None else (None, copied)
        if self._sharded:
            # By default torch divides the entries of one object among ranks, which would mix replicas that differ.
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
            writer = NewFolderWriter(folder, counted, config)
            with writers.collective():
                save_shards(self._state, storage_writer=writer, planner=planner, process_group=writers.group)
            written = {name: WrittenObject(writer.sizes.get(name), crc) for name, crc in writer.checksums.items()}
            return {**written, METADATA: WrittenObject()}
        if writers.is_first:
            with self._watch:
                saved, crc32 = save_counted(self._state, folder + STATE_FILE, config=config, counted=counted)
            return {STATE_FILE: WrittenObject(saved.size, crc32)}
        return {}
