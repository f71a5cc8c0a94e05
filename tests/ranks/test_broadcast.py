"""Two ranks of a job use one listing, or detect that their listings differ."""

import datetime
import io
import multiprocessing
import os
import signal
import tarfile
import threading

import pytest
import torch
import torch.distributed as dist

import torchobj
from tests.support import ranks
from tests.support.long_tables import often
from tests.support.ranks import run_ranks, started
from torchobj import exceptions
from torchobj.ranks import broadcast


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


def init_anew(rank):
    """Ends the process group and makes another one in the same store, as after a failure that the job survives."""
    dist.destroy_process_group()
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    # gloo itself could read the address of the earlier group.
    store.delete_key(f"default_pg/0//cpu//0/{rank}")
    number = store.add("test/anew", 1)
    both = f"test/anew/{(number + 1) // 2}"
    store.wait([both]) if number % 2 else store.set(both, "yes")
    dist.init_process_group("gloo")


def counts(loader):
    return sum(1 for _ in loader)


def one_more_use(rank, bucket, config, kind):
    dist.init_process_group("gloo")
    if rank == 0:
        len(kind_of(kind, bucket, config).manifest)
        add(bucket, config, "added")
    dist.barrier()
    # Creates what it iterates over, as a script does.
    data = kind_of(kind, bucket, config)
    length = len(data.manifest)
    if isinstance(data, torch.utils.data.IterableDataset):
        return length, list(data)
    return length, list(torchobj.ElasticDistributedSampler(data))


def kind_of(kind, bucket, config):
    url = f"s3://{bucket}/train/"
    if kind == "map":
        return torchobj.S3MapDataset(url, config=config, transform=key_of)
    return torchobj.S3IterableDataset(url, config=config, transform=key_of, enable_sharding=True)


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_rank_that_used_a_dataset_once_more_does_not_get_another_listing_silently(filled, kind):
    first, (name, text, _) = run_ranks(one_more_use, filled.name, filled.config, kind)
    assert first[0] == 11
    assert name == exceptions.ManifestMismatchError.__name__
    assert "rank 1 uses 10 objects, rank 0 uses 11" in text
    assert "use each dataset equally often on all ranks" in text


def one_more_shard(rank, bucket, config):
    dist.init_process_group("gloo")
    if rank == 0:
        len(torchobj.TarMapDataset(f"s3://{bucket}/tar/", config=config))
        torchobj.Store(f"s3://{bucket}", config=config).put("tar/b.tar", tar_of(3))
    dist.barrier()
    data = torchobj.TarMapDataset(f"s3://{bucket}/tar/", config=config)
    return len(list(torchobj.ElasticDistributedSampler(data)))


def tar_of(count):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for number in range(count):
            member = tarfile.TarInfo(f"{number:03}.txt")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
    return made.getvalue()


def test_shards_and_their_index_are_compared_too(bucket):
    bucket.write("tar/a.tar", tar_of(4))
    first, (name, text, _) = run_ranks(one_more_shard, bucket.name, bucket.config)
    assert first == 4
    assert name == exceptions.ManifestMismatchError.__name__
    assert "and they differ" in text


def alone_first(rank, bucket, config):
    """Rank 0 iterates over a part alone, and then both ranks do."""
    dist.init_process_group("gloo")
    data = kind_of("iterable", bucket, config)
    if rank == 0:
        next(iter(data))
        next(iter(torchobj.S3IterableDataset(f"s3://{bucket}/train/1", config=config)))
    return len(list(data)) + len(list(torchobj.DataLoader(kind_of("map", bucket, config), batch_size=None)))


def test_rank_0_may_begin_a_pass_alone(filled):
    assert run_ranks(alone_first, filled.name, filled.config) == [15, 15]


def rank_0_begins_no_pass(rank, bucket, config):
    dist.init_process_group("gloo")
    waits = []
    for _ in range(3):
        data = kind_of("iterable", bucket, config)
        len(data.manifest)
        broadcast._PASS_S = 0.1 if not waits else 1000.0
        waits.append(len(list(data)) if rank == 1 else 5)
    dist.barrier()
    return waits


def test_a_rank_waits_once_for_one_that_begins_no_pass(filled):
    assert run_ranks(rank_0_begins_no_pass, filled.name, filled.config) == [[5, 5, 5], [5, 5, 5]]


def only_rank_1(rank, bucket, config):
    dist.init_process_group("gloo")
    broadcast._PASS_S = 0.2
    data = kind_of("iterable", bucket, config)
    assert len(data.manifest) == 10
    found = len(list(data)) if rank == 1 else None
    dist.barrier()
    return found, len(list(data))


def test_another_rank_may_begin_a_pass_alone_after_some_seconds(filled):
    assert run_ranks(only_rank_1, filled.name, filled.config) == [(None, 5), (5, 5)]


def later_than_the_others(rank, bucket, config):
    dist.init_process_group("gloo")
    broadcast._PASS_S = 0.2
    if rank == 0:
        len(kind_of("map", bucket, config))
        add(bucket, config, "added")
    dist.barrier()
    data = kind_of("map", bucket, config)
    length = len(data)
    if rank == 0:
        dist.barrier()
    found = len(list(torchobj.ElasticDistributedSampler(data)))
    if rank == 1:
        dist.barrier()
    return length, found


def test_rank_0_names_a_rank_that_began_its_pass_earlier_with_another_listing(filled):
    (name, text, _), second = run_ranks(later_than_the_others, filled.name, filled.config)
    assert second == (10, 5)
    assert name == exceptions.ManifestMismatchError.__name__
    assert "rank 1 uses 10 objects, rank 0 uses 11" in text


def new_group(rank, bucket, config):
    dist.init_process_group("gloo")
    kept = kind_of("map", bucket, config)
    found = [len(kept), len(kind_of("map", bucket, config))]
    dist.barrier()
    if rank == 0:
        add(bucket, config, "added")
    init_anew(rank)
    # The first rank may be later than the second.
    return [*found, len(kind_of("map", bucket, config)), len(kept), len(kept.manifest)]


def test_a_new_process_group_does_not_read_the_listings_of_the_earlier_one(filled):
    assert run_ranks(new_group, filled.name, filled.config) == [[10, 10, 11, 10, 10]] * 2


def kept_by_one(rank, bucket, config):
    dist.init_process_group("gloo")
    data = kind_of("map", bucket, config)
    found = len(data)
    init_anew(rank)
    # The process of the second rank was replaced.
    if rank == 1:
        data = kind_of("map", bucket, config)
    return found, len(data), len(list(torchobj.ElasticDistributedSampler(data)))


def test_a_rank_that_joins_a_new_process_group_gets_the_listing_that_rank_0_has(filled):
    assert run_ranks(kept_by_one, filled.name, filled.config) == [(10, 10, 5)] * 2


def listed_by_rank_0_before(rank, bucket, config):
    data = kind_of("map", bucket, config)
    before = len(data) if rank == 0 else 10
    dist.init_process_group("gloo")
    return before, len(data)


def test_a_listing_that_only_rank_0_made_before_the_job_began_is_sent(filled):
    assert run_ranks(listed_by_rank_0_before, filled.name, filled.config) == [(10, 10)] * 2


def attempt(rank, bucket, config, prefix):
    dist.init_process_group("gloo")
    found = len(torchobj.S3MapDataset(f"s3://{bucket}/train/", config=config))
    try:
        other = len(torchobj.S3MapDataset(f"s3://{prefix}/x/", config=config))
    except exceptions.TorchobjError:
        other = "failed"
    dist.barrier()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    store.delete_key(f"default_pg/0//cpu//0/{rank}")
    return found, other


def test_a_restarted_job_does_not_read_the_listings_and_failures_of_an_earlier_attempt(filled, monkeypatch):
    store = ranks.job_store()
    monkeypatch.setattr(ranks, "job_store", lambda: store)
    assert run_ranks(attempt, filled.name, filled.config, "later-bucket") == [(10, "failed")] * 2
    filled.write("train/added", b"x")
    filled.boto.create_bucket(Bucket="later-bucket")
    filled.boto.put_object(Bucket="later-bucket", Key="x/1", Body=b"x")
    assert run_ranks(attempt, filled.name, filled.config, "later-bucket") == [(11, 1)] * 2


def different_urls(rank, bucket, config):
    dist.init_process_group("gloo")
    broadcast._OTHER_NAMES_S = 0.2
    same = len(torchobj.S3MapDataset(f"s3://{bucket}/train/1", config=config))
    try:
        return same, len(torchobj.S3MapDataset(f"s3://{bucket}/{('train', 'other')[rank]}/", config=config))
    finally:
        if rank == 1:
            dist.distributed_c10d._get_default_store().set("told", "yes")
        else:
            dist.distributed_c10d._get_default_store().wait(["told"])


def test_different_urls_are_named_soon(filled):
    first, (name, text, _) = run_ranks(different_urls, filled.name, filled.config)
    assert first == (1, 10)
    assert name == exceptions.ManifestMismatchError.__name__
    assert f"rank 1 waits for rank 0 to list s3://{filled.name}/other/" in text
    assert f"rank 0 lists s3://{filled.name}/train/" in text


def missing_bucket(rank, config):
    dist.init_process_group("gloo")
    return len(torchobj.S3MapDataset("s3://no-such-bucket/x/", config=config))


def test_the_error_of_rank_0_is_raised_on_all_ranks(bucket):
    results = run_ranks(missing_bucket, bucket.config)
    assert results[0][0] == "BucketNotFoundError"
    assert results[1][0] == "BucketNotFoundError"
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
@pytest.mark.parametrize(("context", "workers"), often(1, [("fork", 2), ("spawn", 1), ("spawn", 2)]))
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
        broadcast._TIMEOUT = datetime.timedelta(seconds=0.2)
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
    port = 0 if rank == 0 else ports.get(timeout=150)
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
        text = told.get(timeout=150)
    assert "the store of the process group failed" in text
    assert len(text.splitlines()) == 1
