"""Agreement among the ranks that save together. Without `torch.distributed` there is one rank."""

import datetime
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException

from torchobj import _torchobj
from torchobj.exceptions import CheckpointError, ConfigError, TorchobjError

__all__ = ["RankGoneError", "Ranks", "collective", "portable"]

#: Timeout of a rank that waits for another one, which may be saving. A killed rank is detected immediately; the job's
#: launcher detects a lost host. No save takes a day: a terabyte at 100 Mbit/s takes 22 hours.
_TIMEOUT = datetime.timedelta(days=1)


class RankGoneError(CheckpointError):
    """Another rank does not respond."""


@contextmanager
def collective() -> Iterator[None]:
    """Converts the errors of collectives of torch in the block.

    Raises:
        BaseException: That of the first rank that failed to save or load a distributed checkpoint.
        RankGoneError: Another rank does not respond: the failures of a rank itself are no bare RuntimeErrors there.
    """
    try:
        yield
    except CheckpointException as error:
        # torch's own is not an Exception.
        raise next((cause for cause, _ in error.failures.values()), error) from error
    except RuntimeError as lost:
        if isinstance(lost, TorchobjError):
            raise
        raise RankGoneError(f"another rank is gone: {lost}") from lost


_Result = TypeVar("_Result")


class Ranks:
    """Agreement among ranks, with its own process group.

    Each thread needs its own `Ranks`, so that messages do not mix. The group is created at the first use, which must be
    collective, and on the thread that creates the program's other groups: torch identifies groups by the order of their
    creation.

    Args:
        group: The ranks that save; None for all.

    Raises:
        ConfigError: This rank is not in the group.
    """

    def __init__(self, group: "torch.distributed.ProcessGroup | None" = None) -> None:
        if group is not None and torch.distributed.get_rank(group) < 0:
            raise ConfigError("process_group: this rank is not in it; create the manager on its ranks only")
        self._members, self._process = group, _torchobj.process_number()
        self._own: torch.distributed.ProcessGroup | None = None

    @property
    def count(self) -> int:
        """The number of ranks that save."""
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_world_size(self._members) if is_distributed else 1

    @property
    def several(self) -> bool:
        """Whether there are several ranks."""
        return self.count > 1

    @property
    def number(self) -> int:
        """The number of this rank among those that save."""
        return torch.distributed.get_rank(self._members) if self.several else 0

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that commits."""
        return self.number == 0

    @property
    def group(self) -> "torch.distributed.ProcessGroup | None":
        """The own process group, on the CPU; created at the first use. None if there is one rank.

        Raises:
            CheckpointError: This is a forked child of the rank, which has no thread that communicates.
        """
        if not self.several:
            return None
        if self._process != _torchobj.process_number():
            raise CheckpointError(
                f"this is a forked child of rank {self.number}, and cannot communicate with the other ranks: call the "
                "manager in the rank itself"
            )
        if self._own is None:
            members = None if self._members is None else torch.distributed.get_process_group_ranks(self._members)
            made = torch.distributed.new_group(
                members, timeout=_TIMEOUT, backend="gloo", use_local_synchronization=members is not None
            )
            self._own = cast("torch.distributed.ProcessGroup", made)
        return self._own

    def of_first(self, do: Callable[..., _Result], *arguments: Any) -> _Result:
        """Calls `do` with the arguments on the first rank, and returns its result on all ranks.

        Raises:
            Exception: `do` failed; raised on all ranks.
        """
        with self.together():
            results = [do(*arguments) if self.is_first else None]
        if self.several:
            # A gather would send as many bytes for each rank, and keep them on all ranks.
            with collective():
                torch.distributed.broadcast_object_list(results, group=self.group, group_src=0)
        return cast("_Result", results[0])

    def gather(self, value: Any, *, on_first: bool = False) -> list[Any]:
        """Returns the values of all ranks, by rank number, with tensors on the CPU.

        Args:
            value: The value of this rank.
            on_first: Whether only the first rank needs them; the others get an empty list.

        Raises:
            Exception: A value cannot be pickled or unpickled; raised on all ranks.
            RankGoneError: Another rank does not respond.
        """
        if not self.several:
            return [value]
        # Pickled before the collective: if a rank failed in it, the others would wait.
        with self.together():
            data = _pickled(value)
        gathered = self._gathered(data, on_first=on_first)
        with self.together():
            values = [_unpickled(of_rank) for of_rank in gathered]
        return values  # noqa: RET504  mypy requires a return after the block

    def _gathered(self, value: Any, *, on_first: bool = False) -> list[Any]:
        values: list[Any] = [None] * self.count
        with collective():
            if not on_first:
                torch.distributed.all_gather_object(values, value, group=self.group)
                return values
            torch.distributed.gather_object(value, values if self.is_first else None, group=self.group, group_dst=0)
            return values if self.is_first else []

    def agree(self, error: BaseException | None, settings: Mapping[str, Any] | None = None) -> None:
        """Waits for all ranks, and raises if one has an error: this rank's, or that of the first such rank.

        Args:
            error: The error of this rank.
            settings: Values by name that must have the same `repr` on all ranks.

        Raises:
            BaseException: The error.
            ConfigError: No rank has an error, and the settings differ; raised on all ranks.
            RankGoneError: This rank has no error, and another rank does not respond.
        """
        if self.several:
            own = {name: repr(value) for name, value in (settings or {}).items()}
            try:
                gathered = self._gathered((None if error is None else portable(error), own))
            except RankGoneError as gone:
                # A collective of `state_dict`, for example, fails with a RuntimeError of torch if a rank is gone.
                is_of_torch = type(error) is RuntimeError or isinstance(error, torch.distributed.DistError)
                if error is None or is_of_torch:
                    raise gone from error or gone.__cause__
                raise error from gone
            error = error or next((other for other, _ in gathered if other is not None), None)
            error = error or _difference([of_rank for _, of_rank in gathered])
        if error is not None:
            raise error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Waits for all ranks at the end of the block, and raises as `agree` if it failed on one of them."""
        try:
            yield
        except BaseException as error:
            self.agree(error)
            raise
        self.agree(None)


def _difference(settings: Sequence[Mapping[str, str]]) -> ConfigError | None:
    """Returns an error that names the first difference between the first rank and another one."""
    for number, others in enumerate(settings):
        for name, value in settings[0].items():
            if others.get(name) != value:
                return ConfigError(
                    f"{name}={others.get(name)} on rank {number}, {value} on rank 0: must be the same on all ranks"
                )
    return None


def _pickled(value: Any) -> bytes:
    """Pickles a value with tensors of any device."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _unpickled(data: bytes) -> Any:
    """Unpickles a value of another rank of this job, with tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def portable(error: BaseException) -> Exception:
    """Returns the error in a form that another process can unpickle: the error itself, or its message."""
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301  it was pickled here
        if isinstance(error, Exception) and str(copy) == str(error):
            return error
    except Exception:  # noqa: BLE001, S110  pickling an exception of the user's may raise anything
        pass
    return CheckpointError(f"another rank failed: {type(error).__name__}: {error}")
