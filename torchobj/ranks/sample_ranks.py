"""Decides among how many ranks the samples of a dataset are divided, and which of them this process is.

Exactly one divides: the arguments of the dataset, another library whose loader divides what the dataset yields, or
otherwise the ranks of torch.distributed. `sharding` computes the parts.
"""

import operator
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple, Self

import torch.distributed
import torch.utils.data
from torch.distributed.device_mesh import DeviceMesh

from torchobj.config.checks import check
from torchobj.exceptions import ConfigError
from torchobj.warn_once import FORKED, warn_once
from torchobj.workers import process
from torchobj.workers.context import setting
from torchobj.workers.process import Rank

#: Accelerate and transformers iterate over a dataset in these modules, and divide its samples or its batches.
_DIVIDING = ("accelerate.data_loader", "transformers.trainer_pt_utils")

#: The loops of Lightning, by the module that is imported with them. Their strategy determines the ranks.
_LOOPS = {"lightning.pytorch": "lightning.pytorch.loops.", "pytorch_lightning": "pytorch_lightning.loops."}

#: Parts of the names of mesh dimensions whose ranks get different samples, and of those whose ranks get the same ones.
_DATA = frozenset(("batch", "data", "ddp", "dp", "fsdp", "hsdp", "replicate", "shard"))
_MODEL = frozenset(
    ("context", "cp", "model", "mp", "pipe", "pipeline", "pp", "sequence", "sp", "stage", "tensor", "tp", "ulysses")
)


class SampleRanks(NamedTuple):
    """Who divides the samples of an iterable dataset."""

    is_divided: bool = True
    """Whether ranks and workers get parts; otherwise each process yields all samples."""
    given: Rank | None = None
    """The rank by the arguments; None: it is detected when iteration starts."""
    is_chosen: bool = True
    """Whether the caller has decided that."""

    @classmethod
    def of(
        cls,
        enable_sharding: bool | None,  # noqa: FBT001
        rank: int | None,
        world_size: int | None,
        mesh: Any,
        *,
        by_default: bool = True,
    ) -> Self:
        """From the arguments of a dataset.

        Args:
            enable_sharding: Whether to divide. None: `by_default`.
            rank, world_size, mesh: As for `given_rank`.
            by_default: The default of `enable_sharding`. If that is False, giving a rank implies to divide.

        Raises:
            ConfigError: An argument is invalid, or contradicts another one.
        """
        given = given_rank(rank, world_size, mesh)
        is_chosen = enable_sharding is not None or given is not None
        enable_sharding = by_default if enable_sharding is None else enable_sharding
        check("enable_sharding", enable_sharding, "True or False", ok=isinstance(enable_sharding, bool))
        if given is not None and not enable_sharding and by_default:
            raise ConfigError(
                "enable_sharding=False: each process yields all samples, which excludes rank=, world_size= and mesh="
            )
        return cls(enable_sharding or given is not None, given, is_chosen)

    def rank(self, recorded: Rank | None) -> Rank:
        """The rank of this process. `recorded` is the rank of the trainer, in a spawned worker."""
        return detected_rank(recorded) if self.given is None else self.given

    def within_mixture(self) -> "SampleRanks":
        """The same for a dataset of a mixture, whose arguments apply unless it has a rank of its own."""
        outer = _mixture.get()
        return self if outer is None or not self.is_divided or self.given is not None else outer


_mixture: ContextVar[SampleRanks | None] = ContextVar("_mixture", default=None)


def members_divided_by(ranks: SampleRanks) -> AbstractContextManager[None]:
    """Within the block, datasets that start a pass are divided as the mixture that they belong to."""
    return setting(_mixture, ranks.within_mixture())


def given_rank(rank: int | None, world_size: int | None, mesh: Any) -> Rank | None:
    """The rank by the arguments of a dataset or sampler; None if none is given.

    Args:
        rank, world_size: Both, or neither.
        mesh: A `DeviceMesh`; the names of its dimensions determine which ranks get the same samples.

    Raises:
        ConfigError: An argument is invalid or missing.
    """
    if mesh is not None:
        if rank is not None or world_size is not None:
            raise ConfigError("mesh: determines the rank; pass either mesh=, or rank= and world_size=")
        return _rank_in_mesh(mesh)
    if rank is None and world_size is None:
        return None
    for name, value in {"rank": rank, "world_size": world_size}.items():
        is_number = hasattr(value, "__index__") and not isinstance(value, bool)
        check(name, value, "an int; pass both rank= and world_size=, or neither", ok=is_number)
    number, size = operator.index(rank), operator.index(world_size)  # type: ignore[arg-type]  # checked above
    check("world_size", size, "1 or more", ok=size > 0)
    check("rank", number, f"0..{size}, end excluded", ok=0 <= number < size)
    return Rank(number, size)


def _rank_in_mesh(mesh: Any) -> Rank:
    is_mesh = isinstance(mesh, DeviceMesh)
    check("mesh", type(mesh), "a torch.distributed.DeviceMesh, or a part of one such as mesh['dp']", ok=is_mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"mesh={mesh!r}: does not contain this process, of rank {torch.distributed.get_rank()}")
    found = Rank(0, 1)
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    for name, position, size in zip(names, coordinate, mesh.shape, strict=True):
        if _has_samples_of_its_own(name, mesh.ndim):
            found = Rank(found.number * size + position, found.world_size * size)
    return found


def _parts(name: str) -> set[str]:
    return {*re.split(r"[^a-z]+", name.lower())}


def _has_samples_of_its_own(name: str | None, dimensions: int) -> bool:
    """Whether ranks that differ in this dimension of a mesh get different samples."""
    parts = _parts(name or "")
    is_data, is_model = bool(parts & _DATA), bool(parts & _MODEL)
    # A part of a mesh was chosen by the caller, whatever its name is.
    if is_data is is_model and (is_data or dimensions > 1):
        raise ConfigError(
            f"mesh: whether the ranks of its dimension {name!r} get the same samples is not known; pass the part whose "
            "ranks get different ones, as mesh=mesh['dp'], or rank= and world_size="
        )
    return not is_model


def detected_rank(recorded: Rank | None) -> Rank:
    """The rank of this process among those that divide the samples, if the arguments do not say it.

    Args:
        recorded: The rank of the trainer, in a worker that was spawned.
    """
    by_library = rank_of_library()
    if by_library is not None:
        return by_library
    found = process.rank(recorded)
    info = torch.utils.data.get_worker_info()
    if info is None or (info.id == 0 and recorded is None):
        _warn_if_unknown(found)
    return found


def rank_of_library() -> Rank | None:
    """The rank by the library whose loader or loop is iterating; None if there is none that decides.

    The stack is that of the iteration, also in a forked worker, which inherits the stack of its start. A spawned worker
    uses what its trainer recorded.
    """
    if sys.modules.keys().isdisjoint((*_DIVIDING, *_LOOPS)):
        return None
    for module, frame in callers():
        if module in _DIVIDING:
            # It divides what each rank yields, or reads on one rank only.
            return Rank(0, 1)
        if module.startswith(tuple(_LOOPS.values())):
            trainer = getattr(frame.f_locals.get("self"), "trainer", None)
            found = getattr(getattr(trainer, "strategy", None), "distributed_sampler_kwargs", None)
            if found:
                return Rank(found["rank"], found["num_replicas"])
    return None


def callers() -> Iterator[tuple[str, FrameType]]:
    """The frames of the stack, from the innermost one, with the names of their modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__")), frame
        frame = frame.f_back


def model_dimensions() -> list[str]:
    """The names of dimensions of meshes whose ranks usually need the same samples. Needs torch.distributed."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    names = {group.group_desc.removeprefix("mesh_") for group in groups if group.size() > 1}
    return sorted(name for name in names if _parts(name) & _MODEL)


def _warn_if_unknown(found: Rank) -> None:
    expected = os.environ.get("WORLD_SIZE", "")
    if found.world_size > 1:
        shared = model_dimensions()
        if not shared:
            return
        warn_once(
            FORKED,
            "a device mesh has the dimension %s, whose ranks usually need the same samples, but samples are divided "
            "among all %d ranks; pass mesh= to the dataset or sampler; rank= and world_size= silence this warning",
            ", ".join(map(repr, shared)),
            found.world_size,
            key="mesh",
        )
    elif expected.isdecimal() and int(expected) > 1:
        warn_once(
            FORKED,
            "WORLD_SIZE=%s is set, but torch.distributed is not initialised, so that each rank yields the samples of "
            "all; initialise it before the loop, or pass rank= and world_size= to the dataset or sampler",
            expected,
            key="world size",
        )
