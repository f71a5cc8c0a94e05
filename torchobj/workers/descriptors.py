"""Passes memory between the trainer and its workers as references instead of bytes.

File descriptors go to a process that is being spawned, and with them the memory of a manifest; a buffer goes from a
worker to the trainer as a reference to the arena.
"""

import errno
import multiprocessing.context
import multiprocessing.reduction
import os
import sys
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

from torchobj import _torchobj
from torchobj._torchobj import Buffer
from torchobj.manifest import Manifest
from torchobj.workers import process


def _identity(number: int, fstat: Callable[[int], os.stat_result] = os.fstat) -> tuple[int, int] | None:
    """Device and inode of an open file; None if the descriptor is closed."""
    try:
        found = fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Descriptor:
    """A descriptor of this library, which this object owns.

    The program may close it, as `os.closerange` does, and open a file of its own under the number: that file is neither
    used nor closed.
    """

    def __init__(self, number: int) -> None:
        self._number, self._identity = number, _identity(number)

    def is_closed(self) -> bool:
        """Whether the program has closed it."""
        return self._identity is None or _identity(self._number) != self._identity

    def number(self) -> int:
        """Its number, to be used at once.

        Raises:
            OSError: The program has closed it.
        """
        if self.is_closed():
            raise OSError(
                errno.EBADF,
                f"descriptor {self._number} of torchobj was closed by this program, as os.closerange does: close only "
                "descriptors that the program has opened",
            )
        return self._number

    def __del__(
        self,
        close: Callable[[int], None] = os.close,
        identity: Callable[[int], tuple[int, int] | None] = _identity,
    ) -> None:
        # Bound, because modules are cleared before the last objects at the end of the interpreter.
        if self._identity is not None and identity(self._number) == self._identity:
            close(self._number)


class Descriptors:
    """Descriptors of one owner for a process that is being spawned, shared by all objects that need them.

    A spawned process inherits a descriptor under its number, which can be passed only once.
    """

    # By the process that is being spawned, and the numbers.
    _of_process: ClassVar["weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Descriptors]]"] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._sent = [multiprocessing.reduction.DupFd(number) for number in numbers]
        self._received: list[Descriptor] = []

    @classmethod
    def to_new_process(cls, *numbers: int) -> "Descriptors":
        """The descriptors for the process that is being spawned."""
        sent = cls._of_process.setdefault(multiprocessing.context.get_spawning_popen(), {})
        if numbers not in sent:
            sent[numbers] = cls(numbers)
        return sent[numbers]

    def copies(self) -> list[int]:
        """Duplicates of the descriptors, owned by the caller, in the spawned process."""
        if not self._received:
            self._received = [Descriptor(sent.detach()) for sent in self._sent]
        return [os.dup(descriptor.number()) for descriptor in self._received]


def _reduce_buffer(buffer: Buffer) -> Any:
    offered = _torchobj.offer(buffer)
    return buffer.__reduce__() if offered is None else (_torchobj.adopt, offered)


def _reduce_manifest(manifest: Manifest) -> Any:
    number = manifest.descriptor()
    if number is None or not process.is_pickling_for_spawn():
        return manifest.__reduce__()
    return _received, (Descriptors.to_new_process(number), manifest.bases(), manifest.digest())


def _received(descriptors: Descriptors, bases: list[str], digest: str) -> Manifest:
    [number] = descriptors.copies()
    return Manifest(_torchobj.NativeManifest.received(number, bases, digest))


if sys.platform == "linux":
    # The pickler with which processes are started and DataLoader workers send samples.
    ForkingPickler.register(Buffer, _reduce_buffer)
    ForkingPickler.register(Manifest, _reduce_manifest)
