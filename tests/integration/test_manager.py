"""Steps that are committed whole or not at all, whatever the store, another writer or the trainer does meanwhile."""

import dataclasses
import gc
import json
import logging
import random
import subprocess
import sys
import threading

import numpy
import pytest
import torch

import torchobj
from tests.settings import with_profile
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager, RngState, saving

#: So large that it is sent in parts.
LARGE = 3_000_000
BODIES = ("steps/", "commits/")


@pytest.fixture
def config(place):
    return dataclasses.replace(place.config, part_bytes=5 << 20, whole_below_bytes=5 << 20)


@pytest.fixture
def open_manager(place, config):
    def opened(**settings):
        return CheckpointManager(f"{place.url}/run", **({"config": config} | settings))

    return opened


@pytest.fixture
def manager(open_manager):
    return open_manager()


def tensor(value, size=4):
    return torch.full((size,), float(value))


def saved_value(manager, step="latest"):
    return manager.restore(step)["x"][0].item()


def data_keys(place, step=None):
    folder = "run/steps/" if step is None else f"run/steps/{step:012}-"
    return [key for key in place.keys() if key.startswith(folder)]


def nothing_of(place, step):
    """No object, no upload and no commit of a step."""
    return data_keys(place, step) == [] and place.uploads() == [] and f"run/commits/{step:012}.json" not in place.keys()


def training(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    model[1].weight = torch.nn.Parameter(torch.rand(1, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(40, 1).repeat(1, 4))
    sampler = torchobj.ElasticDistributedSampler(data, num_replicas=1, rank=0, seed=3)
    loader = torchobj.DataLoader(data, batch_size=4, sampler=sampler)
    return {"nets": {"model": model, "optimizer": optimizer}, "loader": loader, "rng": RngState(), "epoch": 0}


def train(state, batches, steps):
    model, optimizer = state["nets"]["model"], state["nets"]["optimizer"]
    losses = []
    for _ in range(steps):
        [batch] = next(batches)
        noise = torch.rand(1) + random.random() + numpy.random.rand()  # noqa: NPY002
        loss = (model(batch) * noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_one_commit_holds_what_training_needs_to_go_on_as_if_nothing_was(any_place):
    manager = CheckpointManager(f"{any_place.url}/run", config=any_place.config)
    state = training(1)
    batches = iter(state["loader"])
    train(state, batches, 3)
    manager.save(3, state)
    went_on = train(state, batches, 4)
    other = training(2)
    assert manager.restore(into=other) is other
    assert train(other, iter(other["loader"]), 4) == went_on
    manager.save(4, state)
    manager.save(4, state, overwrite=True)
    manager.delete(3)
    assert (manager.steps(), manager.leftovers()) == ([4], [])
    assert len(any_place.keys()) == 3


def test_folders_and_memory_keep_checkpoints_too(tmp_path):
    for url in (f"file://{tmp_path}/not/there/yet", "memory://manager", "memory://manager/deeper/"):
        manager = CheckpointManager(url, keep_last=1)
        assert (manager.latest(), manager.steps(), manager.leftovers(), manager.sweep(0)) == (None, [], [], [])
        for step in (1, 2, 2):
            manager.save(step, {"x": tensor(step)}, overwrite=True)
        assert (manager.steps(), saved_value(manager)) == ([2], 2.0)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3


def test_a_key_is_as_raw_as_anywhere(place, config):
    manager = CheckpointManager(f"{place.url}//a b//run/", config=config)
    manager.save(1, {"x": tensor(1)})
    assert saved_value(manager) == 1.0
    assert {key.rsplit("/", 1)[0] for key in place.keys()} >= {"/a b//run", "/a b//run/commits"}


def test_a_process_that_ends_waits_for_its_save_and_says_so(tmp_path):
    script = (
        "import logging, sys, threading, torch, torchobj.checkpoint as c\n"
        "from torchobj.checkpoint import saving\n"
        "said, save = threading.Event(), saving.save\n"
        "logging.getLogger('torchobj').addFilter(lambda record: said.set() or True)\n"
        "saving.save = lambda *given, **named: (said.wait(30), save(*given, **named))\n"
        "c.CheckpointManager(sys.argv[1]).save_async(1, {'x': torch.ones(5_000_000)})\n"
    )
    command = [sys.executable, "-c", script, f"file://{tmp_path}"]
    ended = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert "the process ends when step 1 is saved" in ended.stderr
    assert saved_value(CheckpointManager(f"file://{tmp_path}")) == 1.0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_saves_a_sharded_state_too(place, config, tmp_path):
    for url in (f"{place.url}/run", f"file://{tmp_path}/run", "memory://sharded/run"):
        manager = CheckpointManager(url, 1, sharded=True, config=config)
        model, nested = torch.nn.Linear(3, 2), {"deep": {"y": tensor(2)}}
        weight = model.weight.detach().clone()
        for step in (1, 2):
            manager.save(step, {"model": model, "nested": nested, "step": step})
        manager.save_async(3, {"model": model, "nested": nested, "step": 3}).result()
        into = {"model": torch.nn.Linear(3, 2), "nested": {"deep": {"y": torch.zeros(4)}}, "step": 0}
        there = into["nested"]["deep"]["y"]
        manager.restore(into=into)
        assert torch.equal(into["model"].weight, weight)
        assert (there.tolist(), into["step"], manager.steps(), manager.leftovers()) == ([2.0] * 4, 3, [3], [])


def test_the_latest_step_is_one_listing(manager, control):
    for step in (5, 1, 30):
        manager.save(step, {"x": tensor(step)})
    control.forget_requests()
    assert manager.latest() == 30
    assert [request.operation for request in control.requests()] == ["ListObjectsV2"]


def test_a_pointer_tells_other_tools_the_newest_step_and_is_not_believed(manager, place):
    manager.save(1, {"x": tensor(1)})
    manager.save(2, {"x": tensor(2)})
    assert json.loads(place.body("run/latest.json")) == {"step": 2, "commit": "run/commits/000000000002.json"}
    place.boto.put_object(Bucket=place.bucket, Key="run/latest.json", Body=b'{"step": 9}')
    assert manager.latest() == 2
    manager.delete(2)
    assert json.loads(place.body("run/latest.json"))["step"] == 1
    manager.delete(1)
    assert place.keys() == []


def test_data_without_a_commit_is_no_step_whatever_it_holds(manager, place):
    manager.save(1, {"x": tensor(1)})
    [key] = data_keys(place, 1)
    left = f"run/steps/{7:012}-{'ab' * 16}/state.pt"
    place.boto.put_object(Bucket=place.bucket, Key=left, Body=place.body(key))
    assert (manager.latest(), manager.steps(), saved_value(manager)) == (1, [1], 1.0)
    with pytest.raises(exceptions.CheckpointError, match=r"step 7 is not committed; there are \[1\]"):
        manager.restore(7)
    assert [item.key for item in manager.leftovers()] == [left.removeprefix("run/")]


@pytest.mark.parametrize("attempts", [1, 10], ids=["no retry", "a retry that is told 412"])
def test_a_commit_whose_answer_was_lost_is_a_commit(open_manager, place, config, control, attempts):
    manager = open_manager(config=dataclasses.replace(config, max_attempts=attempts))
    control.faults({"operation": "PutObject", "key": "commits/", "times": 1, "action": {"lose_response": True}})
    manager.save(1, {"x": tensor(1)})
    assert control.fault_report()[0]["fired"] == 1
    assert (manager.steps(), saved_value(manager), manager.leftovers()) == ([1], 1.0, [])


def test_a_commit_that_cannot_be_looked_for_keeps_its_data_and_says_so(open_manager, place, config, control):
    manager = open_manager(config=dataclasses.replace(config, max_attempts=1))
    control.faults(
        {"operation": "PutObject", "key": "commits/", "action": {"lose_response": True}},
        {"operation": "GetObject", "action": {"status": 500}},
    )
    with pytest.raises(exceptions.StoreError) as caught:
        manager.save(1, {"x": tensor(1)})
    assert "whether step 1 was committed is not known" in caught.value.__notes__[0]
    control.clear_faults()
    assert (manager.steps(), saved_value(manager)) == ([1], 1.0)


class SavedMeanwhile:
    """Another writer commits the same step while this one gives its state."""

    def __init__(self, other, step):
        self.other, self.step = other, step

    def state_dict(self):
        self.other.save(self.step, {"x": tensor(100)}, overwrite=True)
        return {}

    def load_state_dict(self, state):
        raise AssertionError("nobody restores this")


@pytest.mark.parametrize("exists", [False, True], ids=["new step", "overwritten step"])
def test_of_two_writers_of_one_step_the_second_is_told_and_leaves_nothing(open_manager, place, exists):
    mine, other = open_manager(), open_manager()
    if exists:
        mine.save(5, {"x": tensor(0)})
    with pytest.raises(exceptions.CheckpointError, match="step 5 was committed by another writer"):
        mine.save(5, {"x": tensor(1, LARGE), "race": SavedMeanwhile(other, 5)}, overwrite=exists)
    assert (mine.steps(), saved_value(mine), mine.leftovers()) == ([5], 100.0, [])
    assert len(data_keys(place)) == 1
    assert place.uploads() == []


def test_of_many_writers_of_one_step_exactly_one_wins(open_manager):
    managers = [open_manager() for _ in range(6)]
    start, outcomes = threading.Barrier(len(managers)), {}

    def save(number):
        start.wait()
        try:
            managers[number].save(1, {"x": tensor(number)})
            outcomes[number] = None
        except exceptions.CheckpointError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=save, args=(number,)) for number in range(len(managers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = [number for number, error in outcomes.items() if error is None]
    assert len(outcomes) == len(managers)
    assert saved_value(managers[0]) == winner
    assert managers[0].leftovers() == []


def test_a_step_is_replaced_only_where_that_is_asked_for_and_by_what_is_whole(manager, place, control):
    manager.save(1, {"x": tensor(1)})
    with pytest.raises(exceptions.CheckpointError, match="step 1 is committed already; overwrite=True"):
        manager.save(1, {"x": tensor(2)})
    control.faults({"operation": "PutObject", "key": "steps/", "action": {"status": 403, "code": "AccessDenied"}})
    with pytest.raises(exceptions.AccessDeniedError):
        manager.save(1, {"x": tensor(3)}, overwrite=True)
    control.clear_faults()
    assert saved_value(manager) == 1.0
    manager.save(1, {"x": tensor(4)}, overwrite=True)
    assert saved_value(manager) == 4.0
    assert len(data_keys(place)) == 1


@pytest.mark.parametrize("size", [4, LARGE], ids=["one request", "parts"])
@pytest.mark.parametrize("body", BODIES)
def test_the_error_of_a_read_only_bucket_is_its_own_and_the_last_step_stays(manager, place, control, size, body):
    manager.save(1, {"x": tensor(1)})
    operations = ("PutObject", "UploadPart", "CompleteMultipartUpload")
    control.faults(
        *({"operation": name, "key": body, "action": {"status": 403, "code": "AccessDenied"}} for name in operations)
    )
    with pytest.raises(exceptions.AccessDeniedError):
        manager.save(2, {"x": tensor(2, size)})
    control.clear_faults()
    assert (manager.latest(), saved_value(manager)) == (1, 1.0)
    assert nothing_of(place, 2)


def test_requests_that_are_refused_now_and_then_harm_no_save(manager, place, control):
    control.faults({"probability": 0.1, "seed": 4, "action": {"status": 503, "code": "SlowDown"}})
    for step in range(6):
        manager.save(step, {"x": tensor(step, LARGE)})
    assert control.fault_report()[0]["fired"] > 3
    control.clear_faults()
    assert (manager.steps(), saved_value(manager)) == ([3, 4, 5], 5.0)
    assert (manager.leftovers(), place.uploads()) == ([], [])


def test_credentials_that_end_between_data_and_commit_are_an_error_and_no_step(
    open_manager, place, config, control, tmp_path, monkeypatch
):
    looked = open_manager()
    looked.save(1, {"x": tensor(1)})
    script, aws = tmp_path / "credentials.json", tmp_path / "config"
    aws.write_text(f"[profile ending]\ncredential_process = cat {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(aws))
    names = {"AccessKeyId": "AKIAENDING", "SecretAccessKey": "S" * 20, "SessionToken": "token"}
    script.write_text(json.dumps({"Version": 1, **names}))
    control.account("AKIAENDING", "S" * 20, token="token", expires_in_s=600)
    manager = open_manager(config=with_profile(config, "ending", max_attempts=2))
    real = saving.save

    def save_until_they_end(*given, **named):
        real(*given, **named)
        control.account("AKIAENDING", "S" * 20, token="token", expires_in_s=-1)

    monkeypatch.setattr(saving, "save", save_until_they_end)
    with pytest.raises(exceptions.CredentialsError):
        manager.save(2, {"x": tensor(2, LARGE)})
    control.forget_accounts()
    assert (looked.steps(), saved_value(looked), place.uploads()) == ([1], 1.0, [])
    assert [item.step for item in looked.sweep(0)] == [2]
    assert looked.leftovers() == []


@pytest.mark.parametrize("save", [CheckpointManager.save, CheckpointManager.save_async])
def test_what_cannot_be_pickled_is_its_own_error_and_leaves_nothing(manager, place, save):
    with pytest.raises(Exception, match="lambda"):
        save(manager, 1, {"x": tensor(1, LARGE), "bad": lambda: 1})
    assert place.keys() == []
    assert place.uploads() == []
    manager.save(1, {"x": tensor(1)})


def test_a_copy_is_made_before_the_background_begins(manager):
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


class Gate:
    """Holds the writing of data until it is opened."""

    def __init__(self, monkeypatch):
        self.open, self.reached = threading.Event(), threading.Event()
        real = saving.save

        def save(*given, **named):
            self.reached.set()
            assert self.open.wait(60)
            return real(*given, **named)

        monkeypatch.setattr(saving, "save", save)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


class Holder:
    """Something of the user's with a tensor inside."""

    def __init__(self, value):
        self.inner = value


def test_a_tensor_that_changes_while_it_is_saved_where_it_is_stops_the_commit(manager, place, gate):
    model, listed, holder = torch.nn.Linear(2, 2), tensor(2), Holder(tensor(1))
    state = {"model": model, "list": [0, listed], "holder": holder}
    for name, changing in [("model.weight", model.weight), (r"list\[1\]", listed), ("a tensor", holder.inner)]:
        gate.open.clear()
        gate.reached.clear()
        handle = manager.save_async(1, state, stage=False)
        assert gate.reached.wait(60)
        with torch.no_grad():
            changing.add_(1)
        gate.open.set()
        with pytest.raises(exceptions.CheckpointError, match=f"{name} was changed while"):
            handle.result()
        assert nothing_of(place, 1)


def test_a_tensor_that_changes_while_it_is_sent_is_named_where_the_store_refuses_it(manager, place, monkeypatch):
    x = tensor(1)

    def refused(*given, **named):
        x.add_(1)
        raise exceptions.IntegrityError("put part: 400 BadDigest")

    monkeypatch.setattr(saving, "save", refused)
    handle = manager.save_async(1, {"x": x}, stage=False)
    with pytest.raises(exceptions.CheckpointError, match="x was changed while") as caught:
        handle.result()
    assert isinstance(caught.value.__context__, exceptions.IntegrityError)
    assert nothing_of(place, 1)


def test_what_does_not_change_is_saved_from_where_it_is(manager, gate):
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


def test_one_save_at_a_time_is_under_way_and_the_next_waits_or_fails(manager, gate):
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
def test_an_interrupted_wait_forgets_no_save_and_gives_its_memory_to_no_other(manager, gate, monkeypatch, call):
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


def test_an_error_that_nobody_asked_for_is_raised_by_the_next_call_once(open_manager, control, caplog):
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


def test_the_memory_of_a_snapshot_is_used_again_and_given_back_at_the_end(manager):
    x = torch.rand(LARGE)
    places = []
    for step in range(3):
        manager.save_async(step, {"x": x, "y": torch.rand(5)}).result()
        places.append({room.data_ptr() for room in manager._snapshots._rooms})
        assert sum(room.nbytes for room in manager._snapshots._rooms) == x.nbytes
    assert places[0] == places[1] == places[2]
    manager.close()
    assert manager._snapshots._rooms == []


def test_rules_keep_the_newest_the_multiples_and_the_best_and_count_no_failed_save(open_manager, place, control):
    manager = open_manager(keep_last=2, keep_every=10, keep_best=("loss", "min", 1))
    for step, loss in ((10, 5.0), (12, 1.0), (14, 3.0), (16, 4.0)):
        manager.save(step, {"x": tensor(step)}, {"loss": loss})
    control.faults({"operation": "PutObject", "key": "commits/", "action": {"status": 403, "code": "AccessDenied"}})
    for step in (18, 20, 22):
        with pytest.raises(exceptions.AccessDeniedError):
            manager.save(step, {"x": tensor(step)}, {"loss": 0.0})
    control.clear_faults()
    assert manager.steps() == [10, 12, 14, 16]
    manager.save(24, {"x": tensor(24)}, {"loss": float("nan")})
    assert manager.steps() == [10, 12, 16, 24]
    assert [saved_value(manager, step) for step in manager.steps()] == [10, 12, 16, 24]
    # A step behind the newest is the last that was saved all the same.
    manager.save(2, {"x": tensor(2)})
    assert manager.steps() == [2, 10, 12, 16, 24]
    assert len(data_keys(place)) == 5


def test_who_goes_back_keeps_what_is_saved_then_and_is_told_what_stays_the_latest(open_manager, caplog):
    manager = open_manager(keep_last=2)
    for step in (100, 200, 300, 110, 120, 130):
        manager.save(step, {"x": tensor(step)})
    assert (manager.steps(), manager.latest()) == ([120, 130, 200, 300], 300)
    assert (
        "step 130 is saved, but 300 stays the latest: if it was given up, delete(step) each of [200, 300]"
        in caplog.text
    )
    manager.delete(200)
    manager.delete(300)
    caplog.clear()
    manager.save(140, {"x": tensor(140)})
    assert (manager.steps(), caplog.text) == ([130, 140], "")


def test_the_log_says_what_was_deleted(open_manager, caplog):
    manager = open_manager(keep_last=1)
    with caplog.at_level(logging.INFO, "torchobj"):
        manager.save(1, {"x": tensor(1)})
        manager.save(2, {"x": tensor(2)})
    assert "deleted step 1: no rule keeps it" in caplog.text


def test_the_best_step_and_its_metrics_can_be_asked_for(open_manager, caplog):
    manager, infinite = open_manager(keep_last=3, keep_best=("loss", "min", 1)), float("inf")
    assert manager.best() is None
    for step, loss in ((1, 2.0), (2, -infinite), (3, infinite), (4, float("nan"))):
        manager.save(step, {"x": tensor(step)}, {"loss": loss})
    assert caplog.text == ""
    manager.save(5, {"x": tensor(5)}, {"los": 1})
    manager.save(6, {"x": tensor(6)})
    assert caplog.text.count("without the metric 'loss' that keep_best goes by") == 1
    again = open_manager(keep_best=("loss", "min", 1))
    assert (again.best(), again.steps(), again.metrics(2)) == (2, [2, 4, 5, 6], {"loss": -infinite})
    assert open_manager(keep_best=("loss", "max", 1)).best() == 2
    with pytest.raises(exceptions.ConfigError, match="keep_best=None"):
        open_manager().best()
    with pytest.raises(exceptions.CheckpointError, match="step 3 is not committed"):
        again.metrics(3)


def test_a_bucket_that_is_not_there_is_no_run_without_checkpoints(place, config):
    manager = CheckpointManager(f"{place.url}-misspelt/run", config=config)
    asked = [manager.latest, manager.steps, manager.restore, manager.leftovers, lambda: manager.save(1, {})]
    for ask in asked:
        with pytest.raises(exceptions.BucketNotFoundError):
            ask()


def test_a_step_that_another_saves_anew_is_not_deleted_by_a_rule(open_manager, monkeypatch):
    mine, other = open_manager(keep_last=1), open_manager(keep_last=None)
    mine.save(1, {"x": tensor(1)})
    real = saving.doomed

    def meanwhile(*given):
        monkeypatch.setattr(saving, "doomed", real)
        other.save(1, {"x": tensor(10)}, overwrite=True)
        return real(*given)

    monkeypatch.setattr(saving, "doomed", meanwhile)
    mine.save(2, {"x": tensor(2)})
    assert mine.steps() == [1, 2]
    assert (saved_value(mine, 1), mine.leftovers()) == (10.0, [])


def test_a_refused_commit_leaves_no_data(manager, place, control):
    control.faults({"operation": "PutObject", "key": "commits/", "action": {"status": 403, "code": "AccessDenied"}})
    with pytest.raises(exceptions.AccessDeniedError):
        manager.save(1, {"x": tensor(1)})
    assert place.keys() == []


def test_an_upload_that_is_gone_is_said_to_have_been_swept(manager, control):
    control.faults({"operation": "UploadPart", "action": {"status": 404, "code": "NoSuchUpload"}})
    with pytest.raises(exceptions.StoreError) as caught:
        manager.save(1, {"x": tensor(1, LARGE)})
    assert "did another process sweep" in caught.value.__notes__[0]


def test_a_failure_in_the_background_is_one_line_of_the_log(manager, control, caplog):
    control.faults({"operation": "PutObject", "key": "steps/", "action": {"status": 403, "code": "AccessDenied"}})
    with caplog.at_level(logging.INFO, "torchobj"):
        assert manager.save_async(1, {"x": tensor(1)}).exception() is not None
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage().startswith("step 1 was not saved: AccessDeniedError: put ")
    assert record.exc_info is None


def test_what_cannot_be_deleted_fails_no_save_and_is_deleted_with_the_next(open_manager, control, caplog):
    manager = open_manager(keep_last=1)
    manager.save(1, {"x": tensor(1)})
    control.faults(
        {"operation": "DeleteObjects", "action": {"status": 403, "code": "AccessDenied"}},
        {"operation": "DeleteObject", "action": {"status": 403, "code": "AccessDenied"}},
    )
    manager.save(2, {"x": tensor(2)})
    manager.save(3, {"x": tensor(3)})
    assert "step 2 is saved, but older ones were not cleared" in caplog.text
    assert caplog.text.count("grant s3:DeleteObject") == 1
    control.clear_faults()
    assert manager.steps() == [1, 2, 3]
    manager.save(4, {"x": tensor(4)})
    assert manager.steps() == [4]


def test_a_commit_object_that_cannot_be_read_is_not_counted_and_nobodys_to_delete(open_manager, place, caplog):
    manager = open_manager(keep_last=1)
    manager.save(1, {"x": tensor(1)})
    good = json.loads(place.body("run/commits/000000000001.json"))
    stranger = "run/keep/me"
    place.boto.put_object(Bucket=place.bucket, Key=stranger, Body=b"x")
    broken = {
        90: b"no json",
        91: json.dumps(good | {"version": 2}).encode(),
        92: json.dumps(good | {"step": 92, "objects": [{"key": "keep/me", "size": 1}]}).encode(),
        93: json.dumps(good).encode(),
        94: b"[]",
    }
    for step, body in broken.items():
        place.boto.put_object(Bucket=place.bucket, Key=f"run/commits/{step:012}.json", Body=body)
        with pytest.raises(exceptions.CheckpointError, match=rf"no commit object of a checkpoint.*delete\({step}\)"):
            manager.restore(step)
    assert manager.restore(1)["x"][0] == 1
    manager.save(2, {"x": tensor(2)})
    manager.sweep(0)
    assert manager.steps() == [2, *broken]
    assert stranger in place.keys()
    assert "version 2, this torchobj knows 1" in caplog.text
    with pytest.raises(exceptions.CheckpointError, match="000000000094.json: no commit object"):
        manager.restore()
    manager.delete(94)
    manager.save(93, {"x": tensor(93)}, overwrite=True)
    assert (manager.steps(), saved_value(manager)) == ([90, 91, 92, 93], 93.0)
    assert stranger in place.keys()


def test_a_sweep_takes_what_is_old_and_without_a_commit_and_nothing_else(manager, place, control, gate):
    gate.open.set()
    manager.save(1, {"x": tensor(1)})
    dead, foreign = f"run/steps/{4:012}-{'0f' * 16}", ["run/steps/mine", "run/steps/000000000004-notes/x", "elsewhere"]
    for key in (f"{dead}/state.pt", f"{dead}/more/deep.bin", *foreign):
        place.boto.put_object(Bucket=place.bucket, Key=key, Body=b"x")
    for key in (f"{dead}/second.pt", "run/other"):
        place.boto.create_multipart_upload(Bucket=place.bucket, Key=key)
    assert {(item.key, item.size, item.step) for item in manager.leftovers()} == {
        (f"{dead}/state.pt".removeprefix("run/"), 1, 4),
        (f"{dead}/more/deep.bin".removeprefix("run/"), 1, 4),
        (f"{dead}/second.pt".removeprefix("run/"), None, 4),
    }
    assert manager.sweep() == []
    # The server's clock goes, but no further than signatures bear.
    control.clock(200)
    torchobj.Store(place.url, config=place.config).put(f"{dead}/state.pt", b"written again")
    control.clock(400)
    # An attempt is as old as the last that it wrote.
    assert manager.sweep(300) == []
    gate.open.clear()
    gate.reached.clear()
    handle = manager.save_async(9, {"x": tensor(9)})
    assert gate.reached.wait(60)
    control.clock(700)
    assert len(manager.sweep(300)) == 3
    control.clock(0)
    gate.open.set()
    handle.result()
    assert manager.leftovers() == []
    assert set(foreign) < set(place.keys())
    assert [upload["Key"] for upload in place.uploads()] == ["run/other"]
    assert [saved_value(manager, step) for step in manager.steps()] == [1, 9]
    with pytest.raises(exceptions.ConfigError, match="older_than_s"):
        manager.sweep(-1)


def test_data_that_somebody_sweeps_before_the_commit_is_no_step(manager, open_manager, place, monkeypatch):
    real = saving.save

    def save_and_lose(state, url, **named):
        real(state, url, **named)
        place.boto.delete_object(Bucket=place.bucket, Key=url.removeprefix(f"{place.url}/"))

    monkeypatch.setattr(saving, "save", save_and_lose)
    with pytest.raises(exceptions.CheckpointError, match=r"state.pt is gone; did another process sweep\?"):
        manager.save(1, {"x": tensor(1)})
    assert place.keys() == []


def test_a_server_without_conditions_is_said_and_looked_at_instead(manager, place, control, caplog):
    control.faults({"operation": "PutObject", "key": "commits/", "times": 1, "action": {"status": 501}})
    manager.save(1, {"x": tensor(1)})
    assert "keeps no conditions on writes" in caplog.text
    assert saved_value(manager) == 1.0


def test_what_does_not_fit_is_named_before_anything_is_overwritten(manager):
    model = torch.nn.Linear(2, 2)
    manager.save(1, {"x": tensor(1), "deep": {"y": tensor(2)}, "model": model, "step": 1})
    for wrong, named in [
        ({"deep": {"y": torch.zeros(5)}}, r"deep.y is \(4,\) torch.float32 there, and \(5,\) torch.float32 here"),
        ({"deep": {"y": torch.zeros(4, dtype=torch.int32)}}, "deep.y is .* torch.int32 here"),
        ({"deep": torch.zeros(4)}, "deep is a dict there, and a tensor here"),
        ({"step": {"a": 1}}, "step is a int there, and a dict here"),
        ({"deep": {"z": 1}}, "has no deep.z; it has y"),
        ({"model": torch.nn.Linear(3, 2)}, r"model.weight is \(2, 2\) there, and \(2, 3\) here"),
        ({"model": torch.nn.Linear(2, 2, bias=False)}, r"another module: missing \[\], unknown \['bias'\]"),
    ]:
        into = {"x": torch.zeros(4), **wrong}
        with pytest.raises(exceptions.CheckpointError, match=named):
            manager.restore(into=into)
        assert torch.equal(into["x"], torch.zeros(4))
    with pytest.raises((exceptions.CheckpointError, exceptions.ConfigError), match="nothing_there"):
        manager.restore(into={"x": torch.zeros(4), "nothing_there": 1})
    some = {"x": torch.zeros(4)}
    there = some["x"]
    assert manager.restore(into=some) is some
    assert some["x"] is there
    assert torch.equal(there, tensor(1))


def test_bad_input_is_a_typed_error_before_anything_is_written(manager, place):
    state = {"x": tensor(1)}
    for call, named in [
        (lambda: CheckpointManager("ftp://x/y"), "scheme 'ftp'"),
        (lambda: CheckpointManager("/a/path"), "not a URL"),
        (lambda: CheckpointManager("s3://"), "no bucket"),
        (lambda: manager.save(-1, state), "step=-1"),
        (lambda: manager.save(True, state), "step=True"),
        (lambda: manager.save(10**12, state), "step=1000000000000"),
        (lambda: manager.save("1", state), "step='1'"),
        (lambda: manager.save(1.0, state), "step=1.0"),
        (lambda: manager.save(1, [1]), "state is a list"),
        (lambda: manager.save(1, state, {"loss": "low"}), "metrics="),
        (lambda: manager.save(1, state, [1]), "metrics="),
        (lambda: manager.save_async(1, state, when_busy="later"), "when_busy='later'"),
        (lambda: manager.restore("newest"), "step='newest'"),
        (lambda: manager.restore("latest"), "no step is committed"),
        (lambda: manager.delete(1), "step 1 is not committed"),
    ]:
        with pytest.raises((exceptions.ConfigError, exceptions.CheckpointError), match=named):
            call()
    assert place.keys() == []


def test_a_step_is_whatever_counts(manager):
    manager.save(numpy.int64(3), {"x": tensor(3)})
    handle = manager.save_async(torch.tensor(4), {"x": tensor(4)})
    handle.result()
    assert saved_value(manager, numpy.uint8(3)) == 3.0
    assert (handle.step, manager.steps()) == (4, [3, 4])


def test_what_is_no_plain_data_is_refused_unless_asked_for(manager):
    manager.save(1, {"x": tensor(1), "holder": Holder(3)})
    with pytest.raises(Exception, match="Holder"):
        manager.restore()
    assert manager.restore(weights_only=False)["holder"].inner == 3
