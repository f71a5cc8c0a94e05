"""Feeds whose samples are tensors, which the default collation stacks: torchobj's, and torch's own over data in RAM."""

from typing import Any

import torch.utils.data

from benchmarks.feeds import Plan, Torchobj, torch_loader
from benchmarks.lab.objects import pieces


def _named_tensor(reader: Any) -> tuple[str, torch.Tensor]:
    return reader.key, torch.frombuffer(reader, dtype=torch.uint8)


class Stacked:
    """Batches are pairs of names and one tensor, uint8 of shape (samples, bytes)."""

    def names(self, batch: Any) -> list[str]:
        return ["/".join(name.rsplit("/", 2)[-2:]) for name in batch[0]]

    def bytes(self, batch: Any) -> int:
        return int(batch[1].numel())

    def content(self, batch: Any, position: int) -> torch.Tensor:
        row: torch.Tensor = batch[1][position]
        return row


class TorchobjTensors(Stacked, Torchobj):
    """`torchobj.DataLoader` with a transform that returns a tensor, and the default collation."""

    transform = staticmethod(_named_tensor)


class InRam(torch.utils.data.Dataset[Any]):
    """Pairs of names and contents."""

    def __init__(self, names: list[str], contents: list[Any]) -> None:
        self._names, self._contents = names, contents

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[str, Any]:
        return self._names[index], self._contents[index]


class RamTensors(Stacked):
    """torch's DataLoader over tensors that are in memory before it starts."""

    modules = ()

    def loader(self, plan: Plan) -> Any:
        names, size = plan.names(), plan.family.size
        contents = (bytearray().join(pieces(index, size)) for index in range(len(names)))
        tensors = [torch.frombuffer(content, dtype=torch.uint8) for content in contents]
        return torch_loader(InRam(names, tensors), plan)
