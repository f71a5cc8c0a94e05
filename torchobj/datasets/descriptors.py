"""Passes memory between the trainer and its workers as references instead of bytes.

File descriptors go to a process that is being spawned, and with them the memory of a manifest; a buffer goes from a
worker to the trainer as a reference to the arena.
"""

import multiprocessing.context
import multiprocessing.reduction
import os
import sys
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

from torchobj import _torchobj
from torchobj._torchobj import Buffer
from torchobj.datasets import worker_process
from torchobj.manifest import Manifest


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
        self._received: list[int] = []

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
            self._received = [sent.detach() for sent in self._sent]
        return [os.dup(number) for number in self._received]

    def __del__(self) -> None:
        for number in self._received:
            os.close(number)


def _reduce_buffer(buffer: Buffer) -> Any:
    offered = _torchobj.offer(buffer)
    return buffer.__reduce__() if offered is None else (_torchobj.adopt, offered)


def _reduce_manifest(manifest: Manifest) -> Any:
    number = manifest.descriptor()
    if number is None or not worker_process.is_pickling_for_spawn():
        return manifest.__reduce__()
    return _received, (Descriptors.to_new_process(number), manifest.bases(), manifest.digest())


def _received(descriptors: Descriptors, bases: list[str], digest: str) -> Manifest:
    [number] = descriptors.copies()
    return Manifest(_torchobj.NativeManifest.received(number, bases, digest))


if sys.platform == "linux":
    # The pickler with which processes are started and DataLoader workers send samples.
    ForkingPickler.register(Buffer, _reduce_buffer)
    ForkingPickler.register(Manifest, _reduce_manifest)
