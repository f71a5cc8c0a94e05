"""Agreement among the ranks that save or load together. Without `torch.distributed` there is one rank."""

import datetime
import io
import pickle
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException

from torchobj import _torchobj
from torchobj.exceptions import CheckpointError, ConfigError, TorchobjError

__all__ = ["Meeting", "RankGoneError", "Ranks", "check_same", "packed", "portable", "unpacked"]

#: Default timeout of a rank that waits for another one, which may be saving. A killed rank is detected immediately; the
#: job's launcher detects a lost host. No save takes a day: a terabyte at 100 Mbit/s takes 22 hours.
_TIMEOUT = datetime.timedelta(days=1)


class RankGoneError(CheckpointError):
    """Another rank does not respond."""


_Own = TypeVar("_Own")
#: What is sent of an error.
_Sent: TypeAlias = tuple[str, bytes] | None


class Ranks:
    """Agreement among ranks, with its own process group.

    Each thread needs its own `Ranks`, so that messages do not mix. The group is created at the first use, which must be
    collective, and on the thread that creates the program's other groups: torch identifies groups by the order of their
    creation.

    Args:
        group: The ranks that meet; None for all.
        timeout: Maximum time that a rank waits for another one.

    Raises:
        ConfigError: This rank is not in the group.
    """

    def __init__(
        self, group: "torch.distributed.ProcessGroup | None" = None, timeout: datetime.timedelta = _TIMEOUT
    ) -> None:
        if group is not None and torch.distributed.get_rank(group) < 0:
            raise ConfigError("process_group: this rank is not in it; call this on its ranks only")
        #: Not the group itself, which `sharing` would keep alive.
        self._members = None if group is None else torch.distributed.get_process_group_ranks(group)
        self._process = _torchobj.process_number()
        self.timeout = timeout
        self._own: torch.distributed.ProcessGroup | None = None
        #: Why the group has ended; None if it has not.
        self._gone: str | None = None

    @property
    def count(self) -> int:
        """The number of ranks that meet."""
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._members is not None:
            return len(self._members)
        return torch.distributed.get_world_size() if is_distributed else 1

    @property
    def is_connected(self) -> bool:
        """Whether no rank has gone in an earlier collective."""
        return self._gone is None

    @property
    def several(self) -> bool:
        """Whether there are several ranks."""
        return self.count > 1

    @property
    def number(self) -> int:
        """The number of this rank among those that meet."""
        if not self.several:
            return 0
        rank = torch.distributed.get_rank()
        return rank if self._members is None else self._members.index(rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first one, which a meeting gathers at, and which commits."""
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
                f"this is a forked child of rank {self.number}, and cannot communicate with the other ranks: call it "
                "in the rank itself"
            )
        self.check_connected()
        if self._own is None:
            members, is_local = self._members, self._members is not None
            with self.collective():
                made = torch.distributed.new_group(
                    members, timeout=self.timeout, backend="gloo", use_local_synchronization=is_local
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

    def leave(self, reason: str) -> None:
        """Meets no more: another thread of this rank still waits for the others. Later meetings raise RankGoneError."""
        self._gone = reason

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
        except (RuntimeError, ValueError) as lost:
            # A ValueError: the program has destroyed the group.
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

    @contextmanager
    def meeting(self) -> Iterator["Meeting"]:
        """Lets all ranks meet, once: at the end of the block every rank has the same result, or an error.

        A meeting is one gather to the first rank, and one broadcast from it, as a phase of
        `torch.distributed.checkpoint`. An error in the block, on any rank, is raised on all of them.

        Raises:
            BaseException: The error of this rank, or else that of the first rank that has one.
            Exception: A value or the result cannot be pickled, or not be unpickled where it is received.
            RankGoneError: Another rank does not respond, and this one has no error.

        Example:
            >>> with Ranks().meeting() as meeting:
            ...     values = meeting.gather(3)
            ...     if values is not None:
            ...         meeting.result = sum(values)
            >>> meeting.result
            3
        """
        meeting, error = Meeting(self), None  # type: Meeting, BaseException | None
        try:
            yield meeting
        except BaseException as failed:  # noqa: BLE001  all ranks raise it
            error = failed
        meeting.end(error)

    def agree(self, error: BaseException | None) -> None:
        """Meets with nothing but an error of this rank, or None. Raises as `meeting`."""
        Meeting(self).end(error)


class Meeting:
    """What one rank gives to a meeting of all ranks, and gets from it. Created by `Ranks.meeting`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        #: Whether the gather has begun, and whether it has ended.
        self._began = self._gathered = False
        #: What all ranks get: set by the first one, in the block, of types that all ranks can unpickle.
        self.result: Any = None

    def gather(self, value: _Own) -> list[_Own] | None:
        """Sends a value to the first rank. At most once in a meeting, in which only the first rank then has work to do.

        Args:
            value: Value of this rank, which can be pickled. Tensors are sent by `packed`.

        Returns:
            On the first rank the values of all ranks, by rank number; None on the others.
        """
        if not self._ranks.several:
            return [value]
        # Before the collective: if a rank failed in it, the others would wait.
        found = self._gather(None, pickle.dumps(value))
        return None if found is None else [pickle.loads(data) for data in found]  # noqa: S301  of the ranks of this job

    def _gather(self, error: BaseException | None, data: bytes) -> list[bytes] | None:
        """Sends the error of this rank, or its value. Raises the first error on the first rank."""
        ranks, own = self._ranks, (_sent(error), data)
        gathered: list[Any] | None = [None] * ranks.count if ranks.is_first else None
        self._began = True
        with ranks.collective():
            torch.distributed.gather_object(own, gathered, group=ranks.group, group_dst=0)
        self._gathered = True
        for sent, _ in gathered or ():
            if (failed := _received(sent)) is not None:
                raise error or failed
        return None if gathered is None else [data for _, data in gathered]

    def end(self, error: BaseException | None) -> None:
        """Ends the meeting, with an error of this rank or without one. Raises as `Ranks.meeting`."""
        # If the gather failed, the other ranks learn of it by the connections, or this one is interrupted.
        if self._ranks.several and self._began == self._gathered:
            try:
                error = self._exchange(error)
            except RankGoneError as gone:
                # A collective of `state_dict`, for example, fails with a RuntimeError of torch if a rank is gone.
                is_of_torch = type(error) is RuntimeError or isinstance(error, torch.distributed.DistError)
                if error is None or is_of_torch:
                    raise gone from error or gone.__cause__
                raise error from gone
        if error is not None:
            raise error

    def _exchange(self, error: BaseException | None) -> BaseException | None:
        """Sends the result of the first rank, or its error. Returns that of this rank, or else that of the first."""
        ranks, data = self._ranks, b""
        try:
            if not self._gathered:
                self._gather(error, b"")
            if ranks.is_first and error is None:
                data = pickle.dumps(self.result)
        except BaseException as failed:
            if self._began != self._gathered:
                raise
            error = failed
        sent = [(_sent(error), data)]
        with ranks.collective():
            torch.distributed.broadcast_object_list(sent, group=ranks.group, group_src=0)
        [(failure, data)] = sent
        if not ranks.is_first and failure is None and error is None:
            self.result = pickle.loads(data)  # noqa: S301  of this job
        return error or (None if ranks.is_first else _received(failure))


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
