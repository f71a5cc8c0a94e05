"""The state of a save: taken from the objects that have it, copied for later, or watched. Reads and writes no store.

A snapshot is made by pickling: what is no tensor is copied by the rules that the file would have kept it by, and each
storage is copied once, however many tensors share it, as in the file. The memory of the last snapshot is used again: a
copy into memory that the system has yet to give out takes two to five times as long.
"""

import io
import mmap
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchobj.exceptions import CheckpointError, ConfigError

__all__ = ["Snapshots", "Watch", "state_of"]

#: From here on a storage gets pages of its own, large ones where the system has them.
_OWN_PAGES_BYTES = 2 << 20


def state_of(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state with each value that has `state_dict` and `load_state_dict` replaced by what the former returns.

    Raises:
        ConfigError: It is no mapping.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"state is a {type(state).__name__}: must be a dict, as {{'model': model, 'step': 3}}")
    return {name: _taken(value) for name, value in state.items()}


def _taken(value: Any) -> Any:
    if is_stateful(value):
        return value.state_dict()
    # An exact dict: a subclass has its own way to be pickled.
    return state_of(value) if type(value) is dict else value


def is_stateful(value: Any) -> bool:
    """Whether a value gives and takes its state itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class _Pickler(pickle.Pickler):
    """Pickles all but the memory of tensors, which it collects."""

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            return None
        if isinstance(obj, torch.storage.TypedStorage):
            return self._number(obj._untyped_storage), obj.dtype
        if isinstance(obj, torch.UntypedStorage):
            return self._number(obj), None
        return None

    def _number(self, storage: torch.UntypedStorage) -> int:
        # Several Python objects stand for one storage.
        identity = storage._cdata
        if identity not in self._numbers:
            self._numbers[identity] = len(self.storages)
            self.storages.append(storage)
        return self._numbers[identity]


class _Unpickler(pickle.Unpickler):
    """Builds the same objects over other memory."""

    def __init__(self, data: io.BytesIO, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(data)
        self._storages = storages

    def persistent_load(self, pid: Any) -> Any:
        number, dtype = pid
        storage = self._storages[number]
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _pickled(state: Any) -> tuple[io.BytesIO, _Pickler]:
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(state)
    out.seek(0)
    return out, pickler


class Snapshots:
    """Takes snapshots, one at a time, and keeps the memory of the last for the next."""

    def __init__(self) -> None:
        self._rooms: list[torch.Tensor] = []

    def take(self, state: Any) -> Any:
        """A copy of the state, on the CPU, whose memory is used again by the next call.

        Raises:
            Exception: What pickling raises for what cannot be pickled.
        """
        data, pickler = _pickled(state)
        free: dict[int, list[torch.Tensor]] = {}
        for kept in self._rooms:
            free.setdefault(kept.nbytes, []).append(kept)
        self._rooms = []
        wanted = [storage.nbytes() for storage in pickler.storages]
        rooms: list[torch.Tensor | None] = [free[size].pop() if free.get(size) else None for size in wanted]
        # Before new memory is asked for: a snapshot is never larger than the state.
        free.clear()
        pinned = any(storage.device.type == "cuda" for storage in pickler.storages)
        for number, storage in enumerate(pickler.storages):
            room = rooms[number]
            if room is None:
                room = _room(wanted[number], pinned=pinned)
            room.copy_(_bytes_of(storage), non_blocking=True)
            self._rooms.append(room)
        if pinned:
            torch.cuda.synchronize()
        return _Unpickler(data, [room.untyped_storage() for room in self._rooms]).load()

    def forget(self) -> None:
        """Gives the memory back."""
        self._rooms = []


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _room(size: int, *, pinned: bool) -> torch.Tensor:
    if pinned or size < _OWN_PAGES_BYTES:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


class Watch:
    """The tensors of a state that is saved without a copy, and the versions that they had.

    What is no tensor is copied all the same. What writes to a tensor past autograd's eyes, as through `.data`, a numpy
    view or another process, is not seen.

    Args:
        state: What is saved.

    Raises:
        ConfigError: A tensor was made in inference mode: such have no version.
    """

    def __init__(self, state: Any) -> None:
        data, pickler = _pickled(state)
        names = {id(tensor): name for name, tensor in _named(state, "")}
        self._watched = [(names.get(id(tensor), "a tensor"), tensor) for tensor in pickler.tensors]
        for name, tensor in self._watched:
            if tensor.is_inference():
                raise ConfigError(f"{name}: made in inference mode, where changes leave no trace; save with stage=True")
        self._versions = [tensor._version for _, tensor in self._watched]
        #: The same state, over the same memory.
        self.state = _Unpickler(data, pickler.storages).load()

    def check(self) -> None:
        """Raises where a tensor was written to since.

        Raises:
            CheckpointError: One was; it is named.
        """
        for (name, tensor), version in zip(self._watched, self._versions, strict=True):
            if tensor._version != version:
                message = f"{name} was changed while it was saved with stage=False: nothing was committed"
                raise CheckpointError(message)


def _named(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name or "the tensor", value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _named(inner, f"{name}[{number}]")
