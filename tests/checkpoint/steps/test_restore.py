"""A restore is complete, or raises before anything is changed; it runs no code of the checkpoint."""

import collections
import copy
import datetime
import pathlib
import re

import numpy
import pytest
import torch

from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.managers import of_ranks, outcome, whole_and_shard
from tests.support.ranks import run_ranks
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.providers("s3", GCS_IN_MATRIX),
]

BOTH = pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])


@pytest.fixture
def open_manager(tmp_path):
    return lambda **settings: CheckpointManager(f"file://{tmp_path}/run", **settings)


def stepped(kind=torch.optim.AdamW, features=2):
    model = torch.nn.Linear(features, 2)
    optimizer = kind(model.parameters(), lr=0.5)
    for _ in range(3):
        model(torch.rand(features)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def fresh(kind=torch.optim.AdamW, features=2):
    model = torch.nn.Linear(features, 2)
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.1)}


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def same_states(one, other):
    return all(same(dict(one[name].state_dict()), dict(other[name].state_dict())) for name in one)


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@BOTH
@pytest.mark.parametrize("nested", [False, True], ids=["top", "nested"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.ASGD])
def test_an_optimizer_without_a_state_restores_the_saved_moments(open_manager, sharded, nested, kind):
    manager, state, into = open_manager(sharded=sharded), stepped(kind), fresh(kind)
    manager.save(1, {"nets": state} if nested else state)
    manager.restore(into={"nets": into} if nested else into)
    assert same_states(state, into)
    assert len(into["optimizer"].state) == len(state["optimizer"].state)


@BOTH
def test_an_optimizer_with_a_state_drops_moments_that_were_not_saved(open_manager, sharded):
    manager, state, into = open_manager(sharded=sharded), fresh(), stepped()
    manager.save(1, state)
    manager.restore(into=into)
    assert same_states(state, into)


class Counts:
    """An object whose state has keys other than strings."""

    def __init__(self, counts):
        self.counts = counts

    def state_dict(self):
        return {"counts": self.counts}

    def load_state_dict(self, state):
        self.counts = state["counts"]


@BOTH
def test_integer_keys_remain_integers(open_manager, sharded):
    manager, into = open_manager(sharded=sharded), {"counts": Counts({30: 0, 80: 0})}
    manager.save(1, {"counts": Counts({30: 1, 80: 2})})
    manager.restore(into=into)
    assert into["counts"].counts == {30: 1, 80: 2}


@BOTH
def test_unknown_entries_below_a_name_raise(open_manager, sharded):
    manager = open_manager(sharded=sharded)
    large = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    state = {"model": large, "counts": {"a": 1, "b": 2}, "optimizer": stepped()["optimizer"].state_dict()}
    manager.save(1, state)
    for into, named in [
        ({"model": torch.nn.Sequential(torch.nn.Linear(2, 2))}, r"1\.bias"),
        ({"counts": {"a": 0}}, r"counts\.b"),
        ({"optimizer": fresh()["optimizer"].state_dict()}, r"optimizer\.state\.0"),
    ]:
        with pytest.raises(exceptions.CheckpointError, match=rf"run, step 1: .*{named}"):
            manager.restore(into=into)
    assert manager.restore(into={"counts": {"a": 0, "b": 0}}) == {"counts": {"a": 1, "b": 2}}


@BOTH
def test_code_of_a_checkpoint_is_not_run_by_default(open_manager, tmp_path, sharded):
    manager, into = open_manager(sharded=sharded), {"x": torch.zeros(2), "odd": 0}
    manager.save(1, {"x": torch.ones(2), "odd": Runs(tmp_path / "ran")})
    with pytest.raises(exceptions.CheckpointError, match="weights_only=False"):
        manager.restore(into=into)
    assert not (tmp_path / "ran").exists()
    assert into["x"].tolist() == [0, 0]
    manager.restore(into=into, weights_only=False)
    assert (tmp_path / "ran").exists()
    assert into["x"].tolist() == [1, 1]


@BOTH
def test_a_manager_with_another_sharded_argument_is_refused(open_manager, sharded):
    open_manager(sharded=sharded).save(1, {"x": torch.ones(2)})
    with pytest.raises(exceptions.CheckpointError, match=f"step 1: saved with sharded={sharded}"):
        open_manager(sharded=not sharded).restore(into={"x": torch.zeros(2)})


@BOTH
def test_a_refused_restore_changes_nothing(open_manager, sharded):
    manager = open_manager(sharded=sharded)
    manager.save(1, stepped() | {"x": torch.ones(3), "step": 3})
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    for wrong, named in [
        ({"optimizer": other}, "optimizer"),
        ({"x": torch.zeros(4)}, r"x: torch.float32 of shape \(4,\) here, torch.float32 of shape \(3,\) in"),
        ({"x": torch.zeros(3, dtype=torch.int64)}, r"x: torch.int64 of shape \(3,\) here, "),
        ({"stepp": 0}, "stepp: not in the checkpoint, which has .*step"),
        ({"step": torch.zeros(1)}, "step: Tensor here, "),
    ]:
        into = fresh() | wrong
        weight = into["model"].weight.detach().clone()
        with pytest.raises(exceptions.CheckpointError, match=rf"run, step 1: .*{named}"):
            manager.restore(into=into)
        assert torch.equal(into["model"].weight, weight)
        assert not fresh()["optimizer"].state


@BOTH
def test_invalid_arguments_are_named(open_manager, sharded):
    manager, model = open_manager(sharded=sharded), torch.nn.Linear(2, 2)
    manager.save(1, {"model": model})
    for call, named in [
        (lambda: manager.restore({"model": model}), "into="),
        (lambda: manager.restore("best"), "'latest'"),
        (lambda: manager.restore(into=model), "into is a Linear: must be a dict"),
        (lambda: manager.restore(into={"model": model}, map_location="cpu"), "map_location="),
    ]:
        with pytest.raises(exceptions.ConfigError, match=named):
            call()


@pytest.mark.providers("s3", "gs")
@BOTH
def test_missing_data_of_a_committed_step_raises(open_manager, tmp_path, sharded):
    manager = open_manager(sharded=sharded)
    manager.save(1, {"x": torch.ones(2)})
    for path in (tmp_path / "run/steps").rglob("*"):
        if path.is_file():
            path.unlink()
    with pytest.raises(exceptions.CheckpointError, match="step 1: committed, but its data is gone"):
        manager.restore(into={"x": torch.zeros(2)})


@BOTH
def test_a_state_dict_of_a_model_is_filled_in_place(open_manager, sharded):
    manager, model, into = open_manager(sharded=sharded), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    manager.save(1, {"model": model.state_dict(), "step": 1})
    manager.restore(into={"model": into.state_dict(), "step": 0})
    assert torch.equal(into.weight, model.weight)


@BOTH
def test_objects_in_mappings_are_saved_and_those_in_lists_are_refused(open_manager, sharded):
    manager, state, into = open_manager(sharded=sharded), stepped(), fresh()
    manager.save(1, {"nets": collections.OrderedDict(state)})
    manager.restore(into={"nets": collections.OrderedDict(into)})
    assert same_states(state, into)
    for odd in ([state["model"]], (1, [state["model"]]), [{"model": state["model"]}]):
        with pytest.raises(exceptions.ConfigError, match=r"nets\.[01].* is a Linear in a list"):
            manager.save(2, {"nets": odd})
    assert manager.steps() == [1]


@BOTH
def test_a_save_warns_of_values_that_a_restore_will_refuse(open_manager, sharded, caplog):
    manager = open_manager(sharded=sharded)
    plain = {"a": (1, 2.0, "x", None, {3}), "b": torch.float32, "c": [torch.ones(1)], "e": b"f", "g": 1j}
    plain |= {"h": collections.OrderedDict(a=1), "i": collections.Counter("aab"), "j": torch.Size([2]), "k": True}
    manager.save(1, plain)
    assert "weights_only" not in caplog.text
    manager.restore(into=dict(plain))
    odd = {"path": pathlib.Path("x"), "time": datetime.datetime.now(tz=datetime.UTC), "best": numpy.float64(0.5)}
    odd |= {"array": numpy.ones(3), "default": collections.defaultdict(int, a=1)}
    for name, value in odd.items():
        entry = f"{name}-{sharded}"
        caplog.clear()
        manager.save(2, {"deep": {entry: value}}, overwrite=True)
        warned = any(f"weights_only=False for entry 'deep.{entry}'" in message for message in caplog.messages)
        here = {"deep": {entry: {"a": 0} if name == "default" else None}}
        assert warned
        if not (sharded and name == "default"):  # A sharded checkpoint takes mappings apart.
            with pytest.raises(exceptions.CheckpointError, match="weights_only=False"):
                manager.restore(into=here)


def saved_without_parts(rank, url, config):
    manager = of_ranks(url, config)
    _, x = whole_and_shard(1)
    outcomes = [outcome(lambda: manager.save(1, {"deep": {"x": x}})), outcome(lambda: manager.save_async(1, {"x": x}))]
    manager.save(1, {"x": torch.ones(8, 2)})
    return [*outcomes, outcome(lambda: manager.restore(into={"x": x})), manager.steps()]


@pytest.mark.providers("s3", "gs")
@pytest.mark.filterwarnings("ignore")
def test_a_sharded_tensor_is_saved_and_restored_by_a_sharded_manager_only(bucket):
    for save, later, restore, steps in run_ranks(saved_without_parts, f"{bucket.url}/run", bucket.config):
        for kind, text in (save, later, restore):
            assert kind == "ConfigError"
            assert "x is sharded over 2 ranks; use" in text
        assert steps == [1]


def saved_and_restored(rank, url, config):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    manager = of_ranks(url, config, sharded=True)
    mesh = init_device_mesh("cpu", (2,))
    state, into = fresh(features=6), fresh(features=6)
    for each in (state, into):
        fully_shard(each["model"], mesh=mesh)
        each["optimizer"] = torch.optim.AdamW(each["model"].parameters())
    for _ in range(2):
        state["model"](torch.rand(6)).sum().backward()
        state["optimizer"].step()
    manager.save(1, state)
    manager.restore(into=into)
    outcomes = [same_states(state, into), len(into["optimizer"].state)]
    # The error of one rank is raised on all.
    outcomes.append(outcome(lambda: manager.restore(into=state, map_location=None if rank else "cpu")))
    manager.restore(into=into)
    return outcomes


@pytest.mark.filterwarnings("ignore")
def test_ranks_restore_an_optimizer_without_a_state(bucket):
    for equal, count, failed in run_ranks(saved_and_restored, f"{bucket.url}/run", bucket.config):
        assert (equal, count) == (True, 2)
        assert failed[0] == "ConfigError"


def of_fsdp(rank, url, config):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    manager, models = of_ranks(url, config, sharded=True), []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(FullyShardedDataParallel(torch.nn.Linear(6, 2), device_id=torch.device("cpu")))
        FullyShardedDataParallel.set_state_dict_type(models[-1], StateDictType.SHARDED_STATE_DICT)
    state, into = models
    manager.save(1, {"model": state})
    manager.restore(into={"model": into})
    return [torch.equal(*each) for each in zip(state.parameters(), into.parameters(), strict=True)]


@pytest.mark.filterwarnings("ignore")
def test_ranks_restore_a_module_whose_state_has_sharded_tensors(bucket):
    assert run_ranks(of_fsdp, f"{bucket.url}/run", bucket.config) == [[True]] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("sharded", [False, True])
def test_names_of_wrapped_modules_are_explained(open_manager, sharded):
    manager, model = open_manager(sharded=sharded), torch.nn.Linear(2, 2)
    for step, saved in enumerate((model, model.state_dict())):
        given = torch.compile(model) if step == 0 else {f"module.{name}": value for name, value in saved.items()}
        manager.save(step, {"model": given})
        text = ("'_orig_mod.' in the names there .* save ._orig_mod", "'module.' in the names there .* save .module")[
            step
        ]
        with pytest.raises(exceptions.CheckpointError, match=text):
            manager.restore(step, into={"model": saved})
    manager.save(2, {"model": model})
    with pytest.raises(exceptions.CheckpointError, match="'_orig_mod.' in the names here .* fill its ._orig_mod"):
        manager.restore(into={"model": torch.compile(model)})
    for step, into, prefixes in (
        (0, torch.nn.Linear(2, 2), {"_orig_mod.": ""}),
        (1, torch.compile(torch.nn.Linear(2, 2)), {"module.": "", "": "_orig_mod."}),
        (2, torch.compile(torch.nn.Linear(2, 2)), {"": "_orig_mod."}),
    ):
        with pytest.raises(exceptions.CheckpointError, match=re.escape(f"; or restore with prefix_map={prefixes}")):
            manager.restore(step, into={"model": into})
        manager.restore(step, into={"model": into}, prefix_map=prefixes)
        assert same(list(into.state_dict().values()), list(model.state_dict().values()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_tensor_without_memory_is_refused_by_name_when_it_is_saved(open_manager, sharded):
    manager, model = open_manager(sharded=sharded), torch.nn.Linear(20, 20)
    model.weight.data.untyped_storage().resize_(0)
    for save in (manager.save, lambda step, state: manager.save_async(step, state).result()):
        with pytest.raises(exceptions.CheckpointError, match=r"model.weight of 1600 bytes has no memory.* freed"):
            save(1, {"model": model})
    assert manager.steps() == []
    assert manager.leftovers() == []


def on_meta():
    with torch.device("meta"):
        return fresh()


@BOTH
@pytest.mark.parametrize(
    ("taken", "name"),
    [
        (lambda: {"model": on_meta()["model"]}, "model.weight"),
        (lambda: {"model": on_meta()["model"].state_dict()}, "model.weight"),
        (lambda: {"x": torch.empty(2, device="meta")}, "x"),
        (lambda: {"optimizer": on_meta()["optimizer"]}, "optimizer.param_groups.0.params.0"),
    ],
    ids=["module", "state dict", "tensor", "optimizer"],
)
def test_a_restore_into_tensors_on_meta_is_refused(open_manager, sharded, taken, name):
    # torch copies nothing into them: the restore would seem to have succeeded.
    manager = open_manager(sharded=sharded)
    manager.save(1, stepped() | {"x": torch.ones(2)})
    with pytest.raises(
        exceptions.CheckpointError,
        match=rf"step 1: into does not match: {name}: a tensor on meta cannot be filled.*to_empty",
    ):
        manager.restore(into=taken())
    into = on_meta()["model"].to_empty(device="cpu")
    assert manager.restore(into={"model": into}) is not None
    assert into.weight.isfinite().all()


def test_a_module_that_assigns_its_state_may_be_on_meta(open_manager):
    class Assigning(torch.nn.Linear):
        def load_state_dict(self, state_dict, strict=True, assign=True):
            return super().load_state_dict(state_dict, strict, assign)

    manager, model = open_manager(), torch.nn.Linear(2, 2)
    manager.save(1, {"model": model})
    with torch.device("meta"):
        into = Assigning(2, 2)
    manager.restore(into={"model": into})
    assert torch.equal(into.weight, model.weight)


def test_a_restore_into_an_expanded_tensor_is_refused_by_name(open_manager):
    manager = open_manager()
    manager.save(1, {"x": torch.ones(2)})
    with pytest.raises(exceptions.CheckpointError, match="step 1: .*: x: its elements share memory"):
        manager.restore(into={"x": torch.zeros(1).expand(2)})


STRUCTURES = {
    "grown": ([{"loss": 0.5}], []),
    "shrunk": ([], [{"loss": 1.0}]),
    "longer": ([{"a": 1}, {"a": 2, "b": [{"c": "x"}]}], [{"a": 0}]),
    "other keys": ([{"a": 1}], [{"b": 0, "c": 1}]),
    "tensors": ([torch.ones(2), {"y": torch.full((3,), 2.0)}], [torch.zeros(2)]),
    "other shapes": ([torch.ones(2)], [torch.zeros(3), torch.zeros(1)]),
    "plain values": ([1, 2, 3], [{"a": 1}]),
    "nested": ([[{"a": [1]}], [[2], {"b": 1}]], [[]]),
    "a dict for None": ({"loss": 1, "step": {"n": 2}}, None),
    "a tensor for a number": (torch.ones(2), 0),
    "a number for a list": (5, [{"a": 1}]),
}


@BOTH
@pytest.mark.parametrize("name", STRUCTURES)
def test_values_that_are_replaced_may_have_another_structure(open_manager, sharded, name):
    saved, here = copy.deepcopy(STRUCTURES[name])
    manager = open_manager(sharded=sharded)
    manager.save(1, {"hist": saved, "inner": {"hist": saved}, "object": Counts(saved), "x": torch.ones(2)})
    into = {"hist": here, "inner": {"hist": here}, "object": Counts(here), "x": torch.zeros(2)}
    manager.restore(into=into)
    for restored in (into["hist"], into["inner"]["hist"], into["object"].counts):
        assert same(restored, saved)
    assert into["x"].tolist() == [1, 1]


@BOTH
@pytest.mark.parametrize(
    "kept",
    [
        [{"state": {}, "param_groups": [{"lr": 1.0, "params": [0]}]}],
        [torch.ones(2), 1, {}],
        [{"a": 1}, {"b": {}}, [{}]],
        [collections.OrderedDict(a=torch.ones(2), b=collections.OrderedDict())],
        [collections.OrderedDict(a=1, b={})],
    ],
    ids=["optimizers", "at the end", "nested", "tensors", "type"],
)
def test_lists_keep_the_empty_mappings_and_the_types_that_they_have_here(open_manager, sharded, kept):
    manager, here = open_manager(sharded=sharded), copy.deepcopy(kept)
    manager.save(1, {"hist": kept, "x": torch.ones(2)})
    restored = manager.restore(into={"hist": here, "x": torch.zeros(2)})["hist"]
    assert same(restored, kept)
    assert str(restored) == str(kept)


def test_keys_in_lists_are_those_of_the_list_here(open_manager):
    manager, into = open_manager(sharded=True), {"hist": [{30: 0}]}
    manager.save(1, {"hist": [{30: 1}, {30: 2}]})
    assert manager.restore(into=into)["hist"][0] == {30: 1}


def test_two_entries_of_one_name_are_named_by_their_keys(open_manager):
    manager = open_manager(sharded=True)
    for state, keys in (
        ({"a.b": 1, "a": {"b": 2}}, r"state\['a\.b'\] and \['a'\]\['b'\]: both have the name 'a\.b'"),
        ({"x": {"a": {"b.c": torch.ones(1)}, "a.b": {"c": 2}}}, r"'b\.c'\] and \['x'\]\['a\.b'\]\['c'\]: both"),
        ({"x": {"1": 1, 1: 2}}, "both have the name 'x.1'"),
        ({"x": {"y": [torch.ones(1)], "y.0": 2}}, r"\['x'\]\['y'\]\[0\] and \['x'\]\['y\.0'\]: both"),
    ):
        for save in (manager.save, manager.save_async):
            with pytest.raises(exceptions.ConfigError, match=f"{keys}.*rename one"):
                save(1, state)
    assert manager.steps() == []
    manager.save(1, {"a": {"b": 2}})
    with pytest.raises(exceptions.CheckpointError, match=r"two entries of into have the same name: .*\['a'\]\['b'\]"):
        manager.restore(into={"a.b": 1, "a": {"b": 2}})
    whole = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    open_manager().save(2, whole)
    into = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert same(open_manager().restore(into=into), whole)


@BOTH
def test_switches_of_torch_lift_weights_only_for_no_restore(open_manager, tmp_path, sharded, monkeypatch):
    manager = open_manager(sharded=sharded)
    manager.save(1, {"odd": Runs(tmp_path / "ran"), "x": torch.ones(2)})
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for given in ({}, {"weights_only": True}, {"weights_only": None}):
        with pytest.raises(exceptions.CheckpointError, match="weights_only=False"):
            manager.restore(into={"odd": 0}, **given)
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    into = {"x": torch.zeros(2)}
    with pytest.raises(exceptions.ConfigError, match=r"TORCH_FORCE_WEIGHTS_ONLY_LOAD and .* are both set"):
        manager.restore(into=into)
    assert into["x"].tolist() == [0, 0]
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    with pytest.raises(exceptions.CheckpointError, match="getattr"):
        manager.restore(into={"odd": 0}, weights_only=False)
    assert not (tmp_path / "ran").exists()


class App(dict):
    """A mapping that is an object, too."""

    def state_dict(self):
        raise AssertionError

    load_state_dict = state_dict


@BOTH
def test_into_is_entered_even_if_it_is_an_object(open_manager, sharded):
    manager, model = open_manager(sharded=sharded), torch.nn.Linear(2, 2)
    manager.save(1, App(model=model, x=torch.ones(2), step=3))
    into = App(model=torch.nn.Linear(2, 2), x=torch.zeros(2), step=0)
    manager.restore(into=into)
    assert torch.equal(into["model"].weight, model.weight)
    assert (into["x"].tolist(), into["step"]) == ([1.0, 1.0], 3)
    with pytest.raises(exceptions.CheckpointError, match="x: torch.float64 of shape"):
        manager.restore(into=App(x=torch.zeros(2, dtype=torch.float64)))
