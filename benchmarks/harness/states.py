"""State dicts, and the measurement of a client that saves or loads one. `rivals.checkpoint` has the clients.

A tensor's bytes are those of the object with its number (`objects.pieces`), so that no copy is kept for comparison.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.harness.fork_server import Clients
from benchmarks.harness.measure import Timed, Worker, memory_bytes, timed
from benchmarks.harness.rivals.checkpoint import CheckpointClient
from benchmarks.lab.location import Location
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

    def model(self) -> dict[str, torch.Tensor]:
        """Builds the tensors."""
        return {name: numbered_tensor(number, size) for number, (name, size) in enumerate(self._sizes().items())}

    def empty(self) -> dict[str, torch.Tensor]:
        """Tensors to read into."""
        return {name: torch.empty(size // 4) for name, size in self._sizes().items()}

    def build(self) -> dict[str, Any]:
        """Builds a new state dict."""
        return {"model": self.model(), **_OTHER_VALUES}

    def check(self, found: Any) -> None:
        """Raises AssertionError unless `found` equals a new state dict, byte for byte."""
        rest = {name: value for name, value in found.items() if name != "model"}
        if rest != _OTHER_VALUES:
            raise AssertionError(f"other values: {rest}")
        if list(found["model"]) != list(self._sizes()):
            raise AssertionError("in another order")
        self.check_model(found["model"])

    def check_model(self, found: Mapping[str, torch.Tensor]) -> None:
        """Raises AssertionError unless `found` has the tensors, byte for byte, in any order."""
        expected = self._sizes()
        if found.keys() != expected.keys():
            raise AssertionError("other names")
        for number, (name, size) in enumerate(expected.items()):
            tensor = found[name]
            if tensor.dtype != torch.float32 or tensor.shape != (size // 4,):
                raise AssertionError(f"{name}: {tensor.dtype}, {tuple(tensor.shape)}")
            check(f"{name}/{number}", size, tensor.numpy().view(np.uint8))


def numbered_tensor(number: int, size: int) -> torch.Tensor:
    """A tensor of float32 with the bytes of the object with this number."""
    content = np.empty(size, np.uint8)
    at = 0
    for piece in pieces(number, size):
        content[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return torch.from_numpy(content.view(np.float32))


_WARM = States(2, 16 * MIB)
WARM_KEY = "warm.pt"


class Saving(Worker):
    """Writes a state to a key, or loads it from there and compares every byte. WARM_KEY exists for the warm-up.

    Memory grows from before the client is created, when the state to save already exists: what a client needs for
    connections, threads and buffers counts.
    """

    def __init__(self, make: type[CheckpointClient], location: Location, action: str, states: States, key: str) -> None:
        self._saves, self._states, self._key = action == "save", states, key
        self._state = states.build() if self._saves else None
        gc.collect()
        self.before_bytes = memory_bytes("VmRSS")
        self._client = make(location)

    def warm(self) -> None:
        # With parts as the measured object has.
        if self._saves:
            self._client.save(_WARM.build(), f"{self._key}.{WARM_KEY}")
        else:
            self._client.load(WARM_KEY)

    def run(self) -> int:
        if self._saves:
            self._client.save(self._state, self._key)
        else:
            self._state = self._client.load(self._key)
        return self._states.payload_bytes

    def check(self) -> None:
        self._states.check(self._state)


def saving(action: str, location: Location, states: States, key: str) -> Callable[..., Timed]:
    """Returns the job of a save or a load."""
    # As much as the client with the largest need uses, if the machine has it.
    touch_bytes = min(max(64 * MIB, 3 * states.payload_bytes), psutil.virtual_memory().available // 2)
    return partial(timed, location, {"action": action, "states": states, "key": key}, touch_bytes, worker=Saving)


def prepare(clients: Clients, location: Location, states: States, key: str) -> None:
    """Writes `key` with the stock torch.save, and the object to warm up with."""
    for each, name in ((_WARM, WARM_KEY), (states, key)):
        clients.run("boto3", saving("save", location, each, name))
