"""A restore of what has changed since: other names, entries that are new or gone, dicts that grew, and no state at all."""

import collections
import copy
import logging
import pathlib

import pytest
import torch

from tests.support.managers import of_ranks, outcome
from tests.support.ranks import run_ranks
from tests.support.saved_objects import same
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager, RngState

pytestmark = pytest.mark.filterwarnings("ignore")

BOTH = pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
PREFIXES = {"_orig_mod.": "", "module.": ""}


@pytest.fixture
def open_manager(tmp_path):
    return lambda **settings: CheckpointManager(f"file://{tmp_path}/run", **settings)


def plain():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))


def in_module(module):
    """A module whose parameters have the names that DistributedDataParallel gives them."""
    return torch.nn.Sequential(collections.OrderedDict(module=module))


def compiled(module):
    """A module whose parameters have the names that torch.compile gives them, whose import takes seconds."""
    return torch.nn.Sequential(collections.OrderedDict(_orig_mod=module))


def with_compiled_block():
    module = plain()
    module[0] = compiled(module[0])
    return module


def equal(one, other):
    return all(torch.equal(*both) for both in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return optimizer


WRAPPINGS = {
    "compiled": (lambda: compiled(plain()), plain, PREFIXES),
    "in module": (lambda: in_module(plain()), plain, PREFIXES),
    "both": (lambda: in_module(compiled(plain())), plain, PREFIXES),
    "block": (with_compiled_block, plain, PREFIXES),
    "to module": (plain, lambda: in_module(plain()), {"": "module."}),
    "to compiled": (lambda: in_module(plain()), lambda: compiled(plain()), {"module.": "", "": "_orig_mod."}),
    "to block": (plain, with_compiled_block, {"0.": "0._orig_mod."}),
}


@BOTH
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", WRAPPINGS)
def test_a_wrapped_module_is_restored_into_a_plain_one_and_back(open_manager, sharded, nested, name):
    make, make_into, prefixes = WRAPPINGS[name]
    manager, model, into = open_manager(sharded=sharded), make(), make_into()
    optimizer = stepped(model)
    moments = torch.optim.AdamW(into.parameters())
    state, fresh = {"model": model, "optimizer": optimizer}, {"model": into, "optimizer": moments}
    manager.save(1, {"deep": state} if nested else state)
    given = {"deep": fresh} if nested else fresh
    with pytest.raises(exceptions.CheckpointError, match="into does not match") as refused:
        manager.restore(into=given)
    manager.restore(into=given, prefix_map=prefixes)
    assert equal(model, into)
    assert same(optimizer.state_dict(), moments.state_dict())
    if name != "to block" and not (nested and "to" in name):
        # The error says what to pass.
        remedy = eval(str(refused.value).rpartition("or restore with prefix_map=")[2])
        torch.nn.init.zeros_(next(into.parameters()))
        manager.restore(into=given, prefix_map=remedy)
        assert equal(model, into)


@BOTH
def test_names_of_an_optimizer_and_at_the_top_are_renamed(open_manager, sharded):
    manager, one = open_manager(sharded=sharded), torch.ones(2)
    named = {"state": {"module.a": {"exp_avg": one}}, "param_groups": [{"params": ["module.a"], "lr": 0.1}]}
    manager.save(1, {"module.a": one, "optimizer": named, "old.n": 3})
    into = {"a": torch.zeros(2), "n": 0}
    into["optimizer"] = {"state": {"a": {"exp_avg": torch.zeros(2)}}, "param_groups": [{"params": ["a"], "lr": 0.0}]}
    manager.restore(into=into, prefix_map={"module.": "", "old.": ""})
    expected = {"state": {"a": {"exp_avg": one}}, "param_groups": [{"params": ["a"], "lr": 0.1}]}
    assert same(into, {"a": one, "n": 3, "optimizer": expected})
    with pytest.raises(exceptions.CheckpointError, match=r"m: not in the checkpoint, which has .*n"):
        manager.restore(into={"m": 0}, prefix_map={"old.": ""})


@BOTH
def test_prefixes_that_give_two_entries_one_name_are_refused(open_manager, sharded):
    manager, into = open_manager(sharded=sharded), {"model": {"a": torch.zeros(2)}}
    manager.save(1, {"model": {"a": torch.ones(2), "module.a": torch.ones(2)}})
    for given in (into, None):
        with pytest.raises(exceptions.CheckpointError, match=r"'model.a' and 'model.module.a' get the name 'a'"):
            manager.restore(into=given, prefix_map={"module.": ""})
    with pytest.raises(exceptions.ConfigError, match="prefix_map=3: must be a dict of strings"):
        manager.restore(into=into, prefix_map=3)
    assert into["model"]["a"].tolist() == [0, 0]


class Own:
    """An object that counts how often it loads a state."""

    def __init__(self, state):
        self.state, self.loaded = state, 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state, self.loaded = state, self.loaded + 1


@BOTH
def test_without_strict_what_matches_is_restored_as_by_load_state_dict(open_manager, sharded, caplog):
    saved = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(2, 2), "old": torch.nn.Linear(2, 2), "norm": torch.nn.BatchNorm1d(2)}
    )
    into = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(2, 2), "new": torch.nn.Linear(2, 2), "norm": torch.nn.BatchNorm1d(2)}
    )
    expected = copy.deepcopy(into)
    missing, unexpected = expected.load_state_dict(saved.state_dict(), strict=False)
    manager = open_manager(sharded=sharded)
    manager.save(1, {"model": saved, "deep": {"x": torch.ones(2), "gone": torch.ones(1)}, "step": 1, "unasked": 2})
    added = Own({"n": 1})
    state = {"model": into, "deep": {"x": torch.zeros(2), "y": torch.full((2,), 5.0), "own": added}, "step": 0}
    state |= {"ema": torch.full((1,), 7.0), "count": 9}
    with pytest.raises(exceptions.CheckpointError):
        manager.restore(into=state)
    caplog.set_level(logging.INFO)
    assert manager.restore(into=state, strict=False) is state
    assert equal(into, expected)
    assert (state["deep"]["x"].tolist(), state["deep"]["y"].tolist()) == ([1, 1], [5, 5])
    assert (state["ema"].tolist(), state["count"], state["step"], added.loaded) == ([7.0], 9, 1, 0)
    assert state["deep"].keys() == {"x", "y", "own"}
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(f"{manager.url}, step 1: strict=False: not in the checkpoint, left unchanged: ")
    [every] = [record.getMessage() for record in caplog.records if ": not in the checkpoint: [" in record.getMessage()]
    for name in (*missing, *unexpected):
        assert every.count(f"'model.{name}'") == 1
    for name in ("deep.y", "ema", "count", "deep.gone"):
        assert every.count(f"'{name}'") == 1
    assert "unasked" not in every


@BOTH
def test_without_strict_other_shapes_remain_errors(open_manager, sharded, caplog):
    manager, model = open_manager(sharded=sharded), torch.nn.Linear(2, 2)
    manager.save(1, {"model": model, "x": torch.ones(2)})
    for into, named in (
        ({"model": torch.nn.Linear(2, 3), "new": 1}, r"model.weight: a tensor of shape \(3, 2\) here"),
        ({"x": torch.zeros(3)}, r"x: torch.float32 of shape \(3,\) here"),
        ({"x": torch.zeros(2, dtype=torch.int8)}, "x: torch.int8"),
        ({"x": {"y": 1}}, "x"),
    ):
        with pytest.raises(exceptions.CheckpointError, match=named):
            manager.restore(into=into, strict=False)
    into = {"model": torch.nn.Linear(2, 2), "x": torch.zeros(2)}
    caplog.clear()
    manager.restore(into=into, strict=False)
    assert equal(into["model"], model)
    assert not [record for record in caplog.records if record.name == "torchobj" and record.levelno > logging.DEBUG]


def test_without_strict_an_optimizer_without_a_state_is_restored_and_a_new_one_is_left(open_manager):
    for sharded in (False, True):
        manager, model = open_manager(sharded=sharded), plain()
        optimizer = stepped(model)
        manager.save(1 + sharded, {"model": model, "optimizer": optimizer})
        into = {"model": plain()}
        into |= {"optimizer": torch.optim.AdamW(into["model"].parameters()), "other": stepped(into["model"])}
        before = copy.deepcopy(into["other"].state_dict())
        manager.restore(into=into, strict=False)
        assert same(into["optimizer"].state_dict(), optimizer.state_dict())
        assert same(into["other"].state_dict(), before)


GROWN = {
    "history": {"loss": [1.0, 0.5], "best": {"step": 3, "x": torch.ones(2)}, "list": [{"a": 1}, torch.ones(1)]},
    "deep": {"seen": {"a": 1}, "x": torch.ones(2)},
}


@BOTH
def test_an_empty_dict_adopts_the_entries_of_one_that_grew(open_manager, sharded):
    manager = open_manager(sharded=sharded)
    manager.save(1, GROWN | {"model": plain()})
    history, seen = {}, collections.OrderedDict()
    into = {"history": history, "deep": {"seen": seen, "x": torch.zeros(2)}, "model": {}}
    manager.restore(into=into)
    assert same(history, GROWN["history"])
    assert into["history"] is history
    assert into["deep"]["seen"] is seen
    assert (dict(seen), into["deep"]["x"].tolist()) == ({"a": 1}, [1, 1])
    plain().load_state_dict(into["model"])
    # A dict with entries has to have all of them, and one that has grown here is no value.
    with pytest.raises(
        exceptions.CheckpointError, match=r"history\.best\.step: only in the|history\.best: only in the"
    ):
        manager.restore(into={"history": {"loss": []}})
    for into, named in (
        ({"history": {"list": {}, "best": {}, "loss": {}}}, "history.lo?i?s"),
        ({"deep": {"x": {}}}, "deep"),
    ):
        with pytest.raises(exceptions.CheckpointError, match=named):
            manager.restore(into=into)


def test_what_adopts_keeps_nothing_else_from_being_read_in_place(open_manager, caplog):
    manager, into = open_manager(), plain()
    manager.save(1, GROWN | {"model": plain()})
    caplog.set_level(logging.DEBUG, "torchobj")
    manager.restore(into={"history": {}, "model": into})
    assert "not read in place" not in caplog.text
    manager.restore(into={"model": into.double()})
    assert "not read in place" in caplog.text


@BOTH
def test_dicts_that_are_empty_on_both_sides_stay_so(open_manager, sharded):
    manager = open_manager(sharded=sharded)
    manager.save(1, {"history": {}, "x": torch.ones(2)})
    into = {"history": {}, "x": torch.zeros(2)}
    manager.restore(into=into)
    assert same(into, {"history": {}, "x": torch.ones(2)})
    assert manager.restore(into={}) == {}


@BOTH
def test_a_state_is_read_without_a_template(open_manager, sharded):
    manager, model = open_manager(sharded=sharded), plain()
    state = {"model": model, "optimizer": stepped(model), "rng": RngState(), **copy.deepcopy(GROWN)}
    state |= {"step": 3, "pair": (1, torch.ones(1)), "deeper": [[{"a": {"b": [1]}}, []], [torch.ones(2), None]]}
    manager.save(1, state)
    found = manager.restore()
    expected = open_manager(sharded=False)
    expected.save(2, state)
    expected = expected.restore(2)
    assert found.keys() == expected.keys()
    for name in expected:
        # torch's distributed checkpoints have no types of dicts, and no order of entries.
        assert same(sorted_dicts(found[name]), sorted_dicts(expected[name]))
    again = plain()
    again.load_state_dict(found["model"])
    assert equal(again, model)
    moments = torch.optim.AdamW(again.parameters())
    moments.load_state_dict(found["optimizer"])
    assert same(moments.state_dict(), state["optimizer"].state_dict())


@BOTH
def test_states_of_optimizers_are_read_as_they_are_loaded(open_manager, sharded):
    manager, model = open_manager(sharded=sharded), plain()
    state = {"adam": stepped(model), "sgd": torch.optim.SGD(model.parameters(), lr=0.5)}
    manager.save(1, {"deep": state, "model": model})
    for found in (manager.restore()["deep"], manager.restore(into={"deep": {}})["deep"]):
        for name, kind in (("adam", torch.optim.AdamW), ("sgd", torch.optim.SGD)):
            optimizer = kind(plain().parameters(), lr=0.1)
            optimizer.load_state_dict(found[name])
            assert same(optimizer.state_dict(), state[name].state_dict())


class Itself:
    """Becomes a dict that contains itself, in a pickle."""

    def __reduce__(self):
        return _itself, ()


def _itself():
    value = {}
    value["self"] = value
    return value


class Odd:
    """Becomes the state of an optimizer with other parameters than numbers, in a pickle."""

    def __reduce__(self):
        return eval, ("{'param_groups': [{'params': 3}, {'params': [[]]}], 'state': {'0': 1}}",)


def test_a_value_that_is_no_state_of_an_optimizer_is_returned_as_it_is(open_manager):
    manager = open_manager(sharded=True)
    manager.save(1, {"odd": Odd()})
    found = manager.restore(weights_only=False, prefix_map={"": "module."})["odd"]
    assert found == {"param_groups": [{"params": 3}, {"params": [[]]}], "state": {"0": 1}}


def test_a_value_that_contains_itself_is_refused(open_manager):
    manager = open_manager(sharded=True)
    manager.save(1, {"odd": Itself()})
    for into in (None, {"odd": 0}):
        with pytest.raises(exceptions.CheckpointError, match="step 1: a value contains itself"):
            manager.restore(into=into, weights_only=False)


def sorted_dicts(value):
    if isinstance(value, dict):
        return {key: sorted_dicts(value[key]) for key in sorted(value, key=str)}
    return [sorted_dicts(inner) for inner in value] if isinstance(value, list) else value


def test_a_sharded_checkpoint_without_a_template_is_what_torch_reads(open_manager, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    manager = open_manager(sharded=True)
    manager.save(1, {"model": plain(), **GROWN})
    [folder] = (tmp_path / "run/steps").iterdir()
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    assert same(sorted_dicts(manager.restore()), sorted_dicts(torch.load(tmp_path / "whole.pt")))
    assert next(iter(manager.restore(prefix_map={"": "module."})["model"])).startswith("module.")
    assert manager.restore(map_location="cpu", strict=False).keys() == {"model", *GROWN}
    with pytest.raises(exceptions.ConfigError, match="map_location=: a sharded checkpoint is read to the CPU"):
        manager.restore(map_location="meta")


def test_without_a_template_code_of_a_checkpoint_is_not_run(open_manager):
    manager = open_manager(sharded=True)
    manager.save(1, {"odd": pathlib.PurePosixPath("x")})
    with pytest.raises(exceptions.CheckpointError, match="weights_only=False"):
        manager.restore()
    assert manager.restore(weights_only=False) == {"odd": pathlib.PurePosixPath("x")}
    manager.save(2, {"empty": {}})
    assert manager.restore() == {}


def of_two_ranks(rank, url, config):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    manager, mesh = of_ranks(url, config, sharded=True), init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = in_module(torch.nn.Linear(6, 3))
    whole = {name.removeprefix("module."): each.detach().clone() for name, each in model.named_parameters()}
    fully_shard(model, mesh=mesh)
    manager.save(1, {"model": model, "rank": rank, "step": 5, "stage": torch.nn.Linear(1 + rank, 1).state_dict()})
    found = manager.restore()
    outcomes = [found["rank"], found["step"], tuple(found["stage"]["weight"].shape)]
    outcomes.append({name: torch.equal(found["model"][f"module.{name}"], each) for name, each in whole.items()})
    plain = torch.nn.Linear(6, 3)
    fully_shard(plain, mesh=mesh)
    plain.weight.detach().zero_()
    new = torch.ones(1 + rank)
    into = {"model": plain, "rank": None, f"new {rank}": new}
    failed = outcome(lambda: manager.restore(into={"model": plain}))
    manager.restore(into=into, strict=False, prefix_map={"module.": ""})
    outcomes += [failed, torch.equal(plain.weight.full_tensor(), whole["weight"]), into["rank"], new.tolist()]
    # Ranks that disagree do not wait for each other.
    calls = [
        lambda: manager.restore(into=into if rank else None),
        lambda: manager.restore(into=into, strict=bool(rank)),
        lambda: manager.restore(into=into, prefix_map={"module.": "" if rank else "x"}),
        lambda: manager.restore(prefix_map=3 if rank else None),
    ]
    outcomes.append([outcome(call) for call in calls])

    def refuse(progress):
        if rank == 1:
            raise exceptions.ConfigError("the bar is closed")

    outcomes.append(outcome(lambda: manager.restore(progress=refuse)))
    whole = of_ranks(f"{url}-whole", config)
    whole.save(1, {"model": in_module(torch.nn.Linear(2, 1)), "rank": rank, "old": 1})
    into = {"model": torch.nn.Linear(2, 1), "rank": None, f"new {rank}": new}
    whole.restore(into=into, strict=False, prefix_map={"module.": ""})
    found = whole.restore(prefix_map={"module.": ""})
    outcomes.append(same(into["model"].state_dict(), found["model"]) and into["rank"] == found["rank"] == rank)
    return [*outcomes, manager.restore()["rank"]]


def test_ranks_restore_what_has_changed_and_read_whole_tensors(bucket):
    for rank, found in enumerate(run_ranks(of_two_ranks, f"{bucket.url}/run", bucket.config)):
        own, step, stage, equal, failed, again, own_again, new, differing, refused, of_file, last = found
        assert (own, step, stage, own_again, last) == (rank, 5, (1, 1 + rank), rank, rank)
        assert equal == {"weight": True, "bias": True}
        assert failed[0] == "CheckpointError"
        assert "prefix_map={'module.': ''}" in failed[1]
        assert (again, of_file) == (True, True)
        assert refused == ("ConfigError", "the bar is closed")
        assert new == [1.0] * (1 + rank)
        for (kind, text), name in zip(differing, ("into=", "strict=", "prefix_map=", "prefix_map="), strict=True):
            assert kind == "ConfigError"
            assert text.startswith(name)
            assert "on rank 1" in text


def saved_by_two(rank, url, config):
    of_ranks(url, config, sharded=True).save(1, {"model": torch.nn.Linear(2, 2), "rng": RngState(), "n": rank})


def test_one_process_reads_what_ranks_saved_except_their_own_values(bucket):
    run_ranks(saved_by_two, f"{bucket.url}/run", bucket.config)
    manager = CheckpointManager(f"{bucket.url}/run", config=bucket.config, sharded=True)
    with pytest.raises(exceptions.CheckpointError, match=r"(rng|n).* was saved by 2 ranks, each its own.*leave it out"):
        manager.restore()
    found = manager.restore(into={"model": {}})
    torch.nn.Linear(2, 2).load_state_dict(found["model"])
