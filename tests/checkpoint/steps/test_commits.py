"""Deletes of a step while another process saves it: no new commit is lost between any two requests."""

import itertools

import pytest
import torch

import torchobj
from tests.conftest import strict_bucket
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

_names = itertools.count()


class Between:
    """The store of a manager; calls `act` once, before the request with a number. Can be one that ignores If-Match."""

    def __init__(self, store, number, act, *, ignores=False):
        self._store, self._number, self._act, self._ignores = store, number, act, ignores
        self.requests = []

    def __getattr__(self, name):
        value = getattr(self._store, name)
        if not callable(value):
            return value

        def request(*given, **named):
            self.requests.append((name, *given[:1]))
            if len(self.requests) - 1 == self._number:
                self._act()
            if name == "delete" and self._ignores:
                named.pop("if_version", None)
            return value(*given, **named)

        return request


@pytest.fixture(params=["s3", "gs", "file", "memory"])
def open_manager(request, tmp_path):
    if request.param in ("s3", "gs"):
        bucket = strict_bucket(request.param, request)
        url, config = bucket.url, bucket.config
    else:
        url = {"file": f"file://{tmp_path}", "memory": f"memory://deletes-{next(_names)}"}[request.param]
        config = None
    return lambda **settings: CheckpointManager(f"{url}/run", **({"keep_last": None, "config": config} | settings))


def saved(manager, step):
    return manager.restore(step)["x"][0].item()


def state(value):
    return {"x": torch.full((4,), float(value))}


def requests_of_a_delete(open_manager, ignores):
    manager = open_manager()
    manager.save(1, state(1))
    manager._commits.store = between = Between(manager._commits.store, None, None, ignores=ignores)
    if ignores:
        manager._commits._is_delete_conditional = None
    manager.delete(1)
    assert (open_manager().steps(), open_manager().leftovers()) == ([], [])
    return between.requests


@pytest.mark.parametrize("ignores", [False, True], ids=["If-Match is kept", "If-Match is ignored"])
def test_an_overwrite_between_any_two_requests_of_a_delete_is_not_lost(open_manager, ignores):
    requests = requests_of_a_delete(open_manager, ignores)
    commit = f"run/commits/{1:012}.json".removeprefix(
        "" if open_manager().url.startswith(("s3", "gs", "memory")) else "run/"
    )
    # If If-Match is ignored, nothing protects the time between the last HEAD of the commit object and its DELETE.
    last = max(n for n, request in enumerate(requests) if request == ("delete", commit))
    for number in range(1, len(requests)):
        if ignores and number == last:
            continue
        manager, other = open_manager(), open_manager()
        manager.save(1, state(1), overwrite=True)
        true_store = manager._commits.store
        if ignores:
            manager._commits._is_delete_conditional = None
        overwrite = lambda other=other: other.save(1, state(10), overwrite=True)  # noqa: E731
        manager._commits.store = Between(true_store, number, overwrite, ignores=ignores)
        try:
            manager.delete(1)
        except exceptions.CheckpointError as error:
            assert "saved again" in str(error)  # noqa: PT017  it may be raised, or not
        assert (other.steps(), saved(other, 1)) == ([1], 10.0), (number, requests)
        other.sweep(0)
        assert saved(other, 1) == 10.0
        other.delete(1)


@pytest.mark.providers("s3", "gs")
def test_an_overwrite_that_began_before_a_delete_fails_or_commits(open_manager):
    """The other order: the delete runs between two requests of the overwrite."""
    counting, number = open_manager(), itertools.count()
    for number in itertools.count():
        manager, other = open_manager(), open_manager()
        manager.save(1, state(1), overwrite=True)
        between = Between(manager._commits.store, number, lambda other=other: other.delete(1))
        manager._commits.store = between
        try:
            manager.save(1, state(10), overwrite=True)
            is_saved = True
        except exceptions.CheckpointError as error:
            is_saved = False
            assert "was deleted while" in str(error)  # noqa: PT017  it may be raised, or not
        done = len(between.requests) <= number
        if not done and between.requests[number][0] == "put" and "commits" in between.requests[number][1]:
            assert not is_saved
        # After the commit, the delete deletes the new commit.
        if is_saved and counting.steps():
            assert saved(counting, 1) == 10.0
        assert all(key.startswith(("steps/", "commits/")) for key in (item.key for item in counting.leftovers()))
        if done:
            break
    assert number > 4


def test_a_delete_with_a_lost_response_deletes(bucket, control):
    manager = CheckpointManager(f"{bucket.url}/run", keep_last=None, config=bucket.config)
    for operation in ("DeleteObject", "DeleteObjects"):
        manager.save(1, state(1))
        control.faults({"operation": operation, "times": 1, "action": {"lose_response": True}})
        manager.delete(1)
        control.clear_faults()
        assert (manager.steps(), manager.leftovers()) == ([], [])


@pytest.mark.providers("s3", "gs")
def test_an_invalid_commit_object_is_deleted_only_in_the_version_that_was_read(open_manager):
    manager, other = open_manager(), open_manager()
    store, key = manager._commits.store, manager._commits.key("commits/000000000001.json")
    store.put(key, b"no json")
    manager._commits.store = Between(store, 2, lambda: other.save(1, state(10), overwrite=True))
    with pytest.raises(exceptions.CheckpointError, match="step 1 was saved again, and was not deleted"):
        manager.delete(1)
    assert saved(other, 1) == 10.0
    manager._commits.store = store
    store.put(key, b"no json")
    manager.delete(1)
    assert manager.steps() == []


def test_an_interrupted_delete_leaves_no_step_and_is_swept_or_overwritten(open_manager):
    manager = open_manager()
    store, key = manager._commits.store, manager._commits.key("commits/000000000001.json")
    for step in (1, 2):
        manager.save(step, state(step))
    store.put(key, b"", if_version=store.head(key).version)
    assert (manager.steps(), manager.latest()) == ([2], 2)
    with pytest.raises(exceptions.CheckpointError, match="step 1 is not committed"):
        manager.restore(1)
    assert {item.step for item in manager.leftovers()} == {1}
    assert f"commits/{1:012}.json" in {item.key for item in manager.sweep(0)}
    assert manager.leftovers() == []
    store.put(key, b"")
    manager.save(1, state(10))
    assert (saved(manager, 1), manager.leftovers()) == (10.0, [])


def test_a_file_store_removes_the_folder_of_a_deleted_step(tmp_path):
    notes = tmp_path / "run" / "steps" / "of the user"
    notes.mkdir(parents=True)
    manager = CheckpointManager(f"file://{tmp_path}/run", keep_last=1)
    for step in range(1, 4):
        manager.save(step, state(step))
    assert len(list((tmp_path / "run" / "steps").iterdir())) == 2
    manager.delete(3)
    manager.sweep(0)
    assert list((tmp_path / "run" / "steps").iterdir()) == [notes]


@pytest.mark.providers("s3", "gs")
def test_a_conditional_delete_takes_one_key(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    old, new = store.put("k", b"one"), store.put("k", b"two")
    with pytest.raises(exceptions.PreconditionFailedError):
        store.delete("k", if_version=old)
    with pytest.raises(exceptions.ConfigError, match="requires a single key"):
        store.delete(["k", "j"], if_version=new)
    assert bucket.keys() == ["k"]
    store.delete("k", if_version=new)
    store.delete("k", if_version=new)
    assert bucket.keys() == []
