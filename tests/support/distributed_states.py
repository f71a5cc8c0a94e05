"""States of distributed checkpoints: how they are saved, loaded and compared."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torchobj.checkpoint import StorageReader, StorageWriter

#: Ignores torch's warnings about a single process, a replaced checkpoint, and these kinds of tensors.
QUIET = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore:.*quantize",
    "ignore:ComplexHalf",
    "ignore:Detected an existing checkpoint",
    "ignore:.*TypedStorage is deprecated",
    "ignore:Validating sparse",
)


def blank(state):
    if isinstance(state, torch.Tensor):
        return torch.empty(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(value) for value in state] if isinstance(state, list) else None


def same_bytes(one, other):
    one, other = (tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def assert_equal(found, state):
    assert found.keys() == state.keys()
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype
            assert same_bytes(found[key], value), key
        elif isinstance(value, dict):
            assert_equal(found[key], value)
        elif isinstance(value, list):
            assert_equal(dict(enumerate(found[key])), dict(enumerate(value)))
        else:
            assert found[key] == value, key


def writer_of(bucket, **settings):
    return StorageWriter(f"{bucket.url}/step 1", config=bucket.config, **settings)


def reader_of(bucket, **settings):
    return StorageReader(f"{bucket.url}/step 1", config=bucket.config, **settings)


def save(bucket, state, **settings):
    return dcp.save(state, storage_writer=writer_of(bucket, **settings))


def loaded(bucket, state, **settings):
    found = blank(state)
    dcp.load(found, storage_reader=reader_of(bucket, **settings))
    return found


def download(bucket, folder):
    for key in bucket.keys():
        name = key.removeprefix("step 1/")
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(bucket.body(key))
    return folder


def upload(bucket, folder):
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.write(f"step 1/{path.relative_to(folder)}", path.read_bytes())


def files_of(bucket):
    return sorted(key for key in bucket.keys() if key.endswith(".distcp"))


def error_of(call):
    """The error of one rank, which torch wraps in one of all ranks."""
    with pytest.raises(CheckpointException) as caught:
        call()
    [error] = caught.value.failures.values()
    return error[0]


def with_an_old_one(bucket):
    old = {"weight": torch.full((100,), 7.0)}
    save(bucket, old)
    return old


def still_good(bucket, old):
    assert_equal(loaded(bucket, old), old)
    assert bucket.uploads() == []
    return True
