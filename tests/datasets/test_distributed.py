"""Two ranks of a job use one listing, or detect that their listings differ."""

import datetime
import multiprocessing
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

import torchobj
from tests.support.ranks import run_ranks, started
from torchobj import exceptions
from torchobj.datasets import manifest_broadcast


@pytest.fixture
def filled(bucket):
    for number in range(10):
        bucket.write(f"train/{number}", b"x")
    return bucket


def add(bucket, config, number):
    torchobj.Store(f"s3://{bucket}", config=config).put(f"train/{number}", b"x")


def listed_together(rank, bucket, config):
    dist.init_process_group("gloo")
    samples = torchobj.S3MapDataset(f"s3://{bucket}/train/", config=config, transform=lambda reader: reader.key)
    if rank == 0:
        count = len(samples)
        add(bucket, config, "added")
    dist.barrier()
    if rank == 1:
        count = len(samples)
    return count, samples.manifest.digest(), samples[count - 1]


def test_an_object_added_between_two_listings_is_on_all_ranks_or_none(filled):
    results = run_ranks(listed_together, filled.name, filled.config)
    assert results[0] == results[1]
    assert results[0][0] == 10
    assert "train/added" in filled.keys()


def test_listings_made_before_the_job_began_are_compared(filled):
    listed = multiprocessing.get_context("fork").Event()
    results = run_ranks(late_with_a_gate, filled.name, filled.config, listed)
    assert results[0] == 10
    name, text, _ = results[1]
    assert name == exceptions.ManifestMismatchError.__name__
    assert "rank 1 listed 11 objects, rank 0 listed 10" in text


def late_with_a_gate(rank, bucket, config, listed):
    samples = torchobj.S3MapDataset(f"s3://{bucket}/train/", config=config)
    if rank == 0:
        before = len(samples)
        add(bucket, config, "added")
        listed.set()
    else:
        assert listed.wait(60)
        before = len(samples)
    dist.init_process_group("gloo")
    list(torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True, collate_fn=len))
    return before


def equal_late(rank, bucket, config):
    samples = torchobj.S3MapDataset(f"s3://{bucket}/train/", config=config)
    before = len(samples)
    dist.init_process_group("gloo")
    return before, len(list(torch.utils.data.DataLoader(samples, batch_size=5, collate_fn=len)))


def test_equal_listings_made_before_the_job_began_are_accepted(filled):
    assert run_ranks(equal_late, filled.name, filled.config) == [(10, 2), (10, 2)]


def missing_bucket(rank, config):
    dist.init_process_group("gloo")
    return len(torchobj.S3MapDataset("s3://no-such-bucket/x/", config=config))


def test_the_error_of_rank_0_is_raised_on_all_ranks(bucket):
    results = run_ranks(missing_bucket, bucket.config)
    assert results[0][0] == "BucketNotFoundError"
    assert results[1][0] == "TorchobjError"
    assert "BucketNotFoundError" in results[1][1]
    assert "NoSuchBucket" in results[1][1]


def only_rank_0(rank, bucket, config):
    dist.init_process_group("gloo")
    samples = torchobj.S3MapDataset(f"s3://{bucket}/train/", config=config)
    return len(samples) if rank == 0 else None


def test_rank_0_does_not_wait_for_other_ranks(filled):
    assert run_ranks(only_rank_0, filled.name, filled.config) == [10, None]


def key_of(reader):
    return reader.key


def sharded(rank, bucket, config, context, workers):
    samples = torchobj.S3IterableDataset.from_prefix(
        f"s3://{bucket}/train/", s3client_config=config, enable_sharding=True, transform=key_of
    )
    dist.init_process_group("gloo")
    loader = torch.utils.data.DataLoader(samples, batch_size=None, num_workers=workers, multiprocessing_context=context)
    return list(loader)


# Without forkserver: the forked ranks would use the server of earlier tests.
@pytest.mark.parametrize(
    ("context", "workers"), [("fork", 2), ("spawn", 1), pytest.param("spawn", 2, marks=pytest.mark.matrix)]
)
def test_ranks_and_workers_share_an_iterable_created_before_the_job(filled, context, workers):
    one, two = run_ranks(sharded, filled.name, filled.config, context, workers)
    assert sorted(one + two) == [f"train/{number}" for number in range(10)]
    assert len(one) in (4, 5, 6)


def evenly(rank, bucket, config, uneven):
    samples = torchobj.S3IterableDataset(
        f"s3://{bucket}/train/",
        config=config,
        limit=9,
        shuffle=True,
        enable_sharding=True,
        uneven=uneven,
        transform=key_of,
    )
    dist.init_process_group("gloo")
    samples.set_epoch(1)
    return list(torchobj.DataLoader(samples, batch_size=None, num_workers=2))


@pytest.mark.parametrize(("uneven", "each", "different"), [("drop", 4, 8), ("pad", 5, 9)])
def test_ranks_of_an_iterable_have_equally_many_samples(filled, uneven, each, different):
    shares = run_ranks(evenly, filled.name, filled.config, uneven)
    assert [len(share) for share in shares] == [each, each]
    assert len({key for share in shares for key in share}) == different


def sharded_by_hand(rank, bucket, config):
    dist.init_process_group("gloo")
    uris = [f"s3://{bucket}/train/{number}" for number in range(9)]
    settings = {"s3client_config": config, "transform": lambda reader: reader.key}
    samples = torchobj.S3MapDataset.from_objects(uris[rank::2], **settings)
    in_a_row = torchobj.S3IterableDataset.from_objects(uris[rank::2], **settings)
    return list(samples), list(in_a_row), len(samples)


def test_named_objects_belong_to_their_rank(filled):
    keys = [f"train/{number}" for number in range(9)]
    assert run_ranks(sharded_by_hand, filled.name, filled.config) == [
        (keys[0::2], keys[0::2], 5),
        (keys[1::2], keys[1::2], 4),
    ]


def named_before_the_job(rank, bucket, config):
    uris = [f"s3://{bucket}/train/{number}" for number in range(9)]
    samples = torchobj.S3MapDataset.from_objects(uris[rank::2], s3client_config=config)
    before = len(samples)
    dist.init_process_group("gloo")
    return before, len(samples), samples[0].key


def test_objects_named_before_the_job_began_are_not_compared(filled):
    assert run_ranks(named_before_the_job, filled.name, filled.config) == [(5, 5, "train/0"), (4, 4, "train/1")]


def interrupted(rank, bucket, config):
    dist.init_process_group("gloo")
    samples = torchobj.S3MapDataset(f"s3://{bucket}/train/", config=config)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        # Lists nothing, and stays until the other rank has finished.
        store.wait(["interrupted"])
        return None
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        len(samples)
    store.set("interrupted", "yes")
    return "interrupted"


def test_ctrl_c_interrupts_the_wait_for_rank_0(filled):
    assert run_ranks(interrupted, filled.name, filled.config) == [None, "interrupted"]


def left_alone(rank, bucket, config):
    dist.init_process_group("gloo")
    samples = torchobj.S3MapDataset(f"s3://{bucket}/train/", config=config)
    if rank == 1:
        manifest_broadcast._TIMEOUT = datetime.timedelta(seconds=0.2)
        try:
            len(samples)
        finally:
            dist.distributed_c10d._get_default_store().set("given up", "yes")
    else:
        dist.distributed_c10d._get_default_store().wait(["given up"])


def test_the_timeout_of_a_waiting_rank_names_the_likely_cause(filled):
    _, (name, text, _) = run_ranks(left_alone, filled.name, filled.config)
    assert name == "TorchobjError"
    assert "waited 0:00:00.200000 for rank 0 to list" in text
    assert "check that every rank creates the same datasets" in text


def rank_0_goes(rank, bucket, config, ports, told):
    # Rank 0 hosts the job's store, as it does without torchrun.
    port = 0 if rank == 0 else ports.get(timeout=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        ports.put(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    samples = torchobj.S3MapDataset(f"s3://{bucket}/train/", config=config)
    if rank == 0:
        store.wait(["waiting"])
        return
    store.set("waiting", "yes")
    try:
        len(samples)
    except torchobj.TorchobjError as error:
        told.put(str(error))


def test_a_rank_does_not_wait_for_a_rank_0_that_exited(filled):
    ports, told = (multiprocessing.get_context("fork").Queue() for _ in range(2))
    with started(rank_0_goes, filled.name, filled.config, ports, told):
        text = told.get(timeout=60)
    assert "the store of the process group failed" in text
    assert len(text.splitlines()) == 1
