"""Background saves: staged copies, watched tensors, waits and errors."""

import gc
import logging

import pytest
import torch

from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.managers import LARGE, Holder, nothing_of, tensor
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager
from torchobj.checkpoint.steps import state_content

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


@pytest.mark.parametrize("save", [CheckpointManager.save, CheckpointManager.save_async])
def test_a_state_that_cannot_be_pickled_raises_and_leaves_nothing(manager, bucket, save):
    with pytest.raises(Exception, match="lambda"):
        save(manager, 1, {"x": tensor(1, LARGE), "bad": lambda: 1})
    assert bucket.keys() == []
    assert bucket.uploads() == []
    manager.save(1, {"x": tensor(1)})


@pytest.mark.providers("s3", "gs")
def test_the_staged_copy_is_made_before_save_async_returns(manager):
    shared = torch.arange(6.0)
    state = {"x": tensor(1), "views": [shared[:3], shared[3:]], "plain": {"list": [1]}, "empty": torch.zeros(0)}
    handle = manager.save_async(1, state)
    state["x"].zero_()
    shared.zero_()
    state["plain"]["list"].append(2)
    handle.result()
    assert (handle.done(), handle.step, handle.exception()) == (True, 1, None)
    there = manager.restore(1)
    assert torch.equal(there["x"], tensor(1))
    assert torch.equal(torch.cat(there["views"]), torch.arange(6.0))
    assert there["views"][0].untyped_storage().data_ptr() == there["views"][1].untyped_storage().data_ptr()
    assert (there["plain"], there["empty"].shape) == ({"list": [1]}, (0,))


def test_a_tensor_that_changes_during_a_save_without_a_copy_prevents_the_commit(manager, bucket, gate):
    model, listed, holder = torch.nn.Linear(2, 2), tensor(2), Holder(tensor(1))
    state = {"model": model, "list": [0, listed], "holder": holder}
    for name, changing in [("model.weight", model.weight), (r"list\.1", listed), ("a tensor", holder.inner)]:
        gate.open.clear()
        gate.reached.clear()
        handle = manager.save_async(1, state, stage=False)
        assert gate.reached.wait(60)
        with torch.no_grad():
            changing.add_(1)
        gate.open.set()
        with pytest.raises(exceptions.CheckpointError, match=f"{name} was changed while"):
            handle.result()
        assert nothing_of(bucket, 1)


def test_a_tensor_that_changes_while_it_is_sent_is_named_if_the_store_refuses_it(manager, bucket, monkeypatch):
    x = tensor(1)

    def refused(*given, **named):
        x.add_(1)
        raise exceptions.IntegrityError("put part: 400 BadDigest")

    monkeypatch.setattr(state_content, "save_counted", refused)
    handle = manager.save_async(1, {"x": x}, stage=False)
    with pytest.raises(exceptions.CheckpointError, match="x was changed while") as caught:
        handle.result()
    assert isinstance(caught.value.__context__, exceptions.IntegrityError)
    assert nothing_of(bucket, 1)


def test_unchanged_tensors_are_saved_without_a_copy(manager, gate):
    x, numbers = tensor(1), [1]
    handle = manager.save_async(1, {"x": x, "numbers": numbers}, stage=False)
    numbers.append(2)
    gate.open.set()
    handle.result()
    assert manager.restore()["numbers"] == [1]
    with torch.inference_mode():
        unwatched = tensor(1)
    with pytest.raises(exceptions.ConfigError, match="inference mode"):
        manager.save_async(2, {"x": unwatched}, stage=False)


def test_one_save_runs_at_a_time_and_the_next_one_waits_or_fails(manager, gate):
    first = manager.save_async(1, {"x": tensor(1)})
    assert gate.reached.wait(60)
    with pytest.raises(exceptions.CheckpointError, match="step 1 is still being saved"):
        manager.save_async(2, {"x": tensor(2)}, when_busy="fail")
    assert not first.done()
    with pytest.raises(TimeoutError):
        first.result(0)
    gate.open.set()
    second = manager.save_async(2, {"x": tensor(2)})
    assert first.done()
    manager.save(3, {"x": tensor(3)})
    assert second.done()
    assert manager.steps() == [1, 2, 3]


@pytest.mark.parametrize("call", [CheckpointManager.wait, CheckpointManager.close])
def test_an_interrupted_wait_keeps_the_save_and_its_memory(manager, gate, monkeypatch, call):
    x = tensor(1, LARGE)
    first = manager.save_async(1, {"x": x})
    assert gate.reached.wait(60)

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(first, "exception", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(manager)
    with pytest.raises(exceptions.CheckpointError, match="step 1 is still being saved|closed"):
        manager.save_async(2, {"x": x.fill_(2)}, when_busy="fail")
    gate.open.set()
    call(manager)
    assert first.done()
    assert torch.equal(manager.restore(1)["x"], tensor(1, LARGE))


def test_an_error_that_was_not_retrieved_is_raised_once_by_the_next_call(open_manager, control, caplog):
    caplog.set_level(logging.CRITICAL, "torchobj")
    fault = {"operation": "PutObject", "key": "steps/", "action": {"status": 403, "code": "AccessDenied"}}
    calls = [
        lambda manager: manager.save(2, {"x": tensor(2)}),
        lambda manager: manager.save_async(2, {"x": tensor(2)}),
        CheckpointManager.wait,
        CheckpointManager.close,
    ]
    for call in calls:
        control.faults(fault)
        manager = open_manager()
        manager.save_async(1, {"x": tensor(1)})
        gc.collect()
        with pytest.raises(exceptions.AccessDeniedError):
            call(manager)
        control.clear_faults()
        manager.wait()
        assert manager.steps() == []
    control.faults(fault)
    with pytest.raises(exceptions.AccessDeniedError), open_manager() as manager:
        manager.save_async(1, {"x": tensor(1)})
    with pytest.raises(ZeroDivisionError), open_manager() as manager:
        manager.save_async(1, {"x": tensor(1)})
        _ = 1 / 0
    with open_manager() as manager:
        handle = manager.save_async(1, {"x": tensor(1)})
        assert isinstance(handle.exception(), exceptions.AccessDeniedError)
    with pytest.raises(exceptions.CheckpointError, match="closed"):
        manager.save(1, {"x": tensor(1)})


def test_the_memory_of_a_staged_copy_is_reused_and_freed_by_close(manager):
    x = torch.rand(LARGE)
    places = []
    for step in range(3):
        manager.save_async(step, {"x": x, "y": torch.rand(5)}).result()
        places.append({block.data_ptr() for block in manager._stager._blocks})
        assert sum(block.nbytes for block in manager._stager._blocks) == x.nbytes
    assert places[0] == places[1] == places[2]
    manager.close()
    assert manager._stager._blocks == []
