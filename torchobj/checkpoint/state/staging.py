"""The state of a background save: a staged copy on the CPU, or a watch on the tensors. Reads and writes no store.

The staged copy of a state for one file is the plan of this file over copies of the storages: everything else is in the
plan. Its memory is reused by the next staged copy: copying into new memory takes two to five times as long.

For `torch.distributed.checkpoint`, which writes tensors one by one, each tensor of this rank's state shard is copied:
a small view of a large storage stays small. torch's own stager allocates new memory for each save, and that of torch
2.6 does not copy tensors on the CPU.
"""

import copy
import io
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from torchobj.checkpoint.archive import device_memory
from torchobj.checkpoint.archive.device_memory import check_memory
from torchobj.checkpoint.archive.plan import Hole, Plan, PlanError, plan_of
from torchobj.exceptions import CheckpointError, ConfigError

__all__ = ["Stager", "Watch", "planned", "with_containers"]

logger = logging.getLogger("torchobj")

#: Minimum size of a storage whose copy has a block of its own, which is reused; the allocator handles smaller ones.
_BLOCK_BYTES = 1 << 20


class Stager:
    """Makes staged copies, one at a time. Each reuses the memory of the previous one."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def stage(self, state: Any) -> Plan:
        """Returns the file of a state, with a copy of its tensors that the next staged copy overwrites.

        Raises:
            Exception: The state cannot be pickled.
        """
        plan = planned(state, "cpu")
        copies = self._copies([device_memory.bytes_of(hole.storage) for hole in plan.holes])
        holes = [Hole(hole.start, copy.untyped_storage()) for hole, copy in zip(plan.holes, copies, strict=True)]
        return plan._replace(holes=holes, tensors=[])

    def stage_shard(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns a copy of this rank's state shard on the CPU, which the next staged copy overwrites.

        Args:
            state: Dicts, lists and tuples of tensors, and other values.

        Raises:
            CheckpointError: A tensor has no memory: it was freed, as FSDP frees gathered parameters.
            Exception: `copy.deepcopy` cannot copy a value.
        """
        shards: dict[Hashable, torch.Tensor] = {}

        def collect(value: Any) -> Any:
            if (local := _local(value)) is not None:
                shards[_memory_key(local)] = local
            return value

        def copy_of(value: Any) -> Any:
            local = _local(value)
            if local is None:
                return _deep_copy(value)
            made = copies[_memory_key(local)]
            # `from_local` would move it to the device of the mesh.
            return DTensor(made, value._spec, requires_grad=False) if isinstance(value, DTensor) else made

        with_containers(state, collect)
        copies = dict(zip(shards, self._copies(list(shards.values())), strict=True))
        staged: dict[Any, Any] = with_containers(state, copy_of)
        return staged

    # Tensors created in inference mode could not be written to outside of it.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns contiguous copies of strided tensors of the CPU or of GPUs, with the same shapes and dtypes."""
        pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        blocks = self._blocks_for([tensor.nbytes for tensor in tensors if tensor.nbytes >= _BLOCK_BYTES], pinned=pinned)
        copies = []
        for tensor in tensors:
            is_large = tensor.nbytes >= _BLOCK_BYTES
            storage = next(blocks).untyped_storage() if is_large else device_memory.storage_of(tensor.nbytes)
            copied = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage).view(tensor.shape)
            # The CPU resolves conjugation, and would not wait for the bytes.
            is_plain = tensor.device.type == "cuda" and not (tensor.is_conj() or tensor.is_neg())
            copies.append(copied.copy_(tensor, non_blocking=is_large and is_plain))
        device_memory.synchronize(tensors)
        return copies

    def _blocks_for(self, sizes: list[int], *, pinned: bool) -> Iterator[torch.Tensor]:
        """Yields memory of these sizes: blocks of the previous copy where they fit, otherwise new ones."""
        free: dict[int, list[torch.Tensor]] = {}
        for block in self._blocks:
            if block.is_pinned() == pinned:
                free.setdefault(block.nbytes, []).append(block)
        reused = [free[size].pop() if free.get(size) else None for size in sizes]
        # Other blocks are freed before new ones are allocated: a copy is never larger than its state.
        self._blocks, free = [], {}
        self._blocks = [
            device_memory.new_block(size, pinned=pinned) if old is None else old
            for size, old in zip(sizes, reused, strict=True)
        ]
        return iter(self._blocks)

    def release(self) -> None:
        """Frees the memory."""
        self._blocks = []


def planned(state: Any, location: str | None = None) -> Plan:
    """Returns the file of a state: a plan of it, with copies of everything except for tensors.

    If torch's file cannot be planned, it is copied into memory as a whole, and the reason is logged.

    Args:
        state: Anything that `torch.save` accepts.
        location: The device that the file names for all tensors; None for their own.

    Raises:
        CheckpointError: The memory of a tensor was freed.
        Exception: The state cannot be pickled.
    """
    try:
        return plan_of(state, copies_small=True, location=location)
    except PlanError as reason:
        logger.info("copied by torch.save: %s", reason)
    out = io.BytesIO()
    torch.save(state, out)
    return Plan([(0, out.getvalue())], [], [], out.tell(), [])


class Watch:
    """Detects writes to the tensors of a state that is saved without a copy, by their versions.

    Used as a context, it checks the tensors when the block ends. Writes that bypass autograd, such as through `.data`,
    a numpy view or another process, are not detected.

    Args:
        tensors: The tensors of the state.
        names: Those with a name in the state, for errors.

    Raises:
        ConfigError: A tensor was created in inference mode: such tensors have no version.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], names: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._names, self._tensors = names, tensors
        for tensor in tensors:
            if tensor.is_inference():
                why = "created in inference mode, where changes cannot be detected; save with stage=True"
                raise ConfigError(f"{self._name_of(tensor)}: {why}")
        self._versions = [tensor._version for tensor in tensors]
        # They are read by another thread, whose stream does not wait for the caller's.
        device_memory.synchronize(tensors)

    def check(self) -> None:
        """Checks that no tensor was written to.

        Raises:
            CheckpointError: A tensor was written to; the message names it.
        """
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                message = "was changed while it was saved with stage=False: nothing was committed"
                raise CheckpointError(f"{self._name_of(tensor)} {message}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A changed tensor no longer matches its checksum: then the store's error is not the cause.
        if exc is None or isinstance(exc, Exception):
            self.check()

    def _name_of(self, tensor: torch.Tensor) -> str:
        return next((name for name, own in self._names if own is tensor), "a tensor")


def _local(value: Any) -> torch.Tensor | None:
    """Returns this rank's shard of a tensor, if it is plain memory; None for other values.

    Raises:
        CheckpointError: The shard's memory was freed.
    """
    local = value._local_tensor if isinstance(value, DTensor) else value
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        return None
    check_memory(local)
    is_strided = local.layout is torch.strided and not (local.is_quantized or local.is_nested)
    return local.detach() if is_strided and local.device.type in ("cpu", "cuda") else None


def _memory_key(local: torch.Tensor) -> Hashable:
    """Returns the same key for two tensors that are one, as tied weights are."""
    kind = (local.dtype, local.device, local.is_conj(), local.is_neg())
    return local.data_ptr(), *kind, tuple(local.shape), local.stride()


@torch.no_grad()
def _deep_copy(value: Any) -> Any:
    """Copies values other than plain memory, including tensors of other layouts and subclasses."""
    if isinstance(value, DTensor):
        return DTensor(_deep_copy(value._local_tensor), value._spec, requires_grad=False)
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def with_containers(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns new mappings, lists and tuples, with `change` applied to everything else in them.

    Containers keep their types, except for mappings other than dicts: a copy of these may share its entries.
    """
    made: Any
    if isinstance(value, Mapping):
        made = copy.copy(value) if isinstance(value, dict) else {}
        for key, inner in value.items():
            # A subclass may check values in its own `__setitem__`.
            dict.__setitem__(made, key, with_containers(inner, change))
        return made
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = [with_containers(inner, change) for inner in value]
        return made
    if isinstance(value, tuple):
        made = [with_containers(inner, change) for inner in value]
        if all(new is old for new, old in zip(made, value, strict=True)):
            return value
        return value._make(made) if hasattr(value, "_make") else tuple(made)
    return change(value)
