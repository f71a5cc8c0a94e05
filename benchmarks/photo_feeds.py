"""Feeds of decoded photos: torchobj's with a transform, and rivals whose samples are decoded in their workers."""

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.data

from benchmarks.feeds import GetItems, Plan, S3TorchConnector, Torchobj
from benchmarks.lab.photos import DECODERS, Photos
from benchmarks.tensor_feeds import Stacked

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


class _InRam(torch.utils.data.Dataset[Any]):
    def __init__(self, names: list[str], family: Photos) -> None:
        self._names = names
        self._contents = [family.content(index) for index in range(len(names))]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[str, bytes]:
        return self._names[index], self._contents[index]


class _TorchPhotos(_Batches):
    """torch's DataLoader over a dataset of names and bytes."""

    modules: tuple[str, ...] = ()

    def dataset(self, plan: Plan) -> Any:
        """Returns a dataset whose samples are pairs of name and bytes."""
        if not isinstance(plan.family, Photos):
            raise TypeError(f"{plan.family!r} is not a family of photos")
        return _InRam(plan.names(), plan.family)

    def loader(self, plan: Plan) -> Any:
        dataset = _Decoding(self.dataset(plan), DECODERS[plan.decoder or ""])
        generator = torch.Generator().manual_seed(plan.seed)
        return torch.utils.data.DataLoader(dataset, shuffle=True, generator=generator, **plan.arguments())


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
