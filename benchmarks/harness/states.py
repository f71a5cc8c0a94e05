"""State dicts to save, and the comparison of a loaded one with the saved one.

A tensor's bytes are those of the object with its number (`objects.pieces`), so that no copy is kept for comparison.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.lab.objects import KIB, MIB, check, pieces

_LAYER_BYTES = 32 * MIB
_OTHER_VALUES = {"step": 1234, "settings": {"rate": 0.25, "betas": (0.9, 0.95)}}


@dataclass(frozen=True)
class States:
    """A state dict of float32: `layers` weights, each with a bias, and a few small values."""

    layers: int
    weight_bytes: int = _LAYER_BYTES
    bias_bytes: int = 4 * KIB

    @classmethod
    def of_mib(cls, mib: int) -> "States":
        """Weights of 32 MiB each."""
        return cls(mib * MIB // _LAYER_BYTES)

    @classmethod
    def of_tensors(cls, count: int) -> "States":
        """Small tensors only: alternately 1 KiB and 64 B."""
        return cls(count // 2, KIB, 64)

    @property
    def payload_bytes(self) -> int:
        """The total size of all tensors."""
        return self.layers * (self.weight_bytes + self.bias_bytes)

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        for layer in range(self.layers):
            sizes[f"layers.{layer}.weight"] = self.weight_bytes
            sizes[f"layers.{layer}.bias"] = self.bias_bytes
        return sizes

    def build(self) -> dict[str, Any]:
        """Builds a new state dict."""
        model = {name: _tensor(number, size) for number, (name, size) in enumerate(self._sizes().items())}
        return {"model": model, **_OTHER_VALUES}

    def check(self, found: Any) -> None:
        """Raises AssertionError unless `found` equals a new state dict, byte for byte."""
        expected = self._sizes()
        rest = {name: value for name, value in found.items() if name != "model"}
        if rest != _OTHER_VALUES:
            raise AssertionError(f"other values: {rest}")
        if list(found["model"]) != list(expected):
            raise AssertionError("other names, or in another order")
        for number, (name, size) in enumerate(expected.items()):
            tensor = found["model"][name]
            if tensor.dtype != torch.float32 or tensor.shape != (size // 4,):
                raise AssertionError(f"{name}: {tensor.dtype}, {tuple(tensor.shape)}")
            check(f"{name}/{number}", size, tensor.numpy().view(np.uint8))


def _tensor(number: int, size: int) -> torch.Tensor:
    content = np.empty(size, np.uint8)
    at = 0
    for piece in pieces(number, size):
        content[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return torch.from_numpy(content.view(np.float32))
