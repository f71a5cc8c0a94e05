"""The ranks of a job that saves together: one outcome on all of them. Without `torch.distributed` there is one rank."""

import datetime
import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from torchobj.exceptions import CheckpointError, ConfigError

__all__ = ["RankGoneError", "Ranks", "portable"]

#: How long a rank waits for another, which may be saving. A rank that is killed is noticed at once; one whose host is
#: lost is for the job's launcher to notice. No save takes a day: a terabyte at 100 Mbit/s is 22 hours.
_PATIENCE = datetime.timedelta(days=1)


class RankGoneError(CheckpointError):
    """Another rank does not answer."""


_Answer = TypeVar("_Answer")


class Ranks:
    """Agreement among ranks, on a process group of its own.

    What talks in a thread of its own has a `Ranks` of its own: two threads' messages must not mix. The group is made at
    the first use, which all ranks come to together. That must be on the thread that makes the program's other groups:
    torch tells groups apart by the order in which they are made.

    Args:
        group: The ranks that save; None for all of them.

    Raises:
        ConfigError: This rank is none of the group.
    """

    def __init__(self, group: "torch.distributed.ProcessGroup | None" = None) -> None:
        if group is not None and torch.distributed.get_rank(group) < 0:
            raise ConfigError("process_group: this rank is none of it; only its ranks save, and have a manager")
        self._members = group
        self._own: torch.distributed.ProcessGroup | None = None

    @property
    def several(self) -> bool:
        """Whether there is more than one rank."""
        found = torch.distributed.is_available() and torch.distributed.is_initialized()
        return found and torch.distributed.get_world_size(self._members) > 1

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that commits."""
        return not self.several or torch.distributed.get_rank(self._members) == 0

    @property
    def number(self) -> int:
        """Of this rank, among those that save."""
        return torch.distributed.get_rank(self._members) if self.several else 0

    @property
    def count(self) -> int:
        """How many ranks save."""
        return torch.distributed.get_world_size(self._members) if self.several else 1

    @property
    def group(self) -> "torch.distributed.ProcessGroup | None":
        """The own group, on the CPU; None where there is one rank."""
        if not self.several:
            return None
        if self._own is None:
            members = None if self._members is None else torch.distributed.get_process_group_ranks(self._members)
            made = torch.distributed.new_group(
                members, timeout=_PATIENCE, backend="gloo", use_local_synchronization=members is not None
            )
            self._own = cast("torch.distributed.ProcessGroup", made)
        return self._own

    def meet(self) -> None:
        """Makes the group now, where there is none yet. All ranks call it."""
        _ = self.group

    def broadcast(self, value: Any) -> Any:
        """What the first rank has as `value`, on every rank."""
        if not self.several:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """What each rank has as `value`, on every rank, by their numbers; tensors on the CPU.

        Raises:
            Exception: What pickling or unpickling raises on one of the ranks, on all of them.
            RankGoneError: Another rank does not answer.
        """
        if not self.several:
            return [value]
        # Pickled before the collective: a rank that fails within it leaves the others waiting.
        data = self.together(lambda: _written(value))
        gathered = self._gathered(data)
        return self.together(lambda: [_read_back(of_rank) for of_rank in gathered])

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.count
        try:
            torch.distributed.all_gather_object(values, value, group=self.group)
        except RuntimeError as lost:
            raise RankGoneError(f"another rank is gone: {lost}") from lost
        return values

    def agree(self, error: BaseException | None) -> None:
        """Waits for all ranks, and raises where one has an error: a rank's own, or that of the first rank with one.

        Raises:
            BaseException: The error.
            RankGoneError: There is none here, and another rank does not answer.
        """
        if self.several:
            try:
                errors = self._gathered(None if error is None else portable(error))
            except RankGoneError as gone:
                raise error or gone from gone.__cause__
            error = error or next((other for other in errors if other is not None), None)
        if error is not None:
            raise error

    def together(self, do: Callable[[], _Answer]) -> _Answer:
        """What `do` returns when it did so on all ranks; else raises as `agree` does."""
        try:
            answer = do()
        except BaseException as error:
            self.agree(error)
            raise
        self.agree(None)
        return answer


def _written(value: Any) -> bytes:
    """A value of any device as bytes."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _read_back(data: bytes) -> Any:
    """What `_written` was given on a rank of this job, with tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def portable(error: BaseException) -> Exception:
    """The error as another process can have it: itself, or what it says."""
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301  it was pickled here
        if isinstance(error, Exception) and str(copy) == str(error):
            return error
    except Exception:  # noqa: BLE001, S110  what an exception of the user's does when it is pickled is anything
        pass
    return CheckpointError(f"another rank failed: {type(error).__name__}: {error}")
