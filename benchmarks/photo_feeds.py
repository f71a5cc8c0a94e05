"""Feeds of decoded photos: torchobj's with a transform, and rivals whose samples are decoded in their workers."""

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.data

from benchmarks.feeds import GetItems, Plan, S3TorchConnector, Torchobj, torch_loader
from benchmarks.lab.photos import DECODERS
from benchmarks.tensor_feeds import InRam, Stacked

Decode = Callable[[Any], torch.Tensor]


class _Batches(Stacked):
    """Batches are pairs of names and one float tensor of shape (samples, 3, 224, 224)."""

    def bytes(self, batch: Any) -> int:
        return int(batch[1].nbytes)


def _named_sample(decode: Decode, reader: Any) -> tuple[str, torch.Tensor]:
    return reader.key, decode(reader.getbuffer())


class TorchobjPhotos(_Batches, Torchobj):
    """`torchobj.DataLoader` with a transform that decodes."""

    def loader(self, plan: Plan) -> Any:
        self.transform = functools.partial(_named_sample, DECODERS[plan.decoder or ""])
        return super().loader(plan)


class _Decoding(torch.utils.data.Dataset[Any]):
    def __init__(self, inner: Any, decode: Decode) -> None:
        self._inner, self._decode = inner, decode

    def __len__(self) -> int:
        return len(self._inner)

    def __getitems__(self, indices: list[int]) -> list[tuple[str, torch.Tensor]]:
        if hasattr(self._inner, "__getitems__"):
            samples = self._inner.__getitems__(indices)
        else:
            samples = [self._inner[index] for index in indices]
        return [(name, self._decode(content)) for name, content in samples]


class _TorchPhotos(_Batches):
    """torch's DataLoader over a dataset of names and bytes."""

    modules: tuple[str, ...] = ()

    def dataset(self, plan: Plan) -> Any:
        """Returns a dataset whose samples are pairs of name and bytes."""
        names = plan.names()
        return InRam(names, [b"".join(plan.family.pieces(index)) for index in range(len(names))])

    def loader(self, plan: Plan) -> Any:
        return torch_loader(_Decoding(self.dataset(plan), DECODERS[plan.decoder or ""]), plan)


class _GetItemsPhotos(_TorchPhotos):
    modules = GetItems.modules

    def dataset(self, plan: Plan) -> Any:
        return GetItems().dataset(plan)


class _S3TorchConnectorPhotos(_TorchPhotos):
    modules = S3TorchConnector.modules

    def dataset(self, plan: Plan) -> Any:
        return S3TorchConnector().dataset(plan)


PHOTO_FEEDS: dict[str, Any] = {
    "torchobj, photos": TorchobjPhotos,
    "torch, RAM, photos": _TorchPhotos,
    "getitems, photos": _GetItemsPhotos,
    "s3torchconnector, photos": _S3TorchConnectorPhotos,
}
