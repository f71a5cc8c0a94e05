"""Finds the functions of `torchobj.decode` that a loader uses, and imports their libraries before workers are started.

Otherwise each worker would import them, in each epoch: torchvision alone takes two seconds. They are found in the
attributes of datasets, transforms and collate functions, in containers, partial functions and closures, and by the
names that functions and methods of users contain. One that is not found is imported by the workers.
"""

import collections
import contextlib
import functools
import itertools
import multiprocessing
import multiprocessing.forkserver
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torchobj import decode

#: Maximum number of items of a container that are looked at: larger ones hold samples, not transforms.
_MAX_ITEMS = 100

#: Maximum number of objects that are looked at.
_MAX_OBJECTS = 2000

#: Maximum number of modules in an expression that names a function, as in `torchobj.decode.image`.
_MAX_MODULES = 3

_DECODERS = frozenset(getattr(decode, name) for name in decode.__all__)

#: Packages whose functions and methods call no decoder that is not in their attributes.
_LIBRARIES = ("builtins", "collections", "functools", "numpy", "PIL", "torch", "torchobj", "torchvision")


def import_decoders(used: Iterable[Any], start_method: str) -> None:
    """Imports what the decoders of a loader need, where its workers inherit it.

    Args:
        used: The dataset, and functions that workers call.
        start_method: How workers are started: `fork`, `forkserver`, or `spawn`, whose workers inherit nothing.
    """
    if start_method == "spawn":
        return
    names = decode.import_libraries(_decoders_in(used))
    if start_method == "forkserver" and names:
        # Without an effect on a server that runs already. A failing import would end the server: these succeeded here.
        before = multiprocessing.forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
        multiprocessing.set_forkserver_preload([*before, *(name for name in names if name not in before)])


def _decoders_in(used: Iterable[Any]) -> set[Callable[..., Any]]:
    """The functions of `torchobj.decode` that can be reached from these objects."""
    found: set[Callable[..., Any]] = set()
    # The objects are kept, because an id is unique among living objects only.
    seen: dict[int, Any] = {}
    left = collections.deque(used)
    while left and len(seen) < _MAX_OBJECTS:
        each = left.popleft()
        if type(each) is FunctionType and each in _DECODERS:
            found.add(each)
        elif id(each) not in seen:
            seen[id(each)] = each
            # Objects of users may raise anything at any access.
            with contextlib.suppress(Exception):
                left.extend(_within(each))
    return found


def _within(value: Any) -> Iterator[Any]:
    """The objects that an object refers to, as far as they may be or call decoders."""
    if isinstance(value, (type, ModuleType)):
        return
    if isinstance(value, FunctionType):
        yield from _within_function(value)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, dict):
        yield from itertools.islice(dict.values(value), _MAX_ITEMS)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from itertools.islice(value, _MAX_ITEMS)
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        if not _is_of_library(kind.__module__):
            yield from (each for each in vars(kind).values() if isinstance(each, FunctionType))


def _within_function(function: FunctionType) -> Iterator[Any]:
    """The defaults of a function, its variables from outside, and the globals and members of modules that it names."""
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for cell in function.__closure__ or ():
        # It is empty before its variable is assigned.
        with contextlib.suppress(ValueError):
            yield cell.cell_contents
    if _is_of_library(function.__module__):
        return
    names = _names(function.__code__)
    named = [function.__globals__[name] for name in names & function.__globals__.keys()]
    for _ in range(_MAX_MODULES):
        modules = [value for value in named if _is_searched(value)]
        yield from named
        named = [vars(module)[name] for module in modules for name in names & vars(module).keys()]
    yield from named


def _is_searched(value: Any) -> bool:
    """Whether a value is a module whose members may be or call decoders."""
    if not isinstance(value, ModuleType):
        return False
    return value.__name__ in ("torchobj", "torchobj.decode") or not _is_of_library(value.__name__)


def _names(code: CodeType) -> set[str]:
    """The names of globals and members in a function, and in those within it."""
    within = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*within)


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
