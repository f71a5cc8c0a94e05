"""Weights in the formats that people share, and the measurement of a client that loads them in one rank or in several.
`rivals.weights` has the clients. Also MLPerf Storage's checkpoint of eight ranks, which is saved and loaded.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from benchmarks.harness.measure import Timed, Worker
from benchmarks.harness.ranks import in_ranks
from benchmarks.harness.rivals.weights import Tensors, WeightsClient
from benchmarks.harness.states import States, numbered_tensor
from benchmarks.lab.location import Location
from benchmarks.lab.objects import MIB, size_text

PT, DCP, SAFETENSORS, SHARDS, FLASHPACK = ".pt", "DCP", "safetensors", "safetensors in shards", "flashpack"
#: What a client defines that reads a format.
_METHODS = {PT: "load_pt", DCP: "reader", SAFETENSORS: "load_files", SHARDS: "load_files", FLASHPACK: "load_flashpack"}
_INDEX = "model.safetensors.index.json"
_WARM_STATES = States(4, 8 * MIB)


@dataclass(frozen=True)
class Weights:
    """Tensors in a format, in a folder of the bucket."""

    format: str
    states: States
    shards: int = 1
    """Number of files, of `SHARDS`."""

    @property
    def label(self) -> str:
        what = f"{SAFETENSORS} in {self.shards} shards" if self.format == SHARDS else self.format
        return f"{what} {size_text(self.states.layers * self.states.weight_bytes)}"

    @property
    def warm(self) -> "Weights":
        """Smaller ones of the same format."""
        return Weights(self.format, _WARM_STATES, min(self.shards, _WARM_STATES.layers))

    @property
    def folder(self) -> str:
        return f"{self.format.strip('.').replace(' ', '-')}-{self.states.payload_bytes}-{self.shards}"

    def _keys(self) -> list[str]:
        if self.format == SHARDS:
            numbers = range(1, self.shards + 1)
            return [f"{self.folder}/model-{number:05}-of-{self.shards:05}.safetensors" for number in numbers]
        return [f"{self.folder}/model.{self.format.strip('.')}"]

    def is_read_by(self, client: type[WeightsClient]) -> bool:
        return hasattr(client, _METHODS[self.format])

    def load(self, client: WeightsClient) -> Tensors:
        """Returns the tensors in new memory."""
        if self.format == PT:
            return client.load_pt(self._keys()[0])
        if self.format == FLASHPACK:
            return client.load_flashpack(self._keys()[0])
        if self.format != DCP:
            return client.load_files(self._keys())
        tensors = self.states.empty()
        client.load_dcp(self.folder, tensors)
        return tensors

    def write(self, folder: Path) -> None:
        """Writes the files as the libraries of the format do."""
        model, [first, *_] = self.states.model(), [Path(key).name for key in self._keys()]
        if self.format == PT:
            torch.save(model, folder / first)
        elif self.format == DCP:
            dcp.save(model, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        elif self.format == FLASHPACK:
            from flashpack import pack_to_file

            pack_to_file(model, str(folder / first), None)
        else:
            self._write_safetensors(model, folder)

    def _write_safetensors(self, model: Tensors, folder: Path) -> None:
        from safetensors.torch import save_file

        names, found = list(model), {}
        files = [Path(key).name for key in self._keys()]
        for number, file in enumerate(files):
            part = names[number * len(names) // len(files) : (number + 1) * len(names) // len(files)]
            save_file({name: model[name] for name in part}, folder / file, {"format": "pt"})
            found |= dict.fromkeys(part, file)
        if self.format == SHARDS:
            index = {"metadata": {"total_size": self.states.payload_bytes}, "weight_map": found}
            (folder / _INDEX).write_text(json.dumps(index))


def store(location: Location, weights: Weights) -> None:
    """Uploads weights, and those to warm up with. A job without a client."""
    location.enter()
    for each in (weights, weights.warm):
        with tempfile.TemporaryDirectory(prefix="torchobj-weights-", dir="/dev/shm") as name:
            each.write(Path(name))
            for path in sorted(Path(name).iterdir()):
                location.boto3().upload_file(str(path), location.bucket, f"{each.folder}/{path.name}")
                path.unlink()


def remove(location: Location, folder: str) -> None:
    """Deletes a folder."""
    client = location.boto3()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=location.bucket, Prefix=f"{folder}/")
    for key in [entry["Key"] for page in pages for entry in page.get("Contents", ())]:
        client.delete_object(Bucket=location.bucket, Key=key)


class _Loading(Worker):
    """Loads weights, and compares every byte."""

    def __init__(self, location: Location, weights: Weights, make: type[WeightsClient]) -> None:
        self._weights, self._client = weights, make(location)

    def warm(self) -> None:
        self._weights.warm.load(self._client)

    def run(self) -> int:
        self._found = self._weights.load(self._client)
        return self._weights.states.payload_bytes

    def check(self) -> None:
        self._weights.states.check_model(self._found)


def loading(location: Location, counted: Location, weights: Weights, ranks: int) -> Callable[..., Timed]:
    """Returns the job of a load by each of `ranks`."""
    touch_bytes = 2 * ranks * weights.states.payload_bytes
    return partial(in_ranks, ranks, location, counted, touch_bytes, partial(_Loading, location, weights))


@dataclass(frozen=True)
class Llama:
    """MLPerf Storage's checkpoint of Llama 3 8B, whose tensors are divided by `divisor`.

    The list is that of DLIO for ZeRO 3 without tensor parallelism: each rank has an eighth of each tensor of the model
    in float16, and of three groups of the optimizer in float32, each of which has a second, small tensor.
    """

    divisor: int
    """A power of two, at most 256."""
    ranks: int = 8
    layers: int = 32
    hidden: int = 4096
    feed_forward: int = 14336
    vocabulary: int = 128256
    key_values: int = 1024
    """Size of the keys of a token, and of its values: 8 heads of 128."""

    def _elements(self) -> dict[str, int]:
        """The tensors of the model and their numbers of elements."""
        hidden, embedding = self.hidden, self.hidden * self.vocabulary
        layer = {
            "input_norm": hidden,
            "qkv": hidden * (hidden + 2 * self.key_values),
            "dense": hidden * hidden,
            "norm": hidden,
            "h_to_4h": 2 * hidden * self.feed_forward,
            "4h_to_h": hidden * self.feed_forward,
        }
        model = {"embedding": embedding}
        for number in range(self.layers):
            model |= {f"layers.{number}.{name}": elements for name, elements in layer.items()}
        return model | {"lm_head": embedding, "final_norm": hidden}

    def _shards(self) -> Iterator[tuple[str, torch.dtype, int]]:
        """Yields name, dtype and number of elements of each tensor of a rank."""
        model, share = self._elements(), self.ranks * self.divisor
        for name, elements in model.items():
            yield f"model.{name}", torch.float16, elements // share
        for group in range(3):
            yield f"optimizer.{group}.weights", torch.float32, sum(model.values()) // share
            yield f"optimizer.{group}.norms", torch.float32, 5 * self.hidden // self.divisor

    @property
    def payload_bytes(self) -> int:
        """The total size of the shards of all ranks."""
        return self.ranks * sum(dtype.itemsize * elements for _, dtype, elements in self._shards())

    def tensors(self, rank: int) -> Tensors:
        """The shards of a rank."""
        return {
            name: numbered_tensor(rank * 1000 + number, dtype.itemsize * elements).view(dtype)
            for number, (name, dtype, elements) in enumerate(self._shards())
        }

    def empty(self) -> Tensors:
        """Shards to read into."""
        return {name: torch.empty(elements, dtype=dtype) for name, dtype, elements in self._shards()}


_WARM_LLAMA = Llama(256, layers=1, vocabulary=8192)


class _Checkpointing(Worker):
    """Saves the checkpoint from eight ranks, or loads it into them and compares every byte. Each client loads what it
    has saved.
    """

    def __init__(self, location: Location, llama: Llama, action: str, folder: str, make: type[WeightsClient]) -> None:
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        self._client, self._llama, self._action, self._folder = make(location), llama, action, folder
        self._rank, self._mesh = distributed.get_rank(), init_device_mesh("cpu", (llama.ranks,))
        self._tensors = llama.tensors(self._rank)

    def _sharded(self, tensors: Tensors) -> dict[str, Any]:
        from torch.distributed.tensor import DTensor, Shard

        make = partial(DTensor.from_local, device_mesh=self._mesh, placements=[Shard(0)], run_check=False)
        return {name: make(each) for name, each in tensors.items()}

    def warm(self) -> None:
        if self._action == "save":
            self._client.save_dcp(f"{self._folder}-warm", self._sharded(_WARM_LLAMA.tensors(self._rank)))
        else:
            self._client.save_dcp(self._folder, self._sharded(self._tensors))

    def run(self) -> int:
        if self._action == "save":
            self._client.save_dcp(self._folder, self._sharded(self._tensors))
        else:
            self._found = self._llama.empty()
            self._client.load_dcp(self._folder, self._sharded(self._found))
        return self._llama.payload_bytes

    def check(self) -> None:
        for name, found in self._found.items() if self._action == "load" else ():
            if not torch.equal(found.view(torch.uint8), self._tensors[name].view(torch.uint8)):
                raise AssertionError(f"{name}: what was loaded is not what was saved")


def checkpointing(location: Location, llama: Llama, action: str, folder: str) -> Callable[..., Timed]:
    """Returns the job of a save or a load of MLPerf's checkpoint."""
    make = partial(_Checkpointing, location, llama, action, folder)
    return partial(in_ranks, llama.ranks, location, location, 2 * llama.payload_bytes, make)
