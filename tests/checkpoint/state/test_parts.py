"""Ranks that have parts of one state, such as the stages of a pipeline: each gets back its own, as with torch's writer."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from tests.support.ranks import run_ranks
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager, StorageReader
from torchobj.checkpoint.state.parts import describe, first_of_parts, paths_of_tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected call of")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Stage(torch.nn.Module):
    """A stage of a pipeline: layers with the names that they have in the whole model."""

    def __init__(self, sizes, *, embedded=False):
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(*size) for name, size in sizes.items()})
        if embedded:
            self.embedding = torch.nn.Linear(2, 3)

    def forward(self, batch):
        return sum(parameter.sum() for parameter in self.parameters())


def stepped(model, rank, make=torch.optim.AdamW, **settings):
    """An optimizer after a step whose state differs among ranks."""
    optimizer = make(model.parameters(), lr=0.1 + rank, **settings)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + 10 * rank + number)
    optimizer.step()
    return optimizer


def objects(rank, sizes=None, **settings):
    model = Stage(sizes or {str(rank): (2 + rank, 3)}, **settings)
    return {"model": model, "optimizer": stepped(model, rank)}


def states(rank, options=None, **settings):
    made = objects(rank, **settings)
    model, optimizer = get_state_dict(*made.values(), options=options)
    return {"model": model, "optimizer": optimizer}


def with_groups(rank):
    model = Stage({str(rank): (2, 3), f"{rank}b": (3, 3)})
    first, *others = model.parameters()
    made = [{"params": [first], "lr": 0.5 + rank}, {"params": others, "weight_decay": 0.25}][rank:]
    optimizer = torch.optim.AdamW(made if rank == 0 else list(model.parameters()), lr=0.1 * (1 + rank))
    model(None).backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def with_numbers_in_state_dicts(rank):
    return {name: value.state_dict() for name, value in objects(rank, {str(rank): (2, 3)}).items()}


def with_plain_dicts(rank):
    """As programs do that copy the state of a model to the CPU."""
    made = objects(rank, {str(rank): (2, 3)})
    weights = {name: value.clone() for name, value in made["model"].state_dict().items()}
    return {"model": weights, "optimizer": made["optimizer"].state_dict(), "rng": torch.get_rng_state()}


def without_parameters(rank):
    if rank == 1:
        return objects(rank)
    return {"model": torch.nn.Identity(), "optimizer": torch.optim.AdamW([{"params": []}])}


def in_lists(rank):
    made = [objects(rank, {f"{rank}{part}": (2 + rank, 3)}) for part in range(2)]
    return {name: [each[name].state_dict() for each in made] for name in ("model", "optimizer")}


def with_one_name(rank):
    model = torch.nn.Sequential(torch.nn.Linear(2 + rank, 3), torch.nn.BatchNorm1d(3))
    return {"model": model, "optimizer": stepped(model, rank)}


def with_more(rank):
    made = objects(rank)
    average = torch.optim.swa_utils.AveragedModel(made["model"])
    plain = {name: value + rank for name, value in made["model"].state_dict().items()}
    scheduler = torch.optim.lr_scheduler.StepLR(made["optimizer"], 3 + rank)
    return {"inner": made, "average": average, "ema": {"weights": plain, "n": 3}, "scheduler": scheduler}


class Trainer:
    """An object with the states of a stage, as in torch's tutorial."""

    def __init__(self, rank):
        self.model, self.optimizer = objects(rank).values()

    def state_dict(self):
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer), strict=True))

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def of_device_mesh(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Stage({str(rank): (2 + rank, 3)})
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"])
    return {"model": model, "optimizer": stepped(model, rank)}


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """What the first optimizer of a process imports, so that not each of the forked ranks does."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


#: The state of a rank. By name, whether torch saves each entry under a name of its own, so that it can be the oracle.
KINDS = {
    "states with names": (states, True),
    "flat states": (lambda rank: states(rank, FLAT), True),
    "tied weights": (lambda rank: states(rank, FLAT, embedded=True), True),
    "groups that differ": (with_groups, False),
    "optimizers that number their parameters": (objects, False),
    "optimizers of the same shapes": (lambda rank: objects(rank, {str(rank): (2, 3)}), False),
    "state dicts of the same shapes": (with_numbers_in_state_dicts, False),
    "plain dicts of the same shapes": (with_plain_dicts, False),
    "an optimizer without parameters": (without_parameters, False),
    "lists": (in_lists, False),
    "modules of one name": (with_one_name, False),
    "averages and a scheduler": (with_more, False),
    "an object": (lambda rank: {"trainer": Trainer(rank)}, False),
    "a device mesh": (of_device_mesh, False),
}
#: States that one file may have.
WHOLE = [name for name in KINDS if name != "a device mesh"]
TIED = "embedding"


def seen(value):
    """What distinguishes two states, as plain values."""
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
    if isinstance(value, dict):
        # Replicas, which come from the first rank.
        return {str(key): seen(inner) for key, inner in value.items() if TIED not in str(key)}
    if isinstance(value, list | tuple):
        return [seen(inner) for inner in value]
    return seen(value.state_dict()) if hasattr(value, "state_dict") else value


def zeroed(value):
    """The same objects with other values."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.zero_()
    elif isinstance(value, torch.nn.Module):
        zeroed(value.state_dict())
    elif isinstance(value, torch.optim.Optimizer):
        # One that has not made a step has no state.
        value.state.clear()
        value.zero_grad()
        for group in value.param_groups:
            group["lr"] = -1.0
    elif isinstance(value, Trainer):
        zeroed([value.model, value.optimizer])
    elif isinstance(value, dict):
        for key, inner in value.items():
            value[key] = -1.0 if isinstance(inner, float) else zeroed(inner)
    elif isinstance(value, list):
        value[:] = map(zeroed, value)
    return value


def saved_and_restored(rank, url, sharded, names):
    dist.init_process_group("gloo")
    results = {}
    with CheckpointManager(url, sharded=sharded, keep_last=None) as manager:
        for name in names:
            step, (make, has_oracle) = list(KINDS).index(name), KINDS[name]
            state = make(rank)
            before = seen(state)
            manager.save_async(step, state).result() if sharded else manager.save(step, state)
            into = zeroed(make(rank))
            assert seen(into) != before
            manager.restore(step, into=into)
            results[name] = [before, seen(into)]
            if has_oracle and sharded:
                oracle = f"{url.removeprefix('file://')}-{step}"
                dcp.save(state, storage_writer=dcp.FileSystemWriter(oracle))
                into = zeroed(make(rank))
                dcp.load(into, storage_reader=dcp.FileSystemReader(oracle))
                results[name].append(seen(into))
    return results


@pytest.fixture(scope="module", params=[True, False], ids=["sharded", "whole"])
def results(request, tmp_path_factory):
    names = list(KINDS) if request.param else WHOLE
    return run_ranks(saved_and_restored, f"file://{tmp_path_factory.mktemp('saved')}/run", request.param, names)


@pytest.mark.parametrize("name", KINDS)
def test_each_rank_gets_back_its_own_part(results, name):
    assert all(isinstance(of_rank, dict) for of_rank in results), results
    for of_rank in results:
        if name in of_rank:
            before, restored, *oracle = of_rank[name]
            assert restored == before
            # torch saves the list of the names of one rank.
            if oracle and name != "states with names":
                assert restored == oracle[0]
    assert name in results[0] or name not in WHOLE


def replicas(rank):
    """A module and optimizers that differ in the last bit of some values."""
    torch.manual_seed(0)
    model = Stage({"0": (2, 3)})
    optimizer = stepped(model, 0)
    for state in optimizer.state.values() if rank else ():
        for tensor in state.values():
            tensor.copy_(torch.nextafter(tensor, torch.tensor(torch.inf)))
    options = (None, FLAT)
    named, flat = (get_state_dict(model, optimizer, options=each)[1] for each in options)
    return {"model": model, "optimizer": optimizer, "named": named, "flat": flat, "list": [optimizer.state_dict()]}


def saved_replicas(rank, url):
    dist.init_process_group("gloo")
    with CheckpointManager(url, sharded=True) as manager:
        manager.save(1, replicas(rank))
        into = zeroed(replicas(rank))
        manager.restore(into=into)
    return seen(replicas(0)), seen(into)


def metadata_of(folder):
    [path] = (folder / "run" / "steps").iterdir()
    return StorageReader(f"file://{path}").read_metadata()


def test_optimizers_that_differ_in_the_last_bit_are_saved_once(tmp_path):
    for first, restored in run_ranks(saved_replicas, f"file://{tmp_path}/run"):
        assert restored == first
    names = metadata_of(tmp_path).state_dict_metadata
    assert "optimizer.state.0.exp_avg" in names
    assert not [name for name in names if "torchobj" in name]


def saved_stages_of_replicas(rank, url):
    dist.init_process_group("gloo")
    results, stage = [], rank // 2
    with CheckpointManager(url, sharded=True) as manager:
        for step, make in enumerate((objects, states, with_groups)):
            torch.manual_seed(stage)
            state = make(stage)
            before = seen(state)
            manager.save(step, state)
            into = zeroed(make(stage))
            manager.restore(step, into=into)
            results.append((before, seen(into)))
    return results


@pytest.mark.matrix
def test_each_stage_of_data_parallel_ranks_is_saved_once(tmp_path):
    results = run_ranks(saved_stages_of_replicas, f"file://{tmp_path}/run", size=4)
    assert all(restored == before for of_rank in results for before, restored in of_rank), results
    [first, *_] = [path for path in (tmp_path / "run" / "steps").iterdir() if path.name.startswith("000000000000")]
    names = StorageReader(f"file://{first}").read_metadata().state_dict_metadata
    assert {name.split(".")[2] for name in names if name.startswith("optimizer.")} == {"0", "2", "firsts"}


def saved_by_two(rank, url):
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    with CheckpointManager(url, sharded=True) as manager:
        manager.save(1, states(rank))
        manager.save(2, objects(rank))
    return seen(states(rank)["optimizer"]["state"])


def test_states_with_names_are_restored_by_another_number_of_ranks(tmp_path):
    run_ranks(saved_by_two, f"file://{tmp_path}/run")
    with CheckpointManager(f"file://{tmp_path}/run", sharded=True) as manager:
        whole = Stage({"0": (2, 3), "1": (3, 3)})
        weights, moments = get_state_dict(whole, stepped(whole, 0))
        into = {"model": weights, "optimizer": moments}
        with pytest.raises(exceptions.CheckpointError, match=r"param_groups.0: its parameters were saved in groups"):
            manager.restore(1, into=into)
        whole.zero_grad()
        by_layer = [{"params": whole.layers[name].parameters(), "lr": 0.0} for name in ("1", "0")]
        weights, moments = get_state_dict(whole, torch.optim.AdamW(by_layer))
        restored = manager.restore(1, into={"model": weights, "optimizer": moments})
        assert [group["lr"] for group in restored["optimizer"]["param_groups"]] == [1.1, 0.1]
        assert restored["optimizer"]["state"]["layers.1.weight"]["exp_avg"].mean() > 1
        with pytest.raises(exceptions.CheckpointError, match="optimizer was saved by 2 ranks, each its own.*leave it"):
            manager.restore(2, into=objects(0))


def test_an_optimizer_without_names_belongs_to_the_modules_of_its_rank():
    model = torch.nn.Linear(2, 3)
    state = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    found = describe(state, None, {})
    one, other, more = {("a",): b"1"}, {("a",): b"2"}, {("a",): b"1", ("average",): b"3"}
    assert not found.has_names
    assert first_of_parts([found] * 3, [one, other, one]) == [0, 1, 0]
    assert first_of_parts([found, None, found], [more, one, one]) == [0, None, 0]
    assert first_of_parts([found] * 2, [{("stage 0",): b"1"}, {("stage 1",): b"1"}]) == [0, 1]


def test_tensors_of_plain_dicts_may_be_parameters():
    weights = {"weight": torch.zeros(2), "scale": torch.tensor(1.0), "rng": torch.zeros(3, dtype=torch.uint8)}
    weights["itself"] = weights
    found = paths_of_tensors({("ema",): [weights], ("loss",): 0.5, ("bias",): torch.zeros(1)})
    assert set(found) == {("ema", 0, "weight"), ("bias",)}
