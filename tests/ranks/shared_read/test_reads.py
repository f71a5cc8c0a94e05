"""`share=` of `torchobj.load`: ranks that read together, and those that join a read that is running."""

import contextlib
import dataclasses
import datetime
import os
import pathlib
import signal
import threading
import time
import zlib

import pytest
import torch
import torch.distributed as dist

import torchobj
from tests.support import ranks
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.ranks import run_ranks
from tests.support.shared_reads import MIB, count_chunks, use_small_parts
from torchobj import AdvancedOptions, exceptions
from torchobj.checkpoint.safetensors import stream
from torchobj.ranks import machine
from torchobj.ranks.shared_read import handshake, reads, ring
from torchobj.ranks.shared_read.hosts import Timing, exchange_pays
from torchobj.ranks.shared_read.participant import Participant

PATIENCE = datetime.timedelta(seconds=3)

#: Of 10 parts of 1 MiB, with an end in the middle of a part; more than the ends that every rank reads.
STATE = {f"w{number}": torch.randn(MIB // 4 + 7) for number in range(10)} | {"step": torch.tensor(3)}


@pytest.fixture
def config(bucket):
    return dataclasses.replace(bucket.config, advanced=AdvancedOptions(whole_below_bytes=MIB))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    use_small_parts(monkeypatch, slots=4)


def join_job(timeout=None):
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timeout)


def sums_of(state):
    return {name: zlib.crc32(tensor.numpy().tobytes()) for name, tensor in state.items()}


def same_as_saved(loaded):
    return sums_of(loaded) == sums_of(STATE)


def outcome(call):
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


def loaded_in_turn(rank, urls, config, share, hosts):
    """Whether each URL is loaded right, and the bytes of chunks that this rank has read of it."""
    join_job()
    machine._host_of = (lambda: f"host {rank % hosts}") if hosts else None
    # Whatever the load of the machine is.
    reads.exchange_pays = lambda timings: True
    counted, found = count_chunks(), []
    for url in urls:
        before = counted[0]
        found.append((same_as_saved(torchobj.load(url, config=config, share=share)), counted[0] - before))
    return found


def urls_of(bucket, config):
    urls = [f"{bucket.url}/{name}" for name in ("one.pt", "one.safetensors", "folder/")]
    for url in urls[:2]:
        torchobj.save(STATE, url, config=config)
    torchobj.save(STATE, urls[2], format="safetensors", max_shard_bytes=3 * MIB, config=config)
    return urls


#: Bytes of all chunks: the last tensor is in the end of the archive that each rank reads.
TOTAL = sum(tensor.nbytes for tensor in STATE.values())


@pytest.mark.providers("s3", GCS_IN_MATRIX)
def test_ranks_of_a_machine_read_each_byte_once(bucket, config, control):
    urls = urls_of(bucket, config)
    control.clear_requests()
    found = run_ranks(loaded_in_turn, urls, config, "host", 0, size=4)
    for number, url in enumerate(urls):
        assert [rank[number][0] for rank in found] == [True] * 4
        read = [rank[number][1] for rank in found]
        assert TOTAL - MIB <= sum(read) <= TOTAL + MIB // 64, url
        assert sum(size > 0 for size in read) >= 2
    # Each rank reads both ends of an archive, and the start of four files of safetensors.
    sent = sum(request.bytes_sent for request in control.requests("GetObject"))
    assert sent <= 3 * TOTAL + 4 * 7 * 530_000, [r.bytes_sent for r in control.requests("GetObject")]


@pytest.mark.parametrize("hosts", [2, 4])
def test_each_machine_reads_its_part_and_passes_it_on(bucket, config, hosts):
    urls = urls_of(bucket, config)
    found = run_ranks(loaded_in_turn, urls, config, "job", hosts, size=4)
    for number, url in enumerate(urls):
        assert [rank[number][0] for rank in found] == [True] * 4
        of_host = [sum(rank[number][1] for rank in found[host::hosts]) for host in range(hosts)]
        assert sum(of_host) <= TOTAL + MIB // 64, url
        assert max(of_host) <= TOTAL / hosts + MIB


def test_machines_read_for_themselves_if_passing_on_is_slower():
    assert exchange_pays([Timing(1e-9, 1e-9), Timing(1e-9, 1.9e-9)])
    assert not exchange_pays([Timing(1e-9, 1e-9), Timing(1e-9, 2.1e-9)])
    assert exchange_pays([Timing(0.0, 0.0)])


def in_containers(rank, url, config, share):
    """As in two containers of one machine that share neither a network nor a process namespace."""
    join_job()
    machine._host_of = lambda: "one machine"
    if rank % 2:
        handshake.receive = lambda *_, **__: None
    counted = count_chunks()
    return same_as_saved(torchobj.load(url, config=config, share=share)), counted[0]


@pytest.mark.parametrize("share", ["host", "job"])
def test_ranks_that_no_descriptor_reaches_are_on_machines_of_their_own(bucket, config, share):
    [url, *_] = urls_of(bucket, config)
    found = run_ranks(in_containers, url, config, share, size=3)
    assert [right for right, _ in found] == [True] * 3
    read = sum(count for _, count in found)
    assert (read > 1.8 * (TOTAL - MIB)) is (share == "host"), found


def with_machines_apart(rank, url, config):
    join_job()
    machine._host_of = lambda: f"host {rank % 2}"
    reads.exchange_pays = lambda timings: False
    return same_as_saved(torchobj.load(url, config=config, share="job"))


def test_machines_that_read_for_themselves_have_the_same_bytes(bucket, config):
    [url, *_] = urls_of(bucket, config)
    assert run_ranks(with_machines_apart, url, config, size=4) == [True] * 4


def loaded_differently(rank, urls, config):
    """What each rank gets of loads in which ranks differ, one after the other."""
    join_job(PATIENCE)
    pt, other, damaged = urls
    into = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    if rank == 1:
        into["w0"] = torch.zeros(3)
    return [
        outcome(lambda: torchobj.load(other if rank == 1 else pt, config=config, share="host")),
        outcome(lambda: torchobj.load(pt, config=config, share="host", keys=["w0"] if rank else ["w1"])),
        outcome(lambda: torchobj.load(pt, config=config, share="host", into=into)),
        outcome(lambda: torchobj.load(damaged if rank else pt, config=config, share="host")),
        outcome(lambda: torchobj.load(damaged, config=config, share="host")),
        outcome(lambda: torchobj.load(pt, config=config, share="host", progress=fail if rank else None)),
        outcome(lambda: torchobj.load(pt, config=config, share="job" if rank else "host")),
        # The group is as usable as before.
        outcome(lambda: same_as_saved(torchobj.load(pt, config=config, share="host"))),
    ]


def fail(progress):
    raise KeyError("a bar")


def test_what_differs_is_an_error_on_all_ranks(bucket, config):
    [url, *_] = urls_of(bucket, config)
    other, damaged = f"{bucket.url}/other.pt", f"{bucket.url}/damaged.pt"
    torchobj.save(STATE, other, config=config)
    store = torchobj.Store(bucket.url, config=config)
    data = bytearray(store.get("one.pt"))
    data[len(data) // 2] ^= 1
    store.put("damaged.pt", bytes(data))
    first, second = run_ranks(loaded_differently, [url, other, damaged], config)
    for of_rank in (first, second):
        assert of_rank[0][0] == "ConfigError"
        assert "one.pt" in of_rank[0][1]
        assert "other.pt" in of_rank[0][1]
        assert of_rank[1][0] == "ConfigError"
        assert "other ranges" in of_rank[1][1]
        assert of_rank[2][0] == "ConfigError"
        assert "w0" in of_rank[2][1]
        assert of_rank[3][0] == "ConfigError"
        assert of_rank[4][0] == "IntegrityError"
        assert of_rank[5] == ("KeyError", "'a bar'")
        assert of_rank[6][0] == "ConfigError"
        assert "share='job' on rank 1, 'host' on rank 0" in of_rank[6][1]
        assert of_rank[7] is True


def with_a_missing_rank(rank, url, config):
    join_job(PATIENCE)
    torchobj.load(url, config=config, share="host")
    if rank == 1:
        return None
    return outcome(lambda: torchobj.load(url, config=config, share="host"))


def test_a_rank_that_does_not_come_ends_the_wait_of_the_others(bucket, config):
    [url, *_] = urls_of(bucket, config)
    began_s = time.monotonic()
    first, _ = run_ranks(with_a_missing_rank, url, config)
    assert first[0] == "CheckpointError"
    assert "another rank is gone" in first[1]
    assert time.monotonic() - began_s < 30


def with_a_killed_rank(rank, url, config, share):
    join_job(datetime.timedelta(seconds=20))
    machine._host_of = (lambda: f"host {rank}") if share == "job" else None
    torchobj.load(url, config=config, share="host")
    if rank == 2:
        Participant._copy = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return outcome(lambda: torchobj.load(url, config=config, share=share))


def killed_ranks(url, config, share):
    results = ranks._context.Queue()

    def main(rank):
        results.put((rank, with_a_killed_rank(rank, url, config, share)))
        results.close()
        results.join_thread()
        os._exit(0)

    with ranks.started(main, size=3):
        return dict(results.get(timeout=60) for _ in range(2))


@pytest.mark.parametrize("share", ["host", "job"])
def test_a_killed_rank_is_an_error_on_the_others(bucket, config, share):
    [url, *_] = urls_of(bucket, config)
    found = killed_ranks(url, config, share)
    assert sorted(found) == [0, 1]
    for name, message in found.values():
        assert name == "CheckpointError"
        assert "another rank is gone" in message


def failing_in_the_middle(rank, url, config, share, how, called):
    """An error of one rank while the others wait for slots, and its time."""
    join_job(datetime.timedelta(seconds=60))
    machine._host_of = (lambda: f"host {rank // 2}") if share == "job" else None
    torchobj.load(url, config=config, share="host")
    real = getattr(Participant, how)

    def failing(self, *given):
        if rank == 1:
            called.set()
            raise KeyError("of one rank")
        # Otherwise the others might leave nothing to this one.
        assert called.wait(30)
        return real(self, *given)

    setattr(Participant, how, failing)
    began_s = time.monotonic()
    found = outcome(lambda: torchobj.load(url, config=config, share=share))
    setattr(Participant, how, real)
    return (
        found,
        time.monotonic() - began_s,
        outcome(lambda: same_as_saved(torchobj.load(url, config=config, share=share))),
    )


@pytest.mark.parametrize(("share", "how"), [("host", "_copy"), ("host", "_read_chunks"), ("job", "_copy")])
def test_an_error_of_one_rank_ends_the_read_of_all(bucket, config, share, how):
    [url, *_] = urls_of(bucket, config)
    called = ranks._context.Event()
    for found, took_s, after in run_ranks(failing_in_the_middle, url, config, share, how, called, size=3):
        assert found == ("KeyError", "'of one rank'")
        # Not the timeout, of which every rank has a minute.
        assert took_s < 30
        assert after is True


def joined_when_it_happens(rank, urls, config, barrier):
    join_job()
    url, other = urls
    only_first = outcome(lambda: same_as_saved(torchobj.load(url, config=config))) if rank == 0 else True
    barrier.wait(30)
    # One after the other.
    for turn in range(2):
        if rank == turn:
            only_first = only_first and same_as_saved(torchobj.load(url, config=config))
        barrier.wait(30)
    with_other = same_as_saved(torchobj.load(other if rank == 1 else url, config=config))
    return only_first, with_other


def test_reads_that_are_not_collective_wait_for_no_rank(bucket, config):
    [url, *_] = urls_of(bucket, config)
    other = f"{bucket.url}/other.pt"
    torchobj.save(STATE, other, config=config)
    barrier = ranks._context.Barrier(2)
    assert run_ranks(joined_when_it_happens, [url, other], config, barrier) == [(True, True)] * 2


def read_at_the_same_time(rank, url, config, barrier, killed):
    """Rank 0 begins, and its first read waits until the others have joined; it may be killed then."""
    join_job()
    counted, real, first = count_chunks(), Participant._read_chunks, threading.Lock()

    def held(self, claims):
        if first.acquire(blocking=False):
            barrier.wait(30)
            barrier.wait(30)
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(self, claims)

    def joined(self, pool, real=Participant._run):
        barrier.wait(30)
        return real(self, pool)

    if rank == 0:
        Participant._read_chunks = held
    else:
        Participant._run = joined
        barrier.wait(30)
    return same_as_saved(torchobj.load(url, config=config)), counted[0]


def test_a_read_that_is_running_is_joined(bucket, config, monkeypatch):
    use_small_parts(monkeypatch, slots=16)
    [url, *_] = urls_of(bucket, config)
    found = run_ranks(read_at_the_same_time, url, config, ranks._context.Barrier(3), False, size=3)
    assert [right for right, _ in found] == [True] * 3
    assert sum(count for _, count in found) <= TOTAL + MIB // 64


def test_the_others_go_on_when_the_reading_rank_is_killed(bucket, config):
    [url, *_] = urls_of(bucket, config)
    results, barrier = ranks._context.Queue(), ranks._context.Barrier(3)

    def main(rank):
        results.put((rank, read_at_the_same_time(rank, url, config, barrier, True)))
        results.close()
        results.join_thread()
        os._exit(0)

    with ranks.started(main, size=3):
        found = dict(results.get(timeout=60) for _ in range(2))
    assert sorted(found) == [1, 2]
    assert [right for right, _ in found.values()] == [True] * 2


def stopped(rank, url, config, barrier):
    """Rank 0 claims all chunks, and reads none until the other rank has gone on alone."""
    join_job()
    if rank == 1:
        barrier.wait(30)
        right = same_as_saved(torchobj.load(url, config=config))
        barrier.wait(30)
        return right
    real, first = Participant._read_chunks, threading.Lock()

    def held(self, claims):
        if first.acquire(blocking=False):
            barrier.wait(30)
            barrier.wait(30)
        return real(self, claims)

    Participant._read_chunks = held
    return same_as_saved(torchobj.load(url, config=config))


def test_a_rank_that_delivers_nothing_is_not_waited_for(bucket, config, monkeypatch):
    monkeypatch.setattr(reads, "_STALL_S", 0.3)
    [url, *_] = urls_of(bucket, config)
    assert run_ranks(stopped, url, config, ranks._context.Barrier(2)) == [True] * 2


def overlapping(rank, urls, config):
    """A collective load inside a loop over a collective stream, which reads ahead."""
    join_job(datetime.timedelta(seconds=20))
    pt, folder = urls
    found = {}
    for name, tensor in torchobj.stream_tensors(folder, config=config, share="host"):
        found[name] = tensor
        if len(found) == 1:
            inner = torchobj.load(pt, config=config, share="job")
    return same_as_saved(inner), same_as_saved(found)


def test_collective_loads_may_overlap(bucket, config, monkeypatch):
    monkeypatch.setattr(stream, "_GROUP_BYTES", MIB)
    monkeypatch.setattr(stream, "_IN_FLIGHT_BYTES", 2 * MIB)
    pt, _, folder = urls_of(bucket, config)
    assert run_ranks(overlapping, [pt, folder], config) == [(True, True)] * 2


def without_a_boot_id(rank, url, config):
    join_job()
    reads.Path = lambda path: pathlib.Path("/nowhere", path.lstrip("/"))
    return [same_as_saved(torchobj.load(url, config=config, share=share)) for share in ("host", "job", "auto")]


def test_ranks_of_a_system_that_shows_no_boot_id_are_on_machines_of_their_own(bucket, config):
    [url, *_] = urls_of(bucket, config)
    assert run_ranks(without_a_boot_id, url, config) == [[True] * 3] * 2


def with_an_invalid_url(rank, url, config):
    join_job(PATIENCE)
    return outcome(lambda: torchobj.load("s3:/b" if rank else url, config=config, share="host"))


def test_an_invalid_url_of_one_rank_is_an_error_on_all(bucket, config):
    [url, *_] = urls_of(bucket, config)
    found = run_ranks(with_an_invalid_url, url, config)
    assert [name for name, _ in found] == ["ConfigError"] * 2


def test_arguments_are_checked():
    with pytest.raises(exceptions.ConfigError, match="share='all': must be 'auto', 'host', 'job' or None"):
        torchobj.load("memory://b/k", share="all")
    with pytest.raises(exceptions.ConfigError, match="process_group: is for share='host' and share='job'"):
        torchobj.load("memory://b/k", process_group=object())


@pytest.mark.parametrize("share", ["host", "job"])
def test_without_other_ranks_a_read_is_as_usual(share):
    torchobj.save(STATE, "memory://shared/one.pt")
    assert same_as_saved(torchobj.load("memory://shared/one.pt", share=share))


def test_credentials_are_part_of_what_is_compared(monkeypatch):
    config = torchobj.StoreConfig()
    before = reads._identity_of(config)
    assert before == reads._identity_of(torchobj.StoreConfig())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    assert reads._identity_of(config) != before
    monkeypatch.undo()
    with_keys = torchobj.S3Options(access_key_id="a", secret_access_key="b")
    assert reads._identity_of(torchobj.StoreConfig(s3=with_keys)) != before


def test_ranks_of_one_machine_are_grouped_up_to_the_size_of_a_ring(monkeypatch):
    monkeypatch.setattr(reads, "MAX_PARTICIPANTS", 2)
    assert reads._firsts(["a", "b", "a", "a", "b"]) == [0, 1, 0, 3, 1]


def test_a_descriptor_that_does_not_arrive_leaves_a_rank_alone(monkeypatch):
    # As between containers that share neither a network nor a process namespace.
    monkeypatch.setattr(reads, "_PATIENCE_S", 0.0)
    with contextlib.ExitStack() as stack:
        assert reads._received("torchobj-missing", bytes(32), stack, 0) is None
    assert handshake.receive("torchobj-missing", bytes(32)) is None
    assert ring.IS_SUPPORTED
