"""The objects of a listing as a source of the prefetcher: in the process that made it, and in its DataLoader workers."""

import multiprocessing.context
import multiprocessing.reduction
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch.utils.data

from torchobj import _torchobj
from torchobj._torchobj import Manifest
from torchobj.memory import budget_bytes

SUPPORTED = sys.platform == "linux"


class Attachment:
    """A source on its way to a worker that is started by spawn or forkserver."""

    def __init__(self, source: "_torchobj.NativeSource") -> None:
        file, bell = source.descriptors()
        self._of = (source.owner, source.number)
        self._descriptors = [multiprocessing.reduction.DupFd(number) for number in (file, bell)]

    def attach(self, manifest: Manifest) -> "_torchobj.NativeSource":
        """The source, in the worker."""
        file, bell = (descriptor.detach() for descriptor in self._descriptors)
        return _torchobj.NativeSource.attach(manifest, *self._of, file, bell)


class Source:
    """Where a dataset's objects are read from: the prefetcher of the process that the dataset was made in.

    Workers of torch's DataLoader ask that process, however they were started. Any other process that gets a copy of the
    dataset reads by a prefetcher of its own.
    """

    def __init__(self) -> None:
        self._native: _torchobj.NativeSource | None = None
        self._attachment: Attachment | None = None

    def native(self, manifest: Manifest, stores: "Sequence[_torchobj.NativeStore]") -> "_torchobj.NativeSource | None":
        """The source, made at its first use. None in a worker that was started before there was one."""
        if self._attachment is not None:
            self._native, self._attachment = self._attachment.attach(manifest), None
        if torch.utils.data.get_worker_info() is not None:
            return self._native
        # What another process made is of no use to one that is nobody's worker.
        if self._native is None or self._native.owner != os.getpid():
            self._native = _torchobj.NativeSource(manifest, list(stores), budget_bytes())
        return self._native

    @property
    def number(self) -> int | None:
        """The name of the source in this process; None while there is none."""
        return None if self._native is None or self._native.owner != os.getpid() else self._native.number

    def __getstate__(self) -> dict[str, Any]:
        spawning = multiprocessing.context.get_spawning_popen() is not None
        attachment = Attachment(self._native) if spawning and self._native is not None else None
        return {"_native": None, "_attachment": attachment}
