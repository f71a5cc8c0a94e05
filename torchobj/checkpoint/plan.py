"""The bytes of a `torch.save` without the tensors' own: literals and holes, planned by torch itself. Sends nothing.

torch pickles, and writes its archive with holes in place of storages (`torch.serialization.skip_data`). The storages
are caught where the pickler is asked for their persistent ids: each hole is known by its record's name, as `data/7`.
"""

import contextlib
import io
import os
import pickle
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchobj.checkpoint import archive
from torchobj.checkpoint.collector import paused_collector
from torchobj.exceptions import CheckpointError

__all__ = ["Field", "Hole", "Plan", "PlanError", "plan_of"]

#: A hole, and what belongs to it, takes longer than to copy so much: storages are small if they are so on average.
_SMALL_BYTES = 8 << 10


class PlanError(CheckpointError):
    """What torch wrote does not fit what was expected of it: no plan, and nothing wrong with the object."""


class Hole(NamedTuple):
    """Where the bytes of a storage belong."""

    start: int
    storage: torch.UntypedStorage


class Field(NamedTuple):
    """Four bytes for the CRC-32 of the storage of a hole, by the hole's start."""

    start: int
    hole: int


class Plan(NamedTuple):
    """An archive: its literals, its holes and its CRC-32 fields, each in the order of their places."""

    literals: list[tuple[int, bytes]]
    holes: list[Hole]
    fields: list[Field]
    size: int

    def pieces(self) -> Iterator[bytes | Hole | Field]:
        """The archive from its first byte to its last; fields are cut out of their literals."""
        fields = iter(self.fields)
        field = next(fields, None)
        parts: list[tuple[int, bytes | torch.UntypedStorage]] = [*self.literals, *self.holes]
        parts.sort(key=lambda part: part[0])
        for start, part in parts:
            if not isinstance(part, bytes):
                yield Hole(start, part)
                continue
            at, end = start, start + len(part)
            while field is not None and field.start < end:
                if field.start > at:
                    yield part[at - start : field.start - start]
                yield field
                at = field.start + 4
                field = next(fields, None)
            if at < end:
                yield part[at - start :]


class _Recorder:
    """A file that keeps what is written, and where the position was moved over what is not."""

    def __init__(self) -> None:
        self.literals: list[tuple[int, bytearray]] = []
        self.holes: dict[int, int] = {}
        self.size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if not self.literals or self.literals[-1][0] + len(self.literals[-1][1]) != self.size:
            self.literals.append((self.size, bytearray()))
        self.literals[-1][1].extend(view)
        self.size += len(view)
        return len(view)

    def seek(self, distance: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR or distance < 0:
            raise io.UnsupportedOperation(f"seek({distance}, {whence})")
        self.holes[self.size] = distance
        self.size += distance
        return self.size

    def flush(self) -> None:
        """Nothing is to be flushed."""


class _Pickling:
    """The pickle module that torch is given: the stock pickler, which also keeps the storages it was asked about.

    Data are skipped from the end of the pickling on, not in it: tensors are reduced as they always are.
    """

    def __init__(self, stack: contextlib.ExitStack, copied_bytes: int) -> None:
        storages: dict[str, torch.UntypedStorage] = {}
        self.storages = storages
        self.done = False
        self.skips = True
        pickling = self

        class Pickler(pickle.Pickler):
            def __init_subclass__(cls) -> None:
                inner = cls.persistent_id

                def persistent_id(pickler: Any, value: Any) -> Any:
                    identity = inner(pickler, value)
                    if identity is not None:
                        untyped = value if isinstance(value, torch.UntypedStorage) else value._untyped_storage
                        storages[identity[2]] = untyped
                    return identity

                cls.persistent_id = persistent_id  # type: ignore[method-assign]

            def dump(self, value: Any) -> None:
                super().dump(value)
                pickling.done = True
                most_bytes = min(copied_bytes, len(storages) * _SMALL_BYTES)
                pickling.skips = sum(storage.nbytes() for storage in storages.values()) > most_bytes
                if pickling.skips:
                    stack.enter_context(torch.serialization.skip_data())

        self.module = types.SimpleNamespace(__name__="pickle", Pickler=Pickler)


@paused_collector()
def plan_of(value: Any, copied_bytes: int = 0) -> Plan:
    """The archive that `torch.save` would write of `value`. Tensors' bytes are not looked at, but of many small ones.

    Args:
        value: Whatever `torch.save` takes.
        copied_bytes: Storages that are no larger, all together, and small on average are copied into the literals.

    Raises:
        PlanError: This torch writes, or the value is saved, in a way that cannot be planned.
        Exception: What pickling raised.
    """
    recorder = _Recorder()
    with contextlib.ExitStack() as stack:
        pickling = _Pickling(stack, copied_bytes)
        try:
            torch.save(value, recorder, pickle_module=pickling.module)  # type: ignore[arg-type]
        except Exception as error:
            if pickling.done:
                raise PlanError(f"torch could not write a plan: {error}") from error
            raise
    literals = [(start, bytes(literal)) for start, literal in recorder.literals]
    # There are holes all the same where the caller had torch skip data.
    if not pickling.skips and not recorder.holes:
        return Plan(literals, [], [], recorder.size)
    try:
        holes, fields = _match(recorder, literals, pickling.storages)
    except CheckpointError as error:
        raise PlanError(str(error)) from error
    return Plan(literals, holes, fields, recorder.size)


def _match(
    recorder: _Recorder, literals: list[tuple[int, bytes]], storages: dict[str, torch.UntypedStorage]
) -> tuple[list[Hole], list[Field]]:
    """Holes and fields, by the directory that torch wrote; everything must fit."""
    start, tail = literals[-1] if literals else (0, b"")
    directory = archive.find_directory(tail, recorder.size)
    if directory is None or directory.start < start:
        raise PlanError("torch wrote no archive")
    records = archive.records_of(tail[directory.start - start : directory.end - start], directory.start)
    # Each local header stands in the literal before its hole, or, of a record that torch wrote itself, in any.
    literal_starts = {start + len(literal): (start, literal) for start, literal in literals}
    holes, fields = [], []
    for key, storage in storages.items():
        record = records.pop(f"data/{key}", None)
        if record is None or record.size != storage.nbytes():
            raise PlanError(f"data/{key}: torch planned another size than that of the storage")
        if not record.size:
            continue
        start, literal = literal_starts.get(record.payload, (0, b""))
        header = literal[record.header - start : record.header - start + archive.LOCAL_HEADER_BYTES]
        if recorder.holes.pop(record.payload, None) != record.size or len(header) != archive.LOCAL_HEADER_BYTES:
            raise PlanError(f"{record.name}: its hole is not where its bytes belong")
        if archive.payload_of(record, header) != record.payload:
            raise PlanError(f"{record.name}: its local header has another length")
        if storage.device.type == "meta":
            raise PlanError(f"{record.name}: a storage on meta has no bytes")
        holes.append(Hole(record.payload, storage))
        in_descriptor = archive.crc32_of_descriptor(record.payload, record.size)
        fields += [Field(in_descriptor, record.payload), Field(record.crc32_field, record.payload)]
    if recorder.holes:
        raise PlanError(f"{len(recorder.holes)} holes of no storage")
    return sorted(holes, key=lambda hole: hole.start), sorted(fields)
