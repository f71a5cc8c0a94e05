"""Sends large objects between the trainer and its DataLoader workers as references to shared memory instead of bytes.

A buffer goes from a worker to the trainer as a reference to the arena, a manifest to a worker that is being spawned as
the descriptor of its memory.
"""

import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torchobj import _torchobj
from torchobj._torchobj import Buffer
from torchobj.datasets import worker_process
from torchobj.datasets.descriptors import Descriptors
from torchobj.manifest import Manifest


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
