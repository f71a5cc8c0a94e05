"""What a pickle of `torch.save` holds, known without running any of it: names, tensors, storages, globals.

The pickle is read with stubs in place of everything that it names, so nothing is imported and nothing is called. What
comes out has the object's own dicts, lists and tuples; the rest are `Stub`s, and storages are `StorageOutline`s.
"""

import collections
import io
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch

from torchobj.checkpoint.collector import paused_collector
from torchobj.checkpoint.pickling import storage_dtype
from torchobj.exceptions import CheckpointError

__all__ = ["Outline", "StorageOutline", "Use", "outline_of", "uses_in"]

#: What makes dense tensors, and where the metadata stand in its arguments (torch/_utils.py).
_DENSE = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}


class StorageOutline(NamedTuple):
    """A storage as the pickle names it."""

    key: str
    dtype: torch.dtype
    location: str
    elements: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.elements * self.dtype.itemsize


class Stub:
    """Anything that the pickle makes by a global: an instance of, or a call to, what `path` names."""

    path = ""
    args: tuple[Any, ...]
    rest: list[Any]

    def __new__(cls, *args: Any, **_named: Any) -> Self:
        """Keeps the arguments."""
        stub = super().__new__(cls)
        stub.args = args
        stub.rest = []
        return stub

    def __init__(self, *_args: Any, **_named: Any) -> None:
        """`__new__` did it."""

    def __call__(self, *args: Any, **_named: Any) -> "Stub":
        """The result of a call to it."""
        self.rest.extend(args)
        return Stub(self, *args)

    def __setstate__(self, state: Any) -> None:
        self.rest.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.rest.append({key: value} if isinstance(key, str | int) else [key, value])

    def append(self, value: Any) -> None:
        """An element of a list or a queue."""
        self.rest.append(value)

    def extend(self, values: Any) -> None:
        """Elements of a list."""
        self.rest.extend(values)

    def add(self, value: Any) -> None:
        """An element of a set."""
        self.rest.append(value)


class Outline(NamedTuple):
    """What a pickle holds."""

    tree: Any
    storages: dict[str, StorageOutline]
    """By key, in the order of their first use."""
    names: dict[str, str]
    """By key: the path in the object of what uses the storage first, as `model.layer1.weight`."""
    globals: list[str]
    """What the pickle names, as `module.name`, in the order of first use."""
    consistent: bool
    """Whether all uses of a storage agree on its size."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: Any) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.stubs: dict[str, type[Stub]] = {}
        self.storages: dict[str, StorageOutline] = {}
        self.consistent = True

    def find_class(self, module: str, name: str) -> Any:
        # Protocol 2, which torch uses, has the names of Python 2.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        path = f"{module}.{name}"
        if path not in self.stubs:
            self.stubs[path] = type("Stub", (Stub,), {"path": path})
        return collections.OrderedDict if path == "collections.OrderedDict" else self.stubs[path]

    def persistent_load(self, identity: Any) -> StorageOutline:
        _, kind, key, location, count = (_text(part) for part in identity)
        storage = StorageOutline(key, _dtype_of(kind), location, count)
        first = self.storages.setdefault(key, storage)
        self.consistent = self.consistent and first.nbytes == storage.nbytes
        return storage


@paused_collector()
def outline_of(data: Any) -> Outline:
    """Reads a pickle without running it.

    Args:
        data: The bytes of `data.pkl`.

    Raises:
        CheckpointError: This is no pickle of `torch.save`.
    """
    unpickler = _Unpickler(data)
    try:
        tree = unpickler.load()
    except Exception as error:
        raise CheckpointError(f"data.pkl is no pickle of torch.save: {type(error).__name__}: {error}") from error
    names: dict[str, str] = {}
    for use in uses_in(tree):
        names.setdefault(use.storage.key, use.path)
    return Outline(tree, unpickler.storages, names, list(unpickler.stubs), unpickler.consistent)


class Use(NamedTuple):
    """A place in the object that needs a storage."""

    path: str
    """Names joined by dots, as `model.layer1.weight`."""
    storage: StorageOutline
    dense: bool
    """Whether it is a dense tensor or parameter in plain containers, which can be made before the bytes are there."""


def uses_in(tree: Any) -> list[Use]:
    """Every use of a storage in a part of a tree, in order; each container is entered once."""
    return list(_uses(tree, "", set(), inside=False))


def _uses(value: Any, path: str, seen: set[tuple[int, bool]], *, inside: bool) -> Iterator[Use]:
    if isinstance(value, StorageOutline):
        yield Use(path, value, dense=False)
        return
    if not isinstance(value, dict | list | tuple | set | Stub) or (id(value), inside) in seen:
        return
    seen.add((id(value), inside))
    dot = path and path + "."
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _uses(inner, f"{dot}{key}", seen, inside=inside)
    elif isinstance(value, Stub):
        storage = None if inside else _storage_of(value)
        if storage is not None:
            yield Use(path, storage, dense=True)
            return
        for inner in (*value.args, *value.rest):
            # Arguments have no names of their own.
            several = isinstance(inner, list | tuple) and not isinstance(inner, StorageOutline)
            for part in inner if several else (inner,):
                yield from _uses(part, path, seen, inside=True)
    else:
        for index, inner in enumerate(value):
            yield from _uses(inner, f"{dot}{index}", seen, inside=inside)


def _storage_of(stub: Stub) -> StorageOutline | None:
    """The storage of a dense tensor or parameter whose elements are the storage's; else None."""
    if stub.rest or not stub.args:
        return None
    if stub.path == "torch._utils._rebuild_parameter" and isinstance(stub.args[0], Stub):
        return _storage_of(stub.args[0])
    if stub.path not in _DENSE or not isinstance(stub.args[0], StorageOutline):
        return None
    # Metadata say that the conjugate or the negative bit is set.
    return None if any(stub.args[_DENSE[stub.path] :]) else stub.args[0]


def _text(part: Any) -> Any:
    return part.decode("ascii") if isinstance(part, bytes) else part


def _dtype_of(kind: Any) -> torch.dtype:
    """Of a storage's class, as `torch.FloatStorage`; those without a type are bytes."""
    name = kind.path.rpartition(".")[2]
    return torch.uint8 if name == "UntypedStorage" else storage_dtype(name)
