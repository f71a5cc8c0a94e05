"""Metadata is written for every torch, and read from every torch, without running what it may name."""

import io
import os
import pathlib
import pickle

import pytest
import torch
import torch.distributed.checkpoint.filesystem as torch_filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchobj.checkpoint.dcp.metadata import dump_metadata, load_metadata
from torchobj.exceptions import CheckpointError


def metadata_of(dtype=torch.float32, **properties):
    size = torch.Size([4, 3])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
    tensor = TensorStorageMetadata(TensorProperties(dtype, **properties), size, [chunk])
    return Metadata(
        {"weight": tensor, "step": BytesStorageMetadata()},
        planner_data={"weight": ("model", "weight"), "step": ("step", 0)},
        storage_data={MetadataIndex("weight", [0, 0]): torch_filesystem._StorageInfo("__0_0.distcp", 0, 100)},
        storage_meta=StorageMeta(checkpoint_id=pathlib.PurePosixPath("/x"), save_id="s"),
        version="1.0.0",
    )


class OldTensorProperties:
    """`TensorProperties` as it was up to torch 2.14."""

    def __setstate__(self, state):
        (self.dtype, self.layout, self.requires_grad, self.memory_format, self.pin_memory) = state


class OldTorch(pickle.Unpickler):
    def find_class(self, module, name):
        return OldTensorProperties if name == "TensorProperties" else super().find_class(module, name)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format])
def test_an_older_torch_reads_what_a_newer_one_wrote(memory_format):
    metadata = metadata_of(memory_format=memory_format)
    metadata.state_dict_metadata["weight"].properties.strides = (3, 1)
    read = OldTorch(io.BytesIO(dump_metadata(metadata))).load()
    assert read.state_dict_metadata["weight"].properties.dtype == torch.float32
    assert metadata.state_dict_metadata["weight"].properties.strides == (3, 1)
    # And this one, by itself.
    assert pickle.loads(dump_metadata(metadata_of())) == metadata_of()


@pytest.mark.parametrize("dtype", [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)], ids=str)
def test_metadata_of_torch_is_read_whole(dtype):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        metadata = metadata_of(dtype, memory_format=torch.channels_last, strides=(3, 1))
        read = load_metadata(pickle.dumps(metadata, protocol), "memory://x/.metadata")
        assert read == metadata
        assert type(read.state_dict_metadata["weight"].properties) is TensorProperties


def test_a_path_is_read_as_words_on_any_system():
    for path in (pathlib.PosixPath("/a/b"), pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:/a")):
        metadata = metadata_of()
        metadata.storage_meta.checkpoint_id = path
        read = load_metadata(pickle.dumps(metadata), "u").storage_meta.checkpoint_id
        assert isinstance(read, pathlib.PurePath)
        assert str(read) == str(path)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/torchobj-was-here",)


@pytest.mark.parametrize(
    ("planner_data", "named"),
    [(Evil(), "posix.system"), (eval, "builtins.eval"), (torch.nn.Linear, "torch.nn.modules.linear.Linear")],
)
def test_what_does_not_belong_in_metadata_is_refused_by_name(planner_data, named):
    metadata = metadata_of()
    metadata.planner_data = planner_data
    with pytest.raises(CheckpointError, match=f"memory://x/.metadata: names {named}, which .* refused"):
        load_metadata(pickle.dumps(metadata), "memory://x/.metadata")


@pytest.mark.parametrize(
    "data",
    [b"", b"nothing", pickle.dumps([1]), dump_metadata(metadata_of())[:-20]],
    ids=["empty", "text", "list", "cut"],
)
def test_what_is_no_metadata_is_refused(data):
    with pytest.raises(CheckpointError, match=r"u: is not metadata of a checkpoint"):
        load_metadata(data, "u")
