"""The state of a save: taken from the objects that have it, copied for later, or watched. Reads and writes no store.

A snapshot is made by pickling: what is no tensor is copied by the rules that the file would have kept it by, and each
storage is copied once, however many tensors share it, as in the file. The memory of the last snapshot is used again: a
copy into memory that the system has yet to give out takes two to five times as long.
"""

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchobj.checkpoint import staging
from torchobj.exceptions import CheckpointError, ConfigError
from torchobj.stateful import is_stateful

__all__ = ["Snapshots", "Watch", "state_of"]

#: From here on the copy of a storage has memory of its own, which is kept; the allocator is quick with what is smaller.
_ROOM_BYTES = 1 << 20


def state_of(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state with each value that has `state_dict` and `load_state_dict` replaced by what the former returns.

    Raises:
        ConfigError: It is no mapping, or has such a value in a list, where none would be asked for its state.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"state is a {type(state).__name__}: must be a dict, as {{'model': model, 'step': 3}}")
    return {name: _taken(value, str(name)) for name, value in state.items()}


def _taken(value: Any, name: str) -> Any:
    if is_stateful(value):
        return value.state_dict()
    if isinstance(value, Mapping):
        inner = {key: _taken(below, f"{name}.{key}") for key, below in value.items()}
        # A subclass has its own way to be pickled, and stays where it has no more than values.
        stays = type(value) is not dict and all(inner[key] is below for key, below in value.items())
        return value if stays else inner
    if type(value) in (list, tuple):
        _check_values(value, name)
    return value


def _check_values(values: Iterable[Any], name: str) -> None:
    """Raises where an object with a state stands in a list."""
    for number, value in enumerate(values):
        inner = f"{name}.{number}"
        if is_stateful(value):
            raise ConfigError(f"{inner} is a {type(value).__name__} in a list: its state is taken from a dict only")
        if isinstance(value, Mapping | list | tuple):
            _check_values(value.values() if isinstance(value, Mapping) else value, inner)


class _Plain(NamedTuple):
    """A tensor that is no more than a view of a storage."""

    storage: int
    """Number of the storage."""
    dtype: torch.dtype
    layout: tuple[int, tuple[int, ...], tuple[int, ...]]
    """Offset in elements, size, strides."""
    requires_grad: bool
    is_parameter: bool


class _Pickler(pickle.Pickler):
    """Pickles all but the memory of tensors, which it collects."""

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self.tensors: list[torch.Tensor] = []
        self.plain: list[_Plain] = []
        self._numbers: dict[int, int] = {}
        #: By the identity of tensors, which `tensors` keeps alive.
        self._plain_numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        """What stands for an object in the pickle; None where it is pickled itself."""
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            return self._plain_number(obj) if _is_plain(obj) else None
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

    def _plain_number(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._plain_numbers:
            self._plain_numbers[id(tensor)] = len(self.plain)
            layout = (int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
            storage, parameter = self._number(tensor.untyped_storage()), type(tensor) is torch.nn.Parameter
            self.plain.append(_Plain(storage, tensor.dtype, layout, tensor.requires_grad, parameter))
        return self._plain_numbers[id(tensor)]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether torch's own way to pickle a tensor, which takes ten times as long, would keep no more of it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (
            tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__ or tensor._backward_hooks
        )
    )


class _Unpickler(pickle.Unpickler):
    """Builds the same objects over other memory."""

    def __init__(self, data: io.BytesIO, storages: list[torch.UntypedStorage], plain: list[_Plain]) -> None:
        super().__init__(data)
        self._storages = storages
        self._tensors = [self._tensor(tensor) for tensor in plain]

    def _tensor(self, plain: _Plain) -> torch.Tensor:
        storage = self._storages[plain.storage]
        tensor = torch.empty(0, dtype=plain.dtype, device=storage.device).set_(storage, *plain.layout)
        if plain.is_parameter:
            return torch.nn.Parameter(tensor, plain.requires_grad)
        return tensor.requires_grad_() if plain.requires_grad else tensor

    def persistent_load(self, pid: Any) -> Any:
        """What stands for `pid`."""
        if isinstance(pid, int):
            return self._tensors[pid]
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
        with torch.inference_mode(mode=False):
            bytes_of_all = [staging.bytes_of(storage) for storage in pickler.storages]
            copies = [copy.untyped_storage() for copy in self.copies(bytes_of_all)]
            return _Unpickler(data, copies, pickler.plain).load()

    # What is made in inference mode could not be written to again outside it.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous copies on the CPU, of the same shapes and dtypes, whose memory is used again by the next call.

        Args:
            tensors: Strided ones, on the CPU or on GPUs.
        """
        gpus = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        rooms = self._rooms_for(
            [tensor.nbytes for tensor in tensors if tensor.nbytes >= _ROOM_BYTES], pinned=bool(gpus)
        )
        copies = []
        for tensor in tensors:
            has_room = tensor.nbytes >= _ROOM_BYTES
            storage = next(rooms).untyped_storage() if has_room else staging.storage_of(tensor.nbytes)
            copy = torch.empty(0, dtype=tensor.dtype).set_(storage).view(tensor.shape)
            # What is conjugated on the way is so by the CPU, which would not wait for the bytes.
            as_it_is = not (tensor.is_conj() or tensor.is_neg())
            copies.append(copy.copy_(tensor, non_blocking=has_room and as_it_is))
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        return copies

    def _rooms_for(self, sizes: list[int], *, pinned: bool) -> Iterator[torch.Tensor]:
        """Memory for storages of these sizes: that of the last snapshot where it fits, else new."""
        free = _by_size([room for room in self._rooms if room.is_pinned() == pinned])
        fitting = [free[size].pop() if free.get(size) else None for size in sizes]
        # What does not fit goes before new memory is asked for: a snapshot is never larger than its state.
        self._rooms, free = [], {}
        self._rooms = [
            staging.room(size, pinned=pinned) if old is None else old for size, old in zip(sizes, fitting, strict=True)
        ]
        return iter(self._rooms)

    def forget(self) -> None:
        """Gives the memory back."""
        self._rooms = []


def _by_size(rooms: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    sizes: dict[int, list[torch.Tensor]] = {}
    for room in rooms:
        sizes.setdefault(room.nbytes, []).append(room)
    return sizes


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
        self.state = _Unpickler(data, pickler.storages, pickler.plain).load()

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
