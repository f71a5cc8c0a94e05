"""What iterable datasets share: epochs, the shard of each rank and worker, and the state of a pass."""

import dataclasses
import logging
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch.utils.data

from torchobj.config.checks import check
from torchobj.datasets import worker_process
from torchobj.datasets.base import Sample_co
from torchobj.datasets.errors import OnIterableError, check_iterable_on_error
from torchobj.datasets.sample_ranks import SampleRanks
from torchobj.datasets.sharding import Shard
from torchobj.datasets.shared_values import SharedEpoch
from torchobj.exceptions import ConfigError

__all__ = ["PassDataset", "Progress"]

logger = logging.getLogger("torchobj")


@dataclasses.dataclass
class Progress:
    """The position of an iterator."""

    seed: int
    epoch: int
    #: Number of objects, or samples, of its shard that are done: yielded or skipped.
    done: int
    #: Parameters that must be the same on resume, because `done` counts within this shard.
    shape: dict[str, Any]
    #: The position in a stream of shards, which `done` alone does not determine.
    position: Callable[[], dict[str, Any]] | None = None

    def state(self) -> dict[str, Any]:
        """The position as a dict of plain values."""
        state = {"seed": self.seed, "epoch": self.epoch, "done": self.done, "shape": self.shape}
        return state if self.position is None else state | {"position": self.position()}


def _progress_of(
    seed: int, epoch: int, done: int, shape: dict[str, Any], position: dict[str, Any] | None = None
) -> Progress:
    """The position that `Progress.state` returned."""
    return Progress(seed, epoch, done, shape, None if position is None else lambda: position)


#: The numbers of a state.
_COUNTS = ("seed", "epoch", "done")


def _checked_count(name: str, value: Any) -> int:
    """Returns the int of a number, which may be one of NumPy."""
    number = operator.index(value) if hasattr(value, "__index__") else -1
    check(name, value, "an int, 0 or more, and less than 2^63", ok=0 <= number < 1 << 63)
    return number


class PassDataset(torch.utils.data.IterableDataset[Sample_co]):
    """An iterable dataset whose passes are divided among ranks and workers, and can be resumed.

    Attributes:
        seed, uneven, on_error: As the arguments of the datasets.
    """

    seed: int = 0
    uneven: Any = None
    on_error: OnIterableError = "raise"
    #: The choices for `uneven`.
    _policies: tuple[str, ...] = ("drop", "pad")
    #: Who divides the samples.
    _ranks = SampleRanks()

    def _set_up_passes(self) -> None:
        self._epoch = SharedEpoch()
        self._rank: worker_process.Rank | None = None
        # Of the iterator that was started last in this process.
        self._progress: Progress | None = None
        # The start of the next iterator, if it is of that epoch.
        self._resumed: Progress | None = None

    def prepare(self) -> None:
        """Does what workers inherit. Called by a loader before it starts workers."""

    def _check(self) -> None:
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"seed={self.seed!r}: must be an int, 0 or more")
        if self.uneven not in (None, *self._policies):
            choices = ", ".join(map(repr, self._policies))
            raise ConfigError(f"uneven={self.uneven!r}: must be {choices} or None")
        if self.uneven and not self._ranks.is_divided:
            raise ConfigError(
                f"uneven={self.uneven!r}: needs enable_sharding=True; without it each rank yields all samples"
            )
        check_iterable_on_error(self.on_error, even=self.uneven is not None)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration. With shuffling each epoch has its own order.

        It also applies to persistent workers. Without a call, the next iteration repeats the epoch.

        Args:
            epoch: Number of the epoch; 0 or more.

        Raises:
            ConfigError: `epoch` is negative or not an int.
        """
        self._epoch.set(_checked_count("epoch", epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position of the iterator that was started last in this process, for `load_state_dict`.

        In a DataLoader worker it is the position of the worker; torchdata's `StatefulDataLoader` collects and restores
        these. Under torch.distributed it is valid for all ranks that have yielded the same number of samples.
        """
        epoch = self._epoch.get()
        progress = self._resumed or self._progress
        if progress is None or (progress.epoch != epoch and not worker_process.in_worker()):
            progress = Progress(self.seed, epoch, 0, {})
        return progress.state()

    def epoch_state(self) -> dict[str, Any]:
        """The state at the start of the current epoch. Its keys are always the same."""
        state = self.state_dict()
        return {"seed": state["seed"], "epoch": state["epoch"], "done": 0, "shape": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration yield the rest of the epoch, each sample once.

        Also sets seed and epoch. If `set_epoch` then sets another epoch, that epoch starts from its beginning.

        Args:
            state: The return value of `state_dict`.

        Raises:
            ConfigError: `state` is not from `state_dict`. When iteration starts: it is of other objects, ranks or
                workers.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"state={type(state)}: must be a dict from state_dict")
        seed, epoch, done = (_checked_count(f"{name} of the state", state.get(name)) for name in _COUNTS)
        shape, position = state.get("shape"), state.get("position")
        if not isinstance(shape, Mapping):
            raise ConfigError(f"shape of the state={shape!r}: must be a dict")
        if position is not None and not isinstance(position, Mapping):
            raise ConfigError(f"position of the state={position!r}: must be a dict")
        self._resumed = _progress_of(seed, epoch, done, {**shape}, None if position is None else {**position})
        self.seed = self._resumed.seed
        self._epoch.set(self._resumed.epoch)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if worker_process.is_pickling_for_spawn() and self._ranks.is_divided:
            # In a spawned worker torch.distributed is not initialised, and the loop is not on the stack.
            state["_rank"] = self._ranks.rank(self._rank)
        # The iterator belongs to this process; the position of a pass that is resumed is plain.
        for name in ("_progress", "_resumed"):
            if (progress := state.get(name)) is not None:
                state[name] = progress.state()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name in ("_progress", "_resumed"):
            if isinstance(saved := state.get(name), dict):
                self.__dict__[name] = _progress_of(**saved)

    def _shard(self) -> Shard:
        """The shard of this rank and worker, read now: torch.distributed may have been initialised since."""
        ranks = self._ranks.within_mixture()
        if not ranks.is_divided:
            return Shard()
        info = torch.utils.data.get_worker_info()
        return Shard(*ranks.rank(self._rank), *((0, 1) if info is None else (info.id, info.num_workers)))

    def _warn_of_repeated_samples(self, name: str) -> None:
        """Warns once if each DataLoader worker yields all samples, which is almost always a mistake."""
        worker = torch.utils.data.get_worker_info()
        # A wrapper of the dataset may divide the samples among the workers.
        if worker is None or worker.num_workers == 1 or self._ranks.is_divided or worker.dataset is not self:
            return
        if worker.id == 0 and self._epoch.is_first_warning("repeated"):
            logger.warning(
                "%s: each of %d DataLoader workers yields all samples, so that every sample is returned %d times; pass "
                "enable_sharding=True to divide them among ranks and workers; with rank=0, world_size=1 among the "
                "workers only",
                name,
                worker.num_workers,
                worker.num_workers,
            )

    def _start_progress(self, shape: dict[str, Any], epoch: int) -> Progress:
        """The progress of a new pass, at the loaded state if that is of this epoch.

        If `objects` is None in `shape` or in that of the state, it is not known yet and is not compared.

        Raises:
            ConfigError: The state is of a pass of another shape.
        """
        resumed, self._resumed = self._resumed, None
        is_resumed = resumed is not None and resumed.epoch == epoch
        if resumed is not None and is_resumed and resumed.done:
            before = resumed.shape
            unknown = {"objects": None} if None in (shape.get("objects", 0), before.get("objects", 0)) else {}
            if before | unknown != shape | unknown:
                changed = [name for name in shape if before.get(name) != shape[name]] or list(before)
                shown = ", ".join(f"{name}={before.get(name)!r} (now {shape.get(name)!r})" for name in changed)
                raise ConfigError(
                    f"state of {shown}: cannot be resumed: samples would be lost or repeated; use the state's values"
                )
        done, position = (resumed.done, resumed.position) if resumed is not None and is_resumed else (0, None)
        self._progress = Progress(self.seed, epoch, done, shape, position)
        return self._progress
