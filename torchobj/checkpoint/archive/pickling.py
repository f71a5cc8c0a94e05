"""The pickle of a `.pt` file: its outline, read without running any of it, and its unpickling over given storages.

`Outline` unpickles with stubs in place of everything that the pickle names, so that nothing is imported or called.
The result has the object's dicts, lists and tuples; everything else is a `Stub`, and storages are `StorageOutline`s.
"""

import collections
import inspect
import io
import pickle
import re
import reprlib
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import _weights_only_unpickler

from torchobj import _torchobj
from torchobj.checkpoint.matching import name_of
from torchobj.exceptions import CheckpointError

__all__ = [
    "MapLocation",
    "Outline",
    "StorageOutline",
    "Use",
    "byte_order",
    "check_nesting",
    "refused_global",
    "restored_by",
    "unpickle",
    "uses_in",
]

#: Maximum nesting. Python's own pickler fails at less.
_DEEPEST = 1000

#: Maximum size of a storage: torch counts bytes with 63 bits.
_MAX_BYTES = (1 << 63) - 1

#: Where storages are placed: as `map_location` of `torch.load`.
MapLocation: TypeAlias = str | torch.device | dict[str, str] | Callable[[Any, str], Any] | None

#: torch's internal functions have no types.
_torch: Any = torch.serialization
_weights_only: Any = _weights_only_unpickler

#: Modules that moved within torch; pickles have the old name (torch/serialization.py, `_load`).
_MOVED_MODULES = {"torch.tensor": "torch._tensor"}

#: Functions that build dense tensors, and the index of the metadata in their arguments (torch/_utils.py).
_DENSE = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}


def byte_order(record: bytes | None) -> str:
    """Returns the byte order of the storages of an archive, `little` or `big`.

    Args:
        record: The archive's record of it. None: the default of `torch.serialization` for loads.

    Raises:
        CheckpointError: The record names none.
    """
    if record is None:
        default, orders = torch.serialization.get_default_load_endianness(), torch.serialization.LoadEndianness
        return sys.byteorder if default is orders.NATIVE else "big" if default is orders.BIG else "little"
    order = record.decode("ascii", "replace")
    if order not in ("little", "big"):
        raise CheckpointError(f"its byte order is {order!r}, neither little nor big")
    return order


class StorageOutline(NamedTuple):
    """A storage, as the pickle describes it."""

    key: str
    dtype: torch.dtype
    location: str
    elements: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * self.dtype.itemsize


#: Elements in a byte of the dtypes that pack several; `itemsize` is 1.
_PACKED = {torch.quint4x2: 2, torch.quint2x4: 4}


def _check_extent(path: str, storage: StorageOutline, *arguments: Any) -> None:
    """Raises if a tensor is larger than its storage: torch would enlarge the storage, with uninitialised memory."""
    if len(arguments) < 3:
        return
    offset, size, stride = arguments[:3]
    numbers = [offset, *size, *stride]
    if any(type(number) is not int or number < 0 for number in numbers) or len(size) != len(stride):
        raise pickle.UnpicklingError(f"a tensor has the offset, size and stride {reprlib.repr(arguments[:3])}")
    itemsize = storage.dtype.itemsize
    if path == "torch._utils._rebuild_tensor_v3":
        # Its storage is untyped, and the dtype is an argument.
        itemsize = getattr(torch, arguments[5].path.rpartition(".")[2]).itemsize
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if 0 not in size and -(-(last + 1) // _PACKED.get(storage.dtype, 1)) * itemsize > storage.nbytes:
        raise pickle.UnpicklingError(f"a tensor of size {reprlib.repr(size)} is larger than its storage")


class Stub:
    """The result of a global of the pickle: an instance of, or a call to, the object that `path` names."""

    path = ""
    args: tuple[Any, ...]
    rest: list[Any]

    def __new__(cls, *args: Any, **_named: Any) -> Self:
        """Keeps the arguments."""
        if args and isinstance(args[0], StorageOutline):
            _check_extent(cls.path, *args)
        stub = super().__new__(cls)
        stub.args = args
        stub.rest = []
        return stub

    def __init__(self, *_args: Any, **_named: Any) -> None:
        """Does nothing; `__new__` has kept the arguments."""

    def __call__(self, *args: Any, **_named: Any) -> "Stub":
        """Returns a stub for the result of the call."""
        self.rest.extend(args)
        return Stub(self, *args)

    def __setstate__(self, state: Any) -> None:
        self.rest.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.rest.append({key: value} if isinstance(key, str | int) else [key, value])

    def append(self, value: Any) -> None:
        """Keeps an element of a list, a queue or a set."""
        self.rest.append(value)

    add = append

    def extend(self, values: Any) -> None:
        """Keeps elements of a list."""
        self.rest.extend(values)


class Outline(pickle.Unpickler):
    """The content of a pickle, which is read without running it.

    Args:
        data: The bytes of `data.pkl`.

    Raises:
        CheckpointError: The data is not a pickle of `torch.save`.
    """

    def __init__(self, data: Any) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._stubs: dict[str, type[Stub]] = {}
        #: By key, in the order of first use.
        self.storages: dict[str, StorageOutline] = {}
        #: Whether all uses of a storage agree on its size.
        self.consistent = True
        try:
            self.tree = self.load()
        except Exception as error:
            raise CheckpointError(f"data.pkl is not a pickle of torch.save: {type(error).__name__}: {error}") from error
        #: Names in the pickle, as `module.name`, in the order of first use.
        self.globals = list(self._stubs)
        self.uses = uses_in(self.tree)
        #: By key: the path of the first use of the storage, such as `model.layer1.weight`.
        self.names: dict[str, str] = {}
        for use in self.uses:
            self.names.setdefault(use.storage.key, use.path)

    def find_class(self, module: str, name: str) -> Any:
        """Returns a stub."""
        # torch writes pickle protocol 2, which has the names of Python 2.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        path = f"{module}.{name}"
        if path not in self._stubs:
            self._stubs[path] = type("Stub", (Stub,), {"path": path})
        return collections.OrderedDict if path == "collections.OrderedDict" else self._stubs[path]

    def persistent_load(self, identity: Any) -> StorageOutline:
        """Returns the outline of a storage.

        Raises:
            UnpicklingError: Its size is not valid.
        """
        _, kind, key, location, count = _decoded(identity)
        name = kind.path.rpartition(".")[2]
        # Untyped storages consist of bytes.
        dtype = torch.uint8 if name == "UntypedStorage" else _torch.StorageType(name).dtype
        if type(count) is not int or not 0 <= count <= _MAX_BYTES // dtype.itemsize:
            raise pickle.UnpicklingError(f"a storage has {reprlib.repr(count)} elements")
        storage = StorageOutline(key, dtype, location, count)
        first = self.storages.setdefault(key, storage)
        self.consistent = self.consistent and first.nbytes == storage.nbytes
        return storage


def check_nesting(pickle: bytes, name: str) -> None:
    """Raises if unpickling, or hashing the result, could overflow the stack.

    Raises:
        CheckpointError: The pickle nests too deep; the message starts with `name`.
    """
    depth = _torchobj.pickle_nesting(pickle)
    if depth > _DEEPEST:
        raise CheckpointError(f"{name}: has more than {_DEEPEST} nested objects, or an unbounded memo: refused")


class Use(NamedTuple):
    """A part of the object that needs a storage."""

    path: str
    """Keys joined by dots, such as `model.layer1.weight`."""
    storage: StorageOutline
    dense: bool
    """Whether it is a dense tensor or parameter in plain containers, which can be created before its bytes are read."""


def uses_in(tree: Any) -> list[Use]:
    """Returns every use of a storage in a part of a tree, in order; each container is visited once."""
    found: list[Use] = []
    visited: set[tuple[int, bool]] = set()
    # A stack, not recursion: a file may nest containers at will.
    stack: list[Iterator[tuple[tuple[Any, ...], Any, bool]]] = [iter([((), tree, False)])]
    while stack:
        path, value, in_stub = next(stack[-1], (None, None, False))
        if path is None:
            stack.pop()
        elif isinstance(value, StorageOutline):
            found.append(Use(name_of(path), value, dense=False))
        elif isinstance(value, dict | list | tuple | set | Stub) and (id(value), in_stub) not in visited:
            visited.add((id(value), in_stub))
            storage = _storage_of(value) if isinstance(value, Stub) and not in_stub else None
            if storage is None:
                stack.append(_inner_values(path, value, in_stub))
            else:
                found.append(Use(name_of(path), storage, dense=True))
    return found


def _inner_values(path: tuple[Any, ...], value: Any, in_stub: bool) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:  # noqa: FBT001
    if isinstance(value, dict):
        yield from (((*path, key), inner, in_stub) for key, inner in value.items())
    elif isinstance(value, Stub):
        for inner in (*value.args, *value.rest):
            # Arguments have no names of their own.
            several = isinstance(inner, list | tuple) and not isinstance(inner, StorageOutline)
            yield from ((path, part, True) for part in (inner if several else (inner,)))
    else:
        yield from (((*path, index), inner, in_stub) for index, inner in enumerate(value))


def _storage_of(stub: Stub) -> StorageOutline | None:
    """Returns the storage of a dense tensor or parameter whose elements are those of the storage; otherwise None."""
    if stub.rest or not stub.args:
        return None
    if stub.path == "torch._utils._rebuild_parameter" and isinstance(stub.args[0], Stub):
        return _storage_of(stub.args[0])
    if stub.path not in _DENSE or not isinstance(stub.args[0], StorageOutline):
        return None
    # Metadata set the conjugate or the negative bit.
    return None if any(stub.args[_DENSE[stub.path] :]) else stub.args[0]


def _decoded(identity: Any) -> Iterator[Any]:
    return (part.decode("ascii") if isinstance(part, bytes) else part for part in identity)


def restored_by(map_location: MapLocation) -> Callable[[torch.UntypedStorage, str], torch.UntypedStorage]:
    """Returns torch's function for a `map_location`: it moves a storage, given the location that it was saved from."""
    restore: Callable[[torch.UntypedStorage, str], torch.UntypedStorage] = _torch._get_restore_location(map_location)
    return restore


#: Escape sequences that set the colour of a terminal.
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_REFUSED = re.compile(r"Unsupported global: GLOBAL (\S+) was not an allowed global")


def refusal(name: str) -> str:
    """The message for a global that `weights_only=True` refuses."""
    return (
        f"it contains {name}, which weights_only=True refuses: allow it with torch.serialization.safe_globals, or load "
        "with weights_only=False, which runs code that the file names: use it for trusted files only"
    )


def message_of(error: Exception) -> str:
    """The message of an error of `torch.load`, without the coloured paragraph about its argument `weights_only`."""
    text = _COLOURS.sub("", str(error))
    if (refused := _REFUSED.search(text)) is not None:
        return refusal(refused[1])
    _, _, found = text.partition("WeightsUnpickler error: ")
    return found.partition("\n")[0] or text


def refused_global(names: list[str]) -> str | None:
    """Returns the first of a pickle's globals that `weights_only=True` does not allow."""
    allowed = {*_weights_only._get_allowed_globals(), *_weights_only._get_user_allowed_globals()}
    return next((name for name in names if name not in allowed), None)


class _Unpickler(pickle.Unpickler):
    """The same as torch's own in `torch.serialization._load`."""

    def find_class(self, module: str, name: str) -> Any:
        if isinstance(name, str) and "Storage" in name:
            try:
                return _torch.StorageType(name)
            except KeyError:
                # Another class with this word in its name.
                pass
        return super().find_class(_MOVED_MODULES.get(module, module), name)


def unpickle(
    data: Any,
    storage_of: Callable[[str, int, str], torch.UntypedStorage],
    map_location: MapLocation,
    *,
    weights_only: bool,
) -> Any:
    """Creates the object.

    Args:
        data: The bytes of `data.pkl`.
        storage_of: Returns a storage for a key, a size in bytes and a location; called once for each.
        map_location: As for `torch.load`; used only for tensors without storages.
        weights_only: Whether to allow only the globals that torch allows.

    Raises:
        CheckpointError: `weights_only` refuses a global, or the data is not a pickle.
    """
    storages: dict[str, Any] = {}
    typed_storage: Any = torch.storage.TypedStorage

    def persistent_load(identity: Any) -> Any:
        kind: Any
        _, kind, key, location, count = _decoded(identity)
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        known = storages.get(key)
        if known is not None and known.dtype == dtype:
            return known
        untyped = storage_of(key, count * dtype.itemsize, location) if known is None else known._untyped_storage
        typed = typed_storage(wrap_storage=untyped, dtype=dtype, _internal=True)
        return storages.setdefault(key, typed) if known is None else typed

    kind: Any = _weights_only.Unpickler if weights_only else _Unpickler
    unpickler = kind(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = persistent_load
    local = _torch._serialization_tls
    local.map_location = map_location
    try:
        value = unpickler.load()
    except pickle.UnpicklingError as error:
        hint = "; weights_only=False loads it and runs code that it names: use it for trusted files only"
        raise CheckpointError(f"{error}{hint if weights_only else ''}") from error
    finally:
        local.map_location = None
    validate: Any = torch._utils._validate_loaded_sparse_tensors
    # torch 2.15 takes the argument; older versions read a global setting.
    validate(**({"weights_only": weights_only} if inspect.signature(validate).parameters else {}))
    return value
