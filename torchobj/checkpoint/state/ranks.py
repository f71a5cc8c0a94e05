"""Agreement among the ranks that save together. Without `torch.distributed` there is one rank."""

import datetime
import io
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException

from torchobj import _torchobj
from torchobj.exceptions import CheckpointError, ConfigError, TorchobjError

__all__ = ["RankGoneError", "Ranks", "check_same", "packed", "portable", "unpacked"]

#: Timeout of a rank that waits for another one, which may be saving. A killed rank is detected immediately; the job's
#: launcher detects a lost host. No save takes a day: a terabyte at 100 Mbit/s takes 22 hours.
_TIMEOUT = datetime.timedelta(days=1)


class RankGoneError(CheckpointError):
    """Another rank does not respond."""


_Own = TypeVar("_Own")
_Result = TypeVar("_Result")
#: What is sent of an error.
_Sent: TypeAlias = tuple[str, bytes] | None


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
        #: Why the group has ended; None if it has not.
        self._gone: str | None = None

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
            RankGoneError: Another rank did not respond before.
        """
        if not self.several:
            return None
        if self._process != _torchobj.process_number():
            raise CheckpointError(
                f"this is a forked child of rank {self.number}, and cannot communicate with the other ranks: call the "
                "manager in the rank itself"
            )
        self.check_connected()
        if self._own is None:
            members = None if self._members is None else torch.distributed.get_process_group_ranks(self._members)
            with self.collective():
                made = torch.distributed.new_group(
                    members, timeout=_TIMEOUT, backend="gloo", use_local_synchronization=members is not None
                )
            self._own = cast("torch.distributed.ProcessGroup", made)
        return self._own

    def check_connected(self) -> None:
        """Checks that no rank has gone in an earlier collective.

        Raises:
            RankGoneError: One has.
        """
        if self._gone is not None:
            raise RankGoneError(self._gone)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Converts the errors of collectives of torch in the block, which use the own group.

        If a rank is gone, the group of this one ends: its connections are closed, so that ranks that wait for this one,
        and are not connected with the one that is gone, fail too.

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
            self._gone, group, self._own = f"another rank is gone: {lost}", self._own, None
            if group is not None:
                # The program may have destroyed it, with all groups.
                with suppress(ValueError, RuntimeError, AssertionError):
                    torch.distributed.destroy_process_group(group)
            del group
            # Connections are closed when nothing refers to the group; the frames of the failed collective do.
            traceback.clear_frames(lost.__traceback__)
            raise RankGoneError(self._gone) from lost

    def all_reduce(self, own: Callable[[], _Own], combine: Callable[[list[_Own]], _Result]) -> _Result:
        """Combines values of all ranks on the first one: one gather to it, and one broadcast from it.

        As a phase of `torch.distributed.checkpoint`.

        Args:
            own: Returns the value of this rank, which can be pickled. Tensors are sent by `packed`.
            combine: Called on the first rank with the values of all ranks, by rank number. Its result contains only
                types that all ranks can unpickle.

        Returns:
            The result of `combine`, on all ranks.

        Raises:
            BaseException: That of `own` on this rank, or on the first rank where it failed; or that of `combine`.
            Exception: A value cannot be pickled, or not be unpickled on the first rank. All of these are raised on all
                ranks.
            RankGoneError: Another rank does not respond.
        """
        try:
            value = own()
        except BaseException as error:
            self._combined(error, None, combine)
            raise
        return self._combined(None, value, combine)

    def _combined(self, error: BaseException | None, value: Any, combine: Callable[[list[Any]], _Result]) -> _Result:
        """Raises an error of a rank, or returns what the first rank makes of the values."""
        if not self.several:
            if error is not None:
                raise error
            return combine([value])
        data = b""
        if error is None:
            # Pickled before the collective: if a rank failed in it, the others would wait.
            try:
                data = pickle.dumps(value)
            except BaseException as failed:  # noqa: BLE001  all ranks raise it
                error = failed
        gathered: list[Any] | None = [None] * self.count if self.is_first else None
        outcome = _Outcome()
        sent: list[tuple[_Sent, bytes]] = [(None, b"")]
        try:
            with self.collective():
                own = _sent(error), data
                torch.distributed.gather_object(own, gathered, group=self.group, group_dst=0)
                if gathered is not None:
                    outcome = _outcome(gathered, combine)
                    sent = [(_sent(outcome.error), outcome.data)]
                torch.distributed.broadcast_object_list(sent, group=self.group, group_src=0)
        except RankGoneError as gone:
            # A collective of `state_dict`, for example, fails with a RuntimeError of torch if a rank is gone.
            is_of_torch = type(error) is RuntimeError or isinstance(error, torch.distributed.DistError)
            if error is None or is_of_torch:
                raise gone from error or gone.__cause__
            raise error from gone
        if not self.is_first:
            [(failed_there, data)] = sent
            outcome = _Outcome(_received(failed_there), None, data)
        if (failure := error or outcome.error) is not None:
            raise failure
        return cast("_Result", outcome.result if self.is_first else pickle.loads(outcome.data))  # noqa: S301  of this job

    def gather(self, value: _Own) -> list[_Own]:
        """Returns the values of all ranks, by rank number. Raises as `all_reduce`."""
        return self.all_reduce(lambda: value, list)

    def agree(self, error: BaseException | None) -> None:
        """Waits for all ranks, and raises if one has an error: this rank's, or that of the first such rank.

        Raises:
            BaseException: The error.
            RankGoneError: This rank has no error, and another rank does not respond.
        """
        self._combined(error, None, lambda _: None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Waits for all ranks at the end of the block, and raises as `agree` if it failed on one of them."""
        try:
            yield
        except BaseException as error:
            self.agree(error)
            raise
        self.agree(None)


class _Outcome(NamedTuple):
    """What the first rank made of the values of all ranks."""

    error: BaseException | None = None
    result: Any = None
    data: bytes = b""
    """The result, pickled."""


def _outcome(gathered: Sequence[tuple[_Sent, bytes]], combine: Callable[[list[Any]], Any]) -> _Outcome:
    error: BaseException | None = next((_received(sent) for sent, _ in gathered if sent is not None), None)
    if error is not None:
        return _Outcome(error)
    try:
        result = combine([pickle.loads(data) for _, data in gathered])  # noqa: S301  of the ranks of this job
        return _Outcome(None, result, pickle.dumps(result))
    except BaseException as failed:  # noqa: BLE001  all ranks raise it
        return _Outcome(failed)


def check_same(settings: Sequence[Mapping[str, str]]) -> None:
    """Checks that the settings of all ranks are the same.

    Args:
        settings: For each rank, the `repr` of values by name.

    Raises:
        ConfigError: They differ; names the first difference between the first rank and another one.
    """
    for number, others in enumerate(settings):
        for name, value in settings[0].items():
            if others.get(name) != value:
                raise ConfigError(
                    f"{name}={others.get(name)} on rank {number}, {value} on rank 0: must be the same on all ranks"
                )


def packed(value: Any) -> bytes:
    """Pickles a value with tensors of any device."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def unpacked(data: bytes) -> Any:
    """Unpickles a value of another rank of this job that was `packed`, with tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def portable(error: BaseException) -> Exception:
    """Returns the error in a form that another process can unpickle: the error itself, or its message."""
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301  it was pickled here
        if isinstance(error, Exception) and str(copy) == str(error):
            return error
    except Exception:  # noqa: BLE001, S110  pickling an exception of the user's may raise anything
        pass
    return CheckpointError(_failed_there(error))


def _failed_there(error: BaseException) -> str:
    return f"another rank failed: {type(error).__name__}: {error}"


def _sent(error: BaseException | None) -> _Sent:
    """Returns what is sent of an error: a message, and the error itself, pickled."""
    return None if error is None else (_failed_there(error), pickle.dumps(portable(error)))


def _received(sent: _Sent) -> Exception | None:
    """Returns an error that was sent; a CheckpointError with its message if this process does not have its class."""
    if sent is None:
        return None
    message, data = sent
    try:
        error: Exception = pickle.loads(data)  # noqa: S301  of a rank of this job
    except Exception:  # noqa: BLE001  unpickling an exception of the user's may raise anything
        return CheckpointError(message)
    return error
