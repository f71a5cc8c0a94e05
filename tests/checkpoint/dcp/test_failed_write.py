"""The error of a rank that cannot write reaches the coordinator, whichever exception it is."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torchobj import exceptions
from torchobj.checkpoint import StorageWriter
from torchobj.checkpoint.dcp.save_items import RankReport


class Unloadable(Exception):
    def __init__(self, name, number):
        super().__init__(f"{name} {number}")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Unloadable("planner", 5), exceptions.CheckpointError),
        (ValueError("planner 5"), ValueError),
        (KeyboardInterrupt("planner 5"), KeyboardInterrupt),
    ],
)
def test_a_failure_reaches_another_process_with_its_text_and_trace(error, kind):
    failed = RankReport({}, error, "the trace")
    received = pickle.loads(pickle.dumps(failed))
    assert type(received.error) is kind
    assert "planner 5" in str(received.error)
    assert received.trace == failed.trace


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tensor_whose_memory_was_freed_is_refused_by_name(tmp_path):
    tensor = torch.ones(300_000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(CheckpointException, match=r"weight of 1200000 bytes has no memory"):
        dcp.save({"weight": tensor}, storage_writer=StorageWriter(f"file://{tmp_path}/step"))
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".distcp" or path.name == ".metadata"]
