"""Checkpoints that other torches wrote are read here, and what is written here is read there."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.golden.make_golden_dcp import state
from torchobj.checkpoint import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROOT = Path(__file__).parents[3]
GOLDEN = sorted((ROOT / "tests" / "golden" / "dcp").glob("torch-*"))


def blank(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    return {key: blank(inner) for key, inner in value.items()} if isinstance(value, dict) else None


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_equal(found[key], value)
        elif isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype
            one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found[key], value))
            assert torch.equal(one, other), key
        else:
            assert found[key] == value


def test_there_are_golden_checkpoints_of_the_oldest_and_the_newest_torch():
    assert [path.name for path in GOLDEN] == ["torch-2.15", "torch-2.6"]


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: path.name)
def test_a_golden_checkpoint_is_loaded(folder):
    found = blank(state())
    dcp.load(found, storage_reader=StorageReader(f"file://{folder}"))
    assert_equal(found, state())


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: path.name)
def test_a_slice_of_a_golden_checkpoint_is_loaded(folder):
    reader = StorageReader(f"file://{folder}")
    metadata = reader.read_metadata()
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    [index] = [index for index in metadata.storage_data if index.fqn == "large"]
    target = torch.zeros(7, 50)
    sizes = [torch.Size(size) for size in ((0, 0), (20, 30), (7, 50))]
    request = ReadItem(LoadItemType.TENSOR, index, sizes[0], index, sizes[1], sizes[2])

    class Planner:
        def resolve_tensor(self, _request):
            return target

        def commit_tensor(self, _request, tensor):
            assert tensor.data_ptr() == target.data_ptr()

    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(LoadPlan([request]), Planner())
    assert torch.equal(target, state()["large"][20:27, 30:80])


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: path.name)
def test_a_golden_checkpoint_is_replaced_and_leaves_nothing(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / folder.name)
    old = set(copy.glob("*.distcp"))
    new = {"weight": torch.rand(100)}
    dcp.save(new, storage_writer=StorageWriter(f"file://{copy}"))
    assert len(old) > 0
    assert not old & set(copy.iterdir())
    found = blank(new)
    dcp.load(found, storage_reader=StorageReader(f"file://{copy}"))
    assert_equal(found, new)


def test_a_byte_flipped_in_a_golden_checkpoint_is_an_error(tmp_path):
    for folder in GOLDEN:
        copy = shutil.copytree(folder, tmp_path / folder.name)
        content = state()["large"].numpy().tobytes()
        for path in copy.glob("*.distcp"):
            body = bytearray(path.read_bytes())
            if content in body:
                body[body.index(content) + 100] ^= 1
                path.write_bytes(body)
        with pytest.raises(BaseException, match="IntegrityError: .*large"):
            dcp.load(blank(state()), storage_reader=StorageReader(f"file://{copy}"))


LOADING = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from tests.golden.make_golden_dcp import state
from tests.checkpoint.dcp.test_golden import assert_equal, blank
found = blank(state())
if sys.argv[2] == "torchobj":
    from torchobj.checkpoint import StorageReader, StorageWriter
    reader = StorageReader("file://" + sys.argv[1])
else:
    reader = dcp.FileSystemReader(sys.argv[1])
dcp.load(found, storage_reader=reader)
assert_equal(found, state())
if sys.argv[2] == "torchobj":
    dcp.save(state(), storage_writer=StorageWriter("file://" + sys.argv[1] + "/again", thread_count=2))
print(torch.__version__)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("by", ["torch", "torchobj"])
def test_an_old_torch_loads_what_the_newest_saved(tmp_path, old_python, by):
    dcp.save(state(), storage_writer=StorageWriter(f"file://{tmp_path}", thread_count=2))
    command = [old_python, "-c", LOADING, str(tmp_path), by]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2.6.")
    if by == "torchobj":
        found = blank(state())
        dcp.load(found, storage_reader=StorageReader(f"file://{tmp_path}/again"))
        assert_equal(found, state())
