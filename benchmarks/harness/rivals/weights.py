"""Clients that load weights from S3 into the memory of one rank or of several. `weights` measures them.

A client defines what it reads: `load_pt`, `load_files` for safetensors, `load_flashpack`, and `reader` and `writer` for
distributed checkpoints. The tensors that it returns own their memory. All have the defaults, or what their own
documentation advises for speed.
"""

import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp

from benchmarks.harness.rivals.client import Client
from benchmarks.lab.location import Location

Tensors = dict[str, torch.Tensor]
_RUNAI_REQUESTS = (4, 8, 16, 32)
#: So that its undocumented default of 1 s is not what is measured.
_RUNAI_TIMEOUT_MS = 20_000


# Of torch, that one process has no group.
warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")


def _many_ranks() -> bool:
    return distributed.is_initialized()


class WeightsClient(Client):
    """A client to measure."""

    load_pt: Callable[[str], Tensors]
    """Returns the tensors of a file of `torch.save`."""
    load_files: Callable[[Sequence[str]], Tensors]
    """Returns the tensors of files of safetensors, the only ones in their folder beside its index."""
    load_flashpack: Callable[[str], Tensors]
    """Returns the tensors of a file of flashpack."""
    reader: Callable[[str], Any]
    """Returns a `StorageReader` of a distributed checkpoint in a folder."""
    writer: Callable[[str], Any]
    """Returns a `StorageWriter`."""

    def load_dcp(self, folder: str, into: Any) -> None:
        """Fills tensors from a distributed checkpoint, in each rank."""
        dcp.load(into, storage_reader=self.reader(folder), no_dist=not _many_ranks())

    def save_dcp(self, folder: str, state: Any) -> None:
        """Writes a distributed checkpoint."""
        dcp.save(state, storage_writer=self.writer(folder), no_dist=not _many_ranks())


class TorchobjFiles(WeightsClient):
    """`torchobj.load` of files."""

    modules = ("torchobj",)
    share: ClassVar[str | None] = None

    def open(self, location: Location) -> None:
        import torchobj

        self._module, self._config = torchobj, location.config()

    def _load(self, key: str) -> Any:
        return self._module.load(self._location.url(key), config=self._config, share=self.share)

    def load_pt(self, key: str) -> Tensors:
        return self._load(key)

    def load_files(self, keys: Sequence[str]) -> Tensors:
        return self._load(keys[0] if len(keys) == 1 else f"{keys[0].rsplit('/', 1)[0]}/")


class Torchobj(TorchobjFiles):
    """Also `StorageReader` and `StorageWriter`; every rank reads everything."""

    modules = ("torchobj", "torchobj.checkpoint")
    share_dcp: ClassVar[str | None] = None

    def reader(self, folder: str) -> Any:
        url = self._location.url(folder)
        return self._module.checkpoint.StorageReader(url, config=self._config, share=self.share_dcp)

    def writer(self, folder: str) -> Any:
        return self._module.checkpoint.StorageWriter(self._location.url(folder), config=self._config)


class TorchobjShared(Torchobj):
    """Like `Torchobj`; the ranks of the machine read once."""

    share = "host"
    share_dcp = "auto"


class TorchobjJob(TorchobjFiles):
    """The ranks of the job read once; every other one is told that it is on another machine."""

    share = "job"

    def open(self, location: Location) -> None:
        super().open(location)
        from torchobj.ranks import machine

        host = f"machine {distributed.get_rank() % 2}"
        machine._host_of = lambda: host


class Runai(WeightsClient):
    """runai-model-streamer; several ranks read a share each and broadcast it."""

    modules = ("runai_model_streamer", "runai_model_streamer_s3")
    requests: ClassVar[int]

    def open(self, location: Location) -> None:
        os.environ |= {
            "RUNAI_STREAMER_DIST": "1",
            "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS": str(_RUNAI_TIMEOUT_MS),
            # Its name until 0.16, and since.
            "RUNAI_STREAMER_CONCURRENCY": str(self.requests),
            "RUNAI_STREAMER_OBJ_CONCURRENCY": str(self.requests),
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        }
        if location.endpoint_url is not None:
            os.environ["AWS_ENDPOINT_URL"] = location.endpoint_url
        if location.ca_file is not None:
            os.environ["AWS_CA_BUNDLE"] = location.ca_file
        from runai_model_streamer import SafetensorsStreamer

        self._streamer = SafetensorsStreamer

    def load_files(self, keys: Sequence[str]) -> Tensors:
        with self._streamer() as streamer:
            # Tensors are the caller's by default, as a dict of them needs.
            streamer.stream_files([self._location.url(key) for key in keys], is_distributed=_many_ranks())
            return dict(streamer.get_tensors())


class S3TorchConnector(WeightsClient):
    """s3torchconnector's `S3Checkpoint`, whose files torch and safetensors read, and its classes for torch's DCP."""

    modules = ("s3torchconnector", "s3torchconnector.dcp", "safetensors.torch")

    def open(self, location: Location) -> None:
        from s3torchconnector import S3Checkpoint

        self._arguments = location.s3torchconnector()
        self._checkpoint = S3Checkpoint(**self._arguments)

    def load_pt(self, key: str) -> Tensors:
        with self._checkpoint.reader(self._location.url(key)) as file:
            return torch.load(file, map_location="cpu", weights_only=True)

    def load_files(self, keys: Sequence[str]) -> Tensors:
        from safetensors.torch import load

        tensors: Tensors = {}
        for key in keys:
            with self._checkpoint.reader(self._location.url(key)) as file:
                tensors |= load(file.read())
        return tensors

    def _made(self, kind: str, folder: str) -> Any:
        from s3torchconnector import dcp as theirs
        from s3torchconnector._s3client import S3Client

        made = getattr(theirs, kind)(self._arguments["region"], self._location.url(folder))
        # Its classes take no endpoint.
        made.fs._client = S3Client(**self._arguments)
        return made

    def reader(self, folder: str) -> Any:
        return self._made("S3StorageReader", folder)

    def writer(self, folder: str) -> Any:
        return self._made("S3StorageWriter", folder)


class S3Fs(WeightsClient):
    """s3fs, whose files torch and safetensors read, and torch's classes of DCP for fsspec."""

    modules = ("s3fs", "safetensors.torch", "torch.distributed.checkpoint.fsspec_filesystem")

    def open(self, location: Location) -> None:
        import s3fs

        self._options = {"endpoint_url": location.endpoint_url, "client_kwargs": {"verify": location.ca_file}}
        self._files = s3fs.S3FileSystem(**self._options)

    def _path(self, key: str) -> str:
        return f"{self._location.bucket}/{key}"

    def load_pt(self, key: str) -> Tensors:
        with self._files.open(self._path(key), "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)

    def load_files(self, keys: Sequence[str]) -> Tensors:
        from safetensors.torch import load

        tensors: Tensors = {}
        for key in keys:
            with self._files.open(self._path(key), "rb") as file:
                tensors |= load(file.read())
        return tensors

    def reader(self, folder: str) -> Any:
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader

        return FsspecReader(self._location.url(folder), **self._options)

    def writer(self, folder: str) -> Any:
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter

        return FsspecWriter(self._location.url(folder), **self._options)


class _Downloading(WeightsClient):
    """A reader of files: boto3 downloads them to memory first, once for all ranks."""

    def open(self, location: Location) -> None:
        self._client, self._folder = location.boto3(), Path(tempfile.gettempdir())

    def _downloaded(self, keys: Sequence[str]) -> list[str]:
        paths = [str(self._folder / key.replace("/", "-")) for key in keys]
        if not _many_ranks() or distributed.get_rank() == 0:
            for key, path in zip(keys, paths, strict=True):
                self._client.download_file(self._location.bucket, key, path)
        if _many_ranks():
            distributed.barrier()
        return paths


class FastSafetensors(_Downloading):
    """fastsafetensors, which reads files, without GPUDirect; each rank reads them whole."""

    modules = ("fastsafetensors", "boto3", "s3transfer")

    def load_files(self, keys: Sequence[str]) -> Tensors:
        from fastsafetensors import SafeTensorsFileLoader

        loader = SafeTensorsFileLoader(None, "cpu", nogds=True)
        loader.add_filenames({0: self._downloaded(keys)})
        buffers = loader.copy_files_to_device()
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}


class FlashPack(_Downloading):
    """flashpack, which reads files of its own format; several ranks read a share each."""

    modules = ("flashpack", "boto3", "s3transfer")

    def open(self, location: Location) -> None:
        # Otherwise its tensors are views of the file.
        os.environ["FLASHPACK_CPU_PARALLEL_READ"] = "1"
        super().open(location)

    def load_flashpack(self, key: str) -> Tensors:
        from flashpack import deserialization as theirs

        [path] = self._downloaded([key])
        read = theirs.read_flashpack_file
        if _many_ranks():
            read = partial(theirs.read_flashpack_file_distributed, sharded=True)
        return dict(theirs.iterate_from_flash_tensor(*read(path, device="cpu")))


CLIENTS: dict[str, type[WeightsClient]] = {
    "torchobj": Torchobj,
    "torchobj, share=host": TorchobjShared,
    "torchobj, share=job, 2 machines": TorchobjJob,
    **{
        f"runai, {requests} requests": type(f"Runai{requests}", (Runai,), {"requests": requests})
        for requests in _RUNAI_REQUESTS
    },
    "s3torchconnector": S3TorchConnector,
    "s3fs": S3Fs,
    "fastsafetensors": FastSafetensors,
    "flashpack": FlashPack,
}
