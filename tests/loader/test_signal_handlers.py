"""Signal handlers of Python that read the dataset, while their process waits for an object or a listing."""

import signal

import pytest
import torch

import torchobj

COUNT = 4
#: What the handlers of a worker have read.
READ = []


@pytest.fixture
def data(bucket, control):
    store = torchobj.Store(bucket.url, config=bucket.config)
    for number in range(COUNT):
        store.put(f"{number}", b"%d" % number)
    control.faults({"operation": "GetObject", "action": {"delay_first_byte_s": 0.7}})
    return torchobj.S3MapDataset(bucket.url, config=bucket.config, transform=lambda reader: reader.read().decode())


def read_at_a_signal(data, *, fails=False):
    def handler(*_):
        READ.append(data[COUNT - 1])
        if fails:
            raise ZeroDivisionError

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)


def start_worker(_):
    READ.clear()
    read_at_a_signal(torch.utils.data.get_worker_info().dataset)


def with_what_handlers_read(samples):
    return samples, list(READ)


@pytest.fixture
def alarm():
    before = signal.getsignal(signal.SIGALRM)
    READ.clear()
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_handler_in_a_worker_that_waits_reads_a_sample(data):
    loader = torchobj.DataLoader(
        data,
        batch_size=COUNT,
        num_workers=1,
        worker_init_fn=start_worker,
        collate_fn=with_what_handlers_read,
        multiprocessing_context="fork",
        timeout=150,
    )
    assert list(loader) == [(["0", "1", "2", "3"], ["3"])]


@pytest.mark.usefixtures("alarm")
def test_a_handler_in_the_process_of_the_loop_reads_a_sample(data):
    len(data)
    read_at_a_signal(data)
    assert list(torchobj.DataLoader(data, batch_size=COUNT, collate_fn=list)) == [["0", "1", "2", "3"]]
    assert READ == ["3"]


@pytest.mark.usefixtures("alarm")
def test_a_handler_that_runs_during_the_listing_reads_a_sample(data, control):
    control.faults({"operation": "ListObjectsV2", "times": 1, "action": {"delay_first_byte_s": 0.7}})
    read_at_a_signal(data)
    assert len(data) == COUNT
    assert READ == ["3"]


@pytest.mark.usefixtures("alarm")
def test_a_handler_that_raises_ends_the_wait_and_the_next_read_works(data):
    len(data)
    read_at_a_signal(data, fails=True)
    with pytest.raises(ZeroDivisionError):
        data[0]
    assert (READ, data[1]) == (["3"], "1")
