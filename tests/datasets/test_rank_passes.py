"""A rank that begins a pass alone is noticed, and nothing else is."""

import logging

import pytest
import torch.distributed as dist

import torchobj
from tests.support.ranks import run_ranks

COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    for number in range(COUNT):
        (folder / f"k{number:02}").write_bytes(bytes([number]))
    return folder


def number_of(reader):
    return reader.read()[0]


def dataset(folder, **settings):
    return torchobj.ObjectIterableDataset(
        f"file://{folder}/", transform=number_of, shuffle=True, enable_sharding=True, **settings
    )


def loader(folder):
    return torchobj.DataLoader(dataset(folder), batch_size=2)


def loader_with_a_worker(folder):
    return torchobj.DataLoader(dataset(folder), batch_size=2, num_workers=1)


def mixture(folder):
    return torchobj.interleave([dataset(folder), dataset(folder)])


def begun(passes, batches):
    """Begins a pass, and leaves it."""
    for _, _ in zip(range(batches), passes, strict=False):
        pass


def alone(rank, passes):
    if rank == 0:
        begun(passes, 1)
    dist.barrier()
    list(passes)


def alone_without_a_barrier(rank, passes):
    if rank == 0:
        begun(passes, 1)
    list(passes)


def whole_alone(rank, passes):
    if rank == 0:
        list(passes)
    dist.barrier()
    list(passes)


def together(rank, passes):
    for _ in range(2):
        list(passes)
        dist.barrier()
        list(passes)


def left_together(rank, passes):
    for _ in range(2):
        begun(passes, 1)
        dist.barrier()
        list(passes)


def alone_with_set_epoch(rank, passes):
    data = getattr(passes, "dataset", passes)
    if rank == 0:
        begun(passes, 1)
    for epoch in range(2):
        dist.barrier()
        data.set_epoch(epoch)
        list(passes)


def resumed_alone(rank, passes):
    begun(passes, 1)
    state = passes.state_dict()
    passes.load_state_dict(state)
    dist.barrier()
    alone(rank, passes)


def lines_of(rank, passes, loop):
    """The warnings of a rank whose loop has these passes."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("torchobj").addHandler(handler)
    loop(rank, passes)
    dist.barrier()
    return [line for line in lines if "begun a pass alone" in line]


def in_rank(rank, folder, make, loop):
    dist.init_process_group("gloo")
    return lines_of(rank, make(folder), loop)


@pytest.mark.parametrize(
    ("make", "loop"),
    [
        (loader, alone),
        (loader_with_a_worker, alone),
        (dataset, alone_without_a_barrier),
        *(
            pytest.param(make, loop, marks=pytest.mark.matrix)
            for make, loop in [
                (loader, alone_without_a_barrier),
                (loader, whole_alone),
                (dataset, alone),
                (mixture, alone),
                (mixture, alone_without_a_barrier),
                (loader, resumed_alone),
            ]
        ),
    ],
)
def test_a_rank_that_begins_a_pass_alone_is_warned_of_once(folder, make, loop):
    found = run_ranks(in_rank, folder, make, loop)
    lines = [line for rank in found for line in rank]
    assert lines
    assert all(len(rank) <= 1 for rank in found)
    assert "call set_epoch(epoch) before each pass" in lines[0]


@pytest.mark.parametrize(
    ("make", "loop"),
    [
        (loader, together),
        (loader, alone_with_set_epoch),
        *(
            pytest.param(make, loop, marks=pytest.mark.matrix)
            for make, loop in [
                (loader, left_together),
                (loader_with_a_worker, together),
                (dataset, together),
                (dataset, left_together),
                (mixture, together),
            ]
        ),
    ],
)
def test_ranks_that_begin_the_same_passes_are_not_warned_of(folder, make, loop):
    assert run_ranks(in_rank, folder, make, loop) == [[], []]


def evaluating(rank, folder):
    dist.init_process_group("gloo")
    train, validation = dataset(folder), dataset(folder)

    def loop(rank, train):
        for _ in range(3):
            if rank == 0:
                list(validation)
            list(train)
            dist.barrier()

    return lines_of(rank, train, loop)


def test_a_rank_may_evaluate_alone_on_another_dataset(folder):
    assert run_ranks(evaluating, folder) == [[], []]


def resumed_sampler(rank, folder):
    dist.init_process_group("gloo")
    data = torchobj.ObjectMapDataset(f"file://{folder}/", transform=number_of)
    sampler = torchobj.ElasticDistributedSampler(data)
    loader = torchobj.DataLoader(data, batch_size=2, sampler=sampler)
    state = loader.state_dict()
    state["sampler"]["done"] = 4
    loader.load_state_dict(state)
    return lines_of(rank, loader, alone)


def test_a_rank_that_begins_the_resumed_pass_of_a_sampler_alone_is_warned_of(folder):
    lines = [line for rank in run_ranks(resumed_sampler, folder) for line in rank]
    assert len(lines) == 1
    assert "ElasticDistributedSampler: rank " in lines[0]
    assert "epoch 0 after 4 samples" in lines[0]
