"""Tells the ranks that have replicas of a state from those that have parts of it, as the stages of a pipeline do.

Decided by which parameters the state of a module or of an optimizer has: their names, shapes and placements. Values are
never compared, since replicas may differ in some. Reads and writes no store.

The states of optimizers number their parameters. They get the names of the modules that are saved with the optimizer;
where these are not known, the ranks of replicas have the same modules as well, also where the state of a module is a
plain dict.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from torchobj.checkpoint.matching import Path, name_of
from torchobj.checkpoint.state.digest import digest_of
from torchobj.exceptions import CheckpointError

__all__ = [
    "PARAM_GROUPS",
    "Description",
    "describe",
    "first_of_parts",
    "groups_of_own",
    "have_own_names",
    "is_flat_optimizer",
    "is_optimizer",
    "is_sharded",
    "names_of_parameters",
    "paths_of_tensors",
]

PARAM_GROUPS = "param_groups"
#: State of a module that is no parameter; its size may differ among replicas.
_EXTRA_STATE = "_extra_state"

#: Shape and placements of a tensor.
_Form: TypeAlias = tuple[Any, ...]


class Description(NamedTuple):
    """Which parameters a state has."""

    groups: dict[Path, tuple[Any, ...]]
    """The parameters of each group of optimizers, by the path of the group."""
    tensors: dict[Path, _Form]
    """Tensors that replicas have all of: those of modules."""
    moments: dict[Path, _Form]
    """Tensors that some replicas may not have yet: those of optimizers."""
    has_names: bool
    """Whether all parameters of the groups are known by name."""
    is_sharded: bool
    """Whether a tensor is sharded among ranks."""

    def digest(self) -> bytes:
        """Returns a digest, equal for equal descriptions."""
        return digest_of(tuple(self))


def is_sharded(value: Any) -> bool:
    """Returns whether `torch.distributed` manages a tensor."""
    return isinstance(value, ShardedTensor | DTensor)


def is_optimizer(value: Any) -> bool:
    """Returns whether a value is the state dict of an optimizer."""
    if not isinstance(value, Mapping) or not {"state", PARAM_GROUPS} <= value.keys():
        return False
    groups = value[PARAM_GROUPS]
    return isinstance(groups, list) and all(isinstance(group, Mapping) and "params" in group for group in groups)


def is_flat_optimizer(value: Any) -> bool:
    """Returns whether a value is the state dict of an optimizer that `flatten_optimizer_state_dict` has flattened."""
    names = list(value) if isinstance(value, Mapping) else []
    return any(str(name).startswith(f"{PARAM_GROUPS}.") for name in names) and all(
        str(name).startswith(("state.", f"{PARAM_GROUPS}.")) for name in names
    )


def names_of_parameters(objects: Mapping[Path, Any]) -> dict[int, str]:
    """Returns the names of the parameters of the modules among objects, by the id of the parameter."""
    names: dict[int, str] = {}
    for path, module in objects.items():
        for name, parameter in module.named_parameters() if isinstance(module, torch.nn.Module) else ():
            names.setdefault(id(parameter), name_of((*path, name)))
    return names


def paths_of_tensors(values: Mapping[Path, Any]) -> Iterable[Path]:
    """Returns the paths of tensors that may be parameters of a module whose state is a plain dict.

    These are floating-point tensors with a dimension: states of random number generators and numbers are not.
    """
    stack, visited = list(values.items()), set[int]()
    while stack:
        path, value = stack.pop()
        if isinstance(value, torch.Tensor):
            if value.ndim and value.is_floating_point():
                yield path
        elif id(value) in visited:
            # It may contain itself.
            continue
        elif isinstance(value, Mapping):
            visited.add(id(value))
            stack += (((*path, key), inner) for key, inner in value.items())
        elif isinstance(value, list | tuple):
            visited.add(id(value))
            stack += (((*path, number), inner) for number, inner in enumerate(value))


def describe(value: Any, owner: Any, names: Mapping[int, str]) -> Description:
    """Describes the state of modules and of optimizers.

    Args:
        value: The state, or a list of states.
        owner: The object that `value` is the state of; None if it is not known.
        names: Of `names_of_parameters`.
    """
    found = Description({}, {}, {}, has_names=True, is_sharded=False)
    _describe(value, (), found, getattr(owner, PARAM_GROUPS, None), names)
    forms = (*found.tensors.values(), *found.moments.values())
    named = (isinstance(key, str) or name is not None for group in found.groups.values() for key, name, _ in group)
    return found._replace(has_names=all(named), is_sharded=any(len(form) > 1 for form in forms))


def _describe(value: Any, path: Path, found: Description, groups: Any, names: Mapping[int, str]) -> None:
    """Adds what is in a value; `groups` are those of the optimizer whose state it is."""
    if isinstance(value, torch.Tensor):
        found.tensors.update(_tensors(value, path))
    elif is_optimizer(value):
        for number, group in enumerate(value[PARAM_GROUPS]):
            parameters = groups[number]["params"] if isinstance(groups, list) and number < len(groups) else ()
            found.groups[*path, PARAM_GROUPS, number] = _parameters(group, parameters, names)
        found.moments.update(_tensors(value["state"], (*path, "state")))
    elif is_flat_optimizer(value):
        of_groups = sorted(name for name in value if name.startswith(f"{PARAM_GROUPS}."))
        found.groups[*path, PARAM_GROUPS] = tuple((name, None, None) for name in of_groups)
        found.moments.update(_tensors(value, path))
    else:
        items = value.items() if isinstance(value, Mapping) else ()
        for key, inner in enumerate(value) if isinstance(value, list | tuple) else items:
            if str(key).rpartition(".")[2] != _EXTRA_STATE:
                _describe(inner, (*path, key), found, None, names)


def _parameters(group: Mapping[str, Any], given: Sequence[Any], names: Mapping[int, str]) -> tuple[Any, ...]:
    """Returns key, name and form of each parameter of a group; None for what is not known."""
    keys, of_group = list(group["params"]), list(group.get("param_names") or ())
    parameters: list[Any] = list(given) if len(given) == len(keys) else [None] * len(keys)
    known: list[Any] = of_group if len(of_group) == len(keys) else [None] * len(keys)
    return tuple(
        (key, names.get(id(parameter), name), None if parameter is None else _form(parameter))
        for key, name, parameter in zip(keys, known, parameters, strict=True)
    )


def _tensors(value: Any, path: Path) -> Iterable[tuple[Path, _Form]]:
    if isinstance(value, torch.Tensor):
        if (form := _form(value)) is not None:
            yield path, form
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _tensors(inner, (*path, number))


def _form(tensor: torch.Tensor) -> _Form | None:
    # First: it refuses most attributes.
    if isinstance(tensor, ShardedTensor):
        return (tuple(tensor.size()), "ShardedTensor")
    if is_lazy(tensor) or tensor.is_nested:
        return None
    if isinstance(tensor, DTensor):
        placements = tuple(map(str, tensor.placements))
        return (tuple(tensor.shape), placements, tuple(tensor.device_mesh.shape))
    return (tuple(tensor.shape),)


def first_of_parts(
    descriptions: Sequence[Description | None], modules: Sequence[Mapping[Path, bytes]]
) -> list[int | None]:
    """Returns for each rank the first rank that has the same part: the same parameters.

    Args:
        descriptions: The state of each rank; None for ranks without it.
        modules: The digests of the modules that each rank saves, by path.
    """
    firsts: list[int | None] = []
    for number, own in enumerate(descriptions):
        first: int | None = None
        if own is not None:
            earlier = [found for found in dict.fromkeys(firsts) if found is not None]
            same = (found for found in earlier if _are_replicas(own, descriptions[found]))
            first = next((found for found in same if own.has_names or _agree(modules[number], modules[found])), number)
        firsts.append(first)
    return firsts


def _are_replicas(one: Description, other: Description | None) -> bool:
    if other is None or (one.groups, one.tensors) != (other.groups, other.tensors):
        return False
    return _equal_where_both(one.moments, other.moments)


def _agree(one: Mapping[Path, Any], other: Mapping[Path, Any]) -> bool:
    """Returns whether two ranks have the same modules, of which one rank may have more."""
    has_more = one.keys() <= other.keys() or other.keys() <= one.keys()
    return has_more and _equal_where_both(one, other)


def _equal_where_both(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    return all(one[key] == other[key] for key in one.keys() & other.keys())


def have_own_names(parts: Sequence[Description]) -> bool:
    """Returns whether parts can be saved side by side: what has the same name in several parts is the same."""
    seen: dict[Path, _Form] = {}
    for part in parts:
        own = {_as_saved(path): form for path, form in (*part.tensors.items(), *part.moments.items())}
        numbered = any(not isinstance(key, str) for group in part.groups.values() for key, *_ in group if group)
        # The groups of a state within a list cannot be taken out of it.
        if numbered or any(len(path) > 2 for path in part.groups) or not _equal_where_both(seen, own):
            return False
        seen |= own
    return True


def _as_saved(path: Path) -> Path:
    """Returns a path with the strings that torch saves in place of keys."""
    return tuple(map(str, path))


def groups_of_own(states: Any, existing: Sequence[Mapping[str, Any]], source: str, path: Path) -> Any:
    """Returns the groups of an optimizer for the parameters that this rank has.

    Args:
        states: The groups that each rank saved; None for ranks without the optimizer.
        existing: The groups of this rank, with the names of its parameters.
        source: The checkpoint, for errors.
        path: The path of the groups, for errors.

    Raises:
        CheckpointError: A parameter is in no saved group, or those of one group were saved in groups that differ. Or
            the saved groups are damaged.
    """
    whole = isinstance(states, list | tuple) and all(
        saved is None or is_optimizer({"state": {}, PARAM_GROUPS: saved}) for saved in states
    )
    if not whole:
        raise CheckpointError(f"{source}: {name_of(path)} is damaged: expected the groups of each rank")
    own = [list(group["params"]) for group in existing]
    for saved in states:
        if saved is not None and [list(group["params"]) for group in saved] == own:
            return saved
    group_of = {name: group for saved in states if saved is not None for group in saved for name in group["params"]}
    groups: list[Any] = []
    for number, names in enumerate(own):
        place = f"{source}: {name_of((*path, number))}"
        if missing := [name for name in names if name not in group_of]:
            raise CheckpointError(f"{place}: {missing[0]} is in no group of the checkpoint")
        found = [{key: value for key, value in group_of[name].items() if key != "params"} for name in names]
        if len({digest_of(group) for group in found}) > 1:
            raise CheckpointError(f"{place}: its parameters were saved in groups that differ; divide it as they were")
        groups.append({**(found[0] if found else existing[number]), "params": names})
    return groups
