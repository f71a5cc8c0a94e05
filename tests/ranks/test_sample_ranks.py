"""The ranks among which samples are divided: by arguments, by another library, by torch.distributed, or unknown."""

import contextlib
import mmap
import pickle
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchobj
from tests.support.iterables import COUNT, dataset, number_of, numbers, write_objects
from torchobj import exceptions
from torchobj.ranks.sample_ranks import detected_rank, given_rank
from torchobj.warn_once import FORKED

pytestmark = pytest.mark.xdist_group("lightning")


@pytest.fixture
def folder(tmp_path):
    return write_objects(tmp_path)


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    monkeypatch.setattr(FORKED, "_flags", mmap.mmap(-1, 1 << 16))


@contextlib.contextmanager
def rank_of(rank, size):
    """This process as a rank of a job without other processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def named(folder, *, enable_sharding=True, **settings):
    """The objects by name: the process group of `rank_of` has no store to agree on a listing by."""
    urls = [f"file://{folder}/k{number:03}" for number in range(COUNT)]
    return torchobj.ObjectIterableDataset.from_objects(
        urls, transform=number_of, enable_sharding=enable_sharding, **settings
    )


#: Shape and names of a mesh of 8 ranks, and the rank and number of ranks of rank 5 in it.
MESHES = [
    ((8,), ("dp",), (5, 8)),
    ((8,), None, (5, 8)),
    ((8,), ("mine",), (5, 8)),
    ((8,), ("tp",), (0, 1)),
    ((4, 2), ("dp", "tp"), (2, 4)),
    ((2, 4), ("tp", "dp"), (1, 4)),
    ((2, 4), ("data_parallel", "tensor_parallel"), (1, 2)),
    ((2, 4), ("replicate", "shard"), (5, 8)),
    ((2, 2, 2), ("pp", "dp_shard", "tp"), (0, 2)),
    ((2, 2, 2), ("dp_replicate", "dp_shard", "cp"), (2, 4)),
    ((2, 2, 2), ("DP", "FSDP", "SP"), (2, 4)),
]


@pytest.mark.parametrize(("shape", "names", "expected"), MESHES)
def test_the_names_of_a_mesh_determine_which_ranks_get_the_same_samples(shape, names, expected):
    with rank_of(5, 8):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        assert given_rank(None, None, mesh) == expected
        sampler = torchobj.ElasticDistributedSampler(range(800), mesh=mesh)
        assert (sampler.rank, sampler.num_replicas) == expected


def test_a_part_of_a_mesh_divides_whatever_its_name_is():
    with rank_of(5, 8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("rows", "columns"))
        assert given_rank(None, None, mesh["rows"]) == (2, 4)
        assert given_rank(None, None, mesh["columns"]) == (1, 2)
        with pytest.raises(
            exceptions.ConfigError, match=r"dimension 'rows' .* is not known; pass the part .*mesh\['dp"
        ):
            given_rank(None, None, mesh)


def test_a_dimension_of_data_and_model_and_a_mesh_without_names_are_refused():
    with rank_of(5, 8):
        with pytest.raises(exceptions.ConfigError, match="dimension None"):
            given_rank(None, None, init_device_mesh("cpu", (4, 2)))
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "cp"))
        with pytest.raises(exceptions.ConfigError, match="dimension 'dp_cp'"):
            given_rank(None, None, mesh._flatten("dp_cp"))


def test_a_mesh_without_this_rank_is_an_error():
    with rank_of(5, 8):
        mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("dp",))
        with pytest.raises(exceptions.ConfigError, match="does not contain this process, of rank 5"):
            given_rank(None, None, mesh)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 0}, "world_size=None: must be an int; pass both"),
        ({"world_size": 2}, "rank=None: must be an int; pass both"),
        ({"rank": 2, "world_size": 2}, r"rank=2: must be 0\.\.2"),
        ({"rank": -1, "world_size": 2}, "rank=-1"),
        ({"rank": 0, "world_size": 0}, "world_size=0: must be 1 or more"),
        ({"rank": True, "world_size": 2}, "rank=True: must be an int"),
        ({"rank": "0", "world_size": 2}, "rank='0': must be an int"),
        ({"mesh": "dp"}, "must be a torch.distributed.DeviceMesh"),
        ({"mesh": object(), "rank": 0, "world_size": 1}, "either mesh=, or rank= and world_size="),
        ({"enable_sharding": 1}, "enable_sharding=1: must be True or False"),
    ],
)
def test_invalid_ranks_are_refused_by_every_iterable_dataset(given, message):
    makers = [
        lambda: torchobj.ObjectIterableDataset("memory://x/", **given),
        lambda: torchobj.ObjectIterableDataset.from_prefix("memory://x/", **given),
        lambda: torchobj.ObjectIterableDataset.from_objects(["memory://x/a"], **given),
        lambda: torchobj.S3IterableDataset.from_prefix("s3://x/", **given),
        lambda: torchobj.S3IterableDataset.from_objects(["s3://x/a"], **given),
        lambda: torchobj.TarIterableDataset("memory://x/", **given),
        lambda: torchobj.ParquetIterableDataset("memory://x/", **given),
        lambda: torchobj.interleave([torchobj.TarIterableDataset("memory://x/")], **given),
    ]
    for make in makers:
        with pytest.raises(exceptions.ConfigError, match=message):
            make()


def test_a_rank_without_division_is_refused_where_division_is_the_default():
    for kind in (torchobj.TarIterableDataset, torchobj.ParquetIterableDataset):
        with pytest.raises(exceptions.ConfigError, match="enable_sharding=False: .* excludes rank="):
            kind("memory://x/", enable_sharding=False, rank=0, world_size=2)


def test_a_mixture_of_map_style_datasets_names_the_sampler():
    with pytest.raises(exceptions.ConfigError, match="pass them to ElasticDistributedSampler"):
        torchobj.interleave([range(3)], rank=0, world_size=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_replicas": 2, "world_size": 3, "rank": 0}, "world_size=3, num_replicas=2: are the same"),
        ({"world_size": 2, "rank": 2}, r"rank=2: must be 0\.\.2"),
        ({"mesh": "dp"}, "must be a torch.distributed.DeviceMesh"),
        ({"mesh": "dp", "rank": 0}, "either mesh="),
    ],
)
def test_invalid_ranks_are_refused_by_the_sampler(settings, message):
    with pytest.raises(exceptions.ConfigError, match=message):
        torchobj.ElasticDistributedSampler(range(3), **settings)


def test_the_sampler_takes_a_world_size():
    sampler = torchobj.ElasticDistributedSampler(range(8), world_size=2, rank=1, shuffle=False)
    assert list(sampler) == [1, 3, 5, 7]


@pytest.mark.parametrize("workers", [0, 2])
def test_given_ranks_divide_and_imply_division(folder, workers):
    found = []
    for rank in range(3):
        samples = dataset(folder, enable_sharding=False, rank=rank, world_size=3)
        found.append(numbers(torchobj.DataLoader(samples, batch_size=8, num_workers=workers)))
    assert sorted(number for each in found for number in each) == list(range(COUNT))
    assert {len(each) for each in found} == {COUNT // 3}


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_of_a_mixture_apply_to_its_datasets_within_wrappers_too(folder, workers):
    class Wrapper(torch.utils.data.IterableDataset):
        def __init__(self, within):
            self.within = within

        def __iter__(self):
            yield from self.within

    def part(rank):
        members = [Wrapper(dataset(folder)), torchobj.ObjectMapDataset(f"file://{folder}/", transform=number_of)]
        mixed = torchobj.interleave(members, stopping_strategy="all_exhausted", rank=rank, world_size=3)
        return numbers(torchobj.DataLoader(mixed, batch_size=8, num_workers=workers))

    found = sorted(number for rank in range(3) for number in part(rank))
    assert found == sorted([*range(COUNT), *range(COUNT)])


def test_a_dataset_of_a_mixture_keeps_its_own_rank(folder):
    own = dataset(folder, rank=1, world_size=3)
    assert list(torchobj.interleave([own], rank=0, world_size=2)) == list(range(1, COUNT, 3))


@pytest.mark.parametrize("kind", ["objects", "mixture"])
def test_nothing_is_divided_if_division_is_switched_off(folder, kind):
    samples = named(folder, enable_sharding=kind == "mixture")
    if kind == "mixture":
        samples = torchobj.interleave([samples], enable_sharding=False)
    with rank_of(1, 2):
        assert list(samples) == list(range(COUNT))


def test_given_ranks_reach_a_spawned_worker(folder):
    samples = named(folder, rank=1, world_size=3)
    loader = torchobj.DataLoader(samples, batch_size=8, num_workers=1, multiprocessing_context="forkserver")
    assert numbers(loader) == list(range(1, COUNT, 3))
    assert list(pickle.loads(pickle.dumps(samples))) == list(range(1, COUNT, 3))


def called_in(module, function, **variables):
    """The return value of `function`, called by code of a module of this name."""
    namespace = {"__name__": module, "function": function}
    exec("def call(self):\n    return function()", namespace)
    return namespace["call"](types.SimpleNamespace(**variables))


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_strategy_of_lightning_determines_the_rank(package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, types.ModuleType(package))
    strategy = types.SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 1})
    trainer = types.SimpleNamespace(strategy=strategy)
    with rank_of(3, 4):
        assert called_in(f"{package}.loops.fit_loop", lambda: detected_rank(None), trainer=trainer) == (1, 2)
        assert called_in(f"{package}.loops.fetchers", lambda: detected_rank(None)) == (3, 4)
        assert called_in("mine", lambda: detected_rank(None), trainer=trainer) == (3, 4)


def test_the_sampler_leaves_the_division_to_accelerate():
    data_loader = pytest.importorskip("accelerate.data_loader")
    found = []
    for rank in range(2):
        with rank_of(rank, 2):
            sampler = torchobj.ElasticDistributedSampler(range(COUNT))
            loader = torch.utils.data.DataLoader(range(COUNT), batch_size=10, sampler=sampler)
            prepared = data_loader.prepare_data_loader(loader, num_processes=2, process_index=rank)
            assert len(prepared) == COUNT // 20
            found += numbers(prepared)
    assert sorted(found) == list(range(COUNT))


def test_a_spawned_worker_of_a_prepared_loader_leaves_the_division_to_it(folder):
    data_loader = pytest.importorskip("accelerate.data_loader")
    with rank_of(0, 2):
        loader = torchobj.DataLoader(named(folder), batch_size=10, num_workers=1, multiprocessing_context="forkserver")
        prepared = data_loader.prepare_data_loader(loader, num_processes=1, put_on_device=True, dispatch_batches=False)
        assert numbers(prepared) == list(range(COUNT))


def warnings_of(caplog, iterate):
    caplog.clear()
    iterate()
    return [record.getMessage() for record in caplog.records]


def test_a_mesh_that_nobody_passed_warns_once(folder, caplog):
    with rank_of(0, 4):
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        [message] = warnings_of(caplog, lambda: (list(named(folder)), list(named(folder))))
        assert "dimension 'cp'" in message
        assert "mesh=" in message


def test_a_missing_process_group_does_not_hide_a_mesh_that_nobody_passed(folder, caplog, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    [message] = warnings_of(caplog, lambda: list(named(folder)))
    assert "WORLD_SIZE=4 is set" in message
    with rank_of(0, 4):
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        [message] = warnings_of(caplog, lambda: (list(named(folder)), list(named(folder))))
        assert "dimension 'tp'" in message


def test_a_mesh_that_was_passed_and_one_of_data_only_do_not_warn(folder, caplog):
    with rank_of(0, 4):
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        assert not warnings_of(caplog, lambda: list(named(folder)))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert not warnings_of(caplog, lambda: list(named(folder, mesh=mesh)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_job_without_a_process_group_warns_once(folder, caplog, monkeypatch, workers):
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = torchobj.DataLoader(named(folder), batch_size=8, num_workers=workers)
    messages = warnings_of(caplog, lambda: (numbers(loader), numbers(loader)))
    # A worker logs to the stderr of its own process.
    assert len(messages) == (1 if workers == 0 else 0)
    assert FORKED.has("world size")
    assert all("WORLD_SIZE=2 is set" in each and "rank= and world_size=" in each for each in messages)
    monkeypatch.setattr(FORKED, "_flags", mmap.mmap(-1, 1 << 16))
    assert not warnings_of(caplog, lambda: list(named(folder, rank=0, world_size=2)))
