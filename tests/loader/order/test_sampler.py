"""`ElasticDistributedSampler`: lengths of torch's, one order for any number of ranks, and its state."""

import itertools
import pickle

import pytest
import torch.distributed as dist
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

import torchobj
from tests.support.permutations import permuted, sampler
from tests.support.ranks import on_one_machine, run_ranks
from torchobj import ElasticDistributedSampler
from torchobj.exceptions import ConfigError


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_ranks_together_traverse_one_order_from_its_start(ranks):
    rounds = zip(*(sampler(24, ranks, rank, seed=5) for rank in range(ranks)), strict=True)
    assert [index for round_ in rounds for index in round_] == permuted(24, 5)


@pytest.mark.parametrize(("size", "ranks"), [(10, 3), (10, 4), (2, 5), (0, 2), (1, 1)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_lengths_padding_and_drop_last_are_the_same_as_torchs(size, ranks, drop_last, shuffle):
    settings = {"shuffle": shuffle, "drop_last": drop_last}
    order = permuted(size) if shuffle else list(range(size))
    for rank in range(ranks):
        ours = sampler(size, ranks, rank, **settings)
        theirs = torch.utils.data.DistributedSampler(range(size), ranks, rank, **settings)
        assert (len(ours), ours.total_size) == (len(theirs), theirs.total_size)
        if size:
            theirs_in_order = torch.utils.data.DistributedSampler(
                order, ranks, rank, shuffle=False, drop_last=drop_last
            )
            assert list(ours) == [order[position] for position in theirs_in_order]


def test_each_epoch_has_its_own_reproducible_order():
    ours = sampler()
    first = list(ours)
    assert list(ours) == first
    ours.set_epoch(1)
    assert list(ours) == permuted(24, 0, 1) != first
    assert list(sampler(seed=1)) == permuted(24, 1) != first
    assert list(sampler(shuffle=False)) == list(range(24))


@pytest.mark.parametrize("done", [0, 1, 7, 23, 24])
def test_any_number_of_ranks_reads_the_rest_of_a_state_once(done):
    before = sampler(seed=3)
    before.set_epoch(2)
    list(itertools.islice(before, done))
    state = pickle.loads(pickle.dumps(before.state_dict()))
    assert state == {"seed": 3, "epoch": 2, "done": done, "length": 24, "shuffle": True}
    for ranks in (1, 2, 3):
        after = [sampler(24, ranks, rank, drop_last=True) for rank in range(ranks)]
        for each in after:
            each.load_state_dict(state)
        rest = permuted(24, 3, 2)[done:]
        found = [index for round_ in zip(*after, strict=True) for index in round_]
        assert found == rest[: len(rest) // ranks * ranks]
        assert sorted(index for each in after for index in each) == list(range(24))


def test_a_resumed_position_applies_to_its_epoch_only():
    state = {"seed": 0, "epoch": 4, "done": 20, "length": 24, "shuffle": True}
    ours = sampler()
    ours.load_state_dict(state)
    assert ours.state_dict() == state
    ours.set_epoch(4)
    iter(ours)
    assert len(list(ours)) == 4
    ours.load_state_dict(state)
    ours.set_epoch(5)
    assert len(list(ours)) == 24


def test_an_unused_iterator_consumes_nothing():
    ours = sampler()
    ours.load_state_dict({"seed": 0, "epoch": 0, "done": 20, "length": 24, "shuffle": True})
    iter(ours)
    assert len(list(ours)) == 4


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": "x"}, "seed='x'"),
        ({"epoch": None}, "epoch=None"),
        ({"done": -1}, "done=-1"),
        ({"length": 25}, "length=25"),
        ({"shuffle": False}, "shuffle=False"),
    ],
)
def test_a_state_of_another_sampler_is_refused_with_the_name_of_its_field(changed, named):
    with pytest.raises(ConfigError, match=named):
        sampler().load_state_dict(sampler().state_dict() | changed)


@pytest.mark.parametrize(("num_replicas", "rank"), [(0, 0), (2, 2), (2, -1), (None, -1)])
def test_an_invalid_rank_is_refused(num_replicas, rank):
    with pytest.raises(ConfigError, match="num_replicas=0|rank="):
        ElasticDistributedSampler(range(3), num_replicas, rank)


def test_without_a_job_it_is_the_only_rank_and_num_replicas_needs_rank():
    assert len(ElasticDistributedSampler(range(3))) == 3
    with pytest.raises(ConfigError, match="num_replicas=2, rank=None"):
        list(ElasticDistributedSampler(range(3), num_replicas=2))


def test_a_process_group_that_is_initialised_later_is_used(monkeypatch):
    ours = ElasticDistributedSampler(range(10), seed=1)
    assert len(ours) == 10
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 5)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 4)
    assert list(ours) == permuted(10, 1)[4::5]


def test_it_is_a_distributed_sampler_for_lightning():
    ours = sampler(10, 3, 1)
    assert isinstance(ours, torch.utils.data.DistributedSampler)
    assert (ours.num_replicas, ours.rank, ours.num_samples, ours.total_size) == (3, 1, 4, 12)


@pytest.fixture
def local_ranks(monkeypatch):
    """Sets the number of ranks of each host."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return lambda number: monkeypatch.setenv("LOCAL_WORLD_SIZE", str(number))


def local(size, ranks, epoch=0, state=None, **settings):
    """The samples of each rank of a job with locality, from a state."""
    samplers = [sampler(size, ranks, rank, locality="host", **settings) for rank in range(ranks)]
    for each in samplers:
        if state is not None:
            each.load_state_dict(state)
        each.set_epoch(epoch)
    return samplers, [list(each) for each in samplers]


@pytest.mark.parametrize(("size", "ranks", "of_host"), [(24, 4, 2), (25, 4, 2), (10, 6, 2), (3, 4, 1), (9, 9, 3)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_with_locality_each_sample_stays_on_its_host_and_lengths_are_torchs(
    local_ranks, size, ranks, of_host, drop_last, shuffle
):
    local_ranks(of_host)
    of_hosts = [set() for _ in range(ranks // of_host)]
    for epoch in range(8):
        samplers, found = local(size, ranks, epoch, drop_last=drop_last, shuffle=shuffle)
        theirs = torch.utils.data.DistributedSampler(range(size), ranks, 0, drop_last=drop_last)
        assert {len(each) for each in found} == {len(theirs)} == {len(each) for each in samplers}
        together = list(itertools.chain(*found))
        assert drop_last or set(together) == set(range(size))
        if len(together) <= size:
            assert len(set(together)) == len(together)
        for rank, each in enumerate(found):
            of_hosts[rank // of_host].update(each)
    if size >= len(of_hosts) and (shuffle or size % ranks == 0):
        assert sum(map(len, of_hosts)) == len(set().union(*of_hosts)) <= size


def test_with_locality_the_ranks_of_a_host_exchange_samples_between_epochs(local_ranks):
    local_ranks(2)
    _, first = local(400, 4, 0)
    _, second = local(400, 4, 1)
    assert set(first[0]) != set(second[0]) and 30 < len(set(first[0]) & set(second[0])) < 70


@given(
    data=st.data(),
    size=st.integers(0, 200),
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=2, max_size=4),
    shuffle=st.booleans(),
)
def test_with_locality_any_hosts_read_the_rest_of_a_state_once(data, size, shapes, shuffle):
    """A job is resumed several times within an epoch, each time on other hosts, with or without locality."""
    read, state = [], None
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        for number, (hosts, of_host) in enumerate(shapes):
            patch.setenv("LOCAL_WORLD_SIZE", str(of_host))
            ranks, is_last = hosts * of_host, number == len(shapes) - 1
            locality = data.draw(st.sampled_from(["host", None]))
            jobs = [sampler(size, ranks, rank, locality=locality, seed=7, shuffle=shuffle) for rank in range(ranks)]
            for each in jobs:
                if state is not None:
                    each.load_state_dict(pickle.loads(pickle.dumps(state)))
                    assert {"hosts": None} | each.state_dict() == {"hosts": None} | state
            left = size - len(read)
            steps = -(-left // ranks) if is_last else data.draw(st.integers(0, left // ranks))
            iterators = [iter(each) for each in jobs]
            for _ in range(steps):
                read += [next(iterator) for iterator in iterators]
            states = [each.state_dict() for each in jobs]
            assert all(each == states[0] for each in states)
            state = states[0]
    # Only the padding of the last step is repeated.
    assert set(read) == set(range(size)) and len(read) - size < ranks


def test_a_state_of_as_many_hosts_keeps_locality(local_ranks):
    local_ranks(2)
    before, whole = local(24, 4, seed=5)
    for each in before:
        list(itertools.islice(each, 2))
    state = before[0].state_dict()
    assert state == {"seed": 5, "epoch": 0, "done": 8, "length": 24, "shuffle": True, "hosts": 2}
    local_ranks(1)
    after, rest = local(24, 2, state=state)
    for host, samples in enumerate(rest):
        of_host = {*whole[2 * host], *whole[2 * host + 1]}
        assert len(samples) == 8 and set(samples) < of_host
    # The epochs after it too.
    assert set(after[0]) == {*whole[0], *whole[1]}


def test_a_loader_resumes_with_locality_on_other_ranks_and_hosts(local_ranks):
    def loaders(ranks, state=None):
        samplers = [sampler(40, ranks, rank, locality="host", seed=3) for rank in range(ranks)]
        found = [torchobj.DataLoader(range(40), batch_size=2, sampler=each, collate_fn=list) for each in samplers]
        for loader in found:
            if state is not None:
                loader.load_state_dict(state)
        return found

    local_ranks(1)
    read, before = [], loaders(2)
    for loader in before:
        for batch in itertools.islice(loader, 3):
            read += batch
        state = loader.state_dict()
    whole = [[*itertools.chain(*loader)] for loader in loaders(2)]
    for ranks, of_host in ((4, 2), (1, 1), (7, 1)):
        local_ranks(of_host)
        after = loaders(ranks, pickle.loads(pickle.dumps(state)))
        rest = [[*itertools.chain(*loader)] for loader in after]
        assert {*read, *itertools.chain(*rest)} == set(range(40)) and sum(map(len, rest)) < 28 + ranks
        if ranks == 4:
            assert {*rest[0], *rest[1]} < {*whole[0]} and {*rest[2], *rest[3]} < {*whole[1]}
        # The next epoch has the parts of these hosts.
        again = [[*itertools.chain(*loader)] for loader in after]
        assert again == [[*itertools.chain(*loader)] for loader in loaders(ranks)]


@pytest.mark.parametrize("hosts", [0, -2, 25, 2.0, "2", True])
def test_a_state_with_an_invalid_number_of_hosts_is_refused(hosts):
    with pytest.raises(ConfigError, match="hosts="):
        sampler().load_state_dict(sampler().state_dict() | {"hosts": hosts, "done": 4})


@pytest.mark.parametrize("shuffle", [0, 1, -2, 25, 2.0, "2", None])
def test_a_state_with_an_invalid_shuffle_is_refused(shuffle):
    with pytest.raises(ConfigError, match="shuffle="):
        sampler().load_state_dict(sampler().state_dict() | {"shuffle": shuffle, "done": 4})


def test_the_rest_of_an_epoch_with_locality_keeps_its_hosts_without_it(local_ranks):
    local_ranks(1)
    ours = sampler(24, 2, 0, locality="host")
    assert ours.state_dict()["hosts"] is None
    next(iter(ours))
    state = ours.state_dict()
    assert (state["done"], state["hosts"], state["shuffle"]) == (2, 2, True)
    other = sampler(24, 1, 0)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert len(list(other)) == 22 and "hosts" not in sampler(24, 1, 0).state_dict()


def test_locality_needs_the_number_of_ranks_of_a_host(monkeypatch):
    with pytest.raises(ConfigError, match="locality='rack': must be 'host' or None"):
        sampler(locality="rack")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    ours = sampler(24, 4, 0, locality="host")
    assert len(ours) == 6 and "locality='host'" in repr(ours)
    with pytest.raises(ConfigError, match="locality='host': .*set LOCAL_WORLD_SIZE"):
        next(iter(ours))


def _error_of_unequal_hosts(rank):
    on_one_machine(0, [2, 2, 1, 1][rank])
    dist.init_process_group("gloo")
    try:
        return list(ElasticDistributedSampler(range(100), locality="host"))
    except ConfigError as error:
        return str(error)


def test_hosts_of_unequal_size_are_an_error_also_for_a_dataset_without_a_listing():
    found = run_ranks(_error_of_unequal_hosts, size=4)
    # Those that find the same as the first that begins go on, and the job ends with the error of the others.
    errors = [each for each in found if isinstance(each, str)]
    assert len(errors) >= 2 and all("all hosts must have the same number of ranks" in error for error in errors)
