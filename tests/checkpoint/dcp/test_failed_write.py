"""The error of a rank that cannot write reaches the coordinator, whichever exception it is."""

import pickle

import pytest

from torchobj import exceptions
from torchobj.checkpoint.dcp.save_items import FailedWrite


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
    failed = FailedWrite(error)
    received = pickle.loads(pickle.dumps(failed))
    assert type(received.error) is kind
    assert "planner 5" in str(received.error)
    assert received.trace == failed.trace
