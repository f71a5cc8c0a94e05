"""The ring: which chunk is in which slot, and who reads it."""

import multiprocessing
import os
import random
import signal
import time

import pytest

from torchobj.ranks.shared_read import ring as ring_module
from torchobj.ranks.shared_read.ring import Ring, RingShape

SHAPE = RingShape(chunks=6, pieces=6, slots=2, chunk_bytes=4096)

_context = multiprocessing.get_context("fork")


@pytest.fixture
def ring():
    created = Ring.create(SHAPE)
    yield created
    created.close()


@pytest.fixture
def other(ring):
    joined = Ring.join(ring.descriptor())
    yield joined
    joined.close()


def chunks_of(claims):
    return [claim.chunk for claim in claims]


def claim(ring, count=1, **settings):
    with ring.locked():
        return ring.claim(count, range(SHAPE.chunks), **({"waits": True} | settings))


def publish(ring, *claims):
    with ring.locked():
        for each in claims:
            ring.publish(each.chunk)


def receive(ring):
    with ring.locked():
        found = ring.ready()
        for each in found:
            ring.receive(each.chunk)
    return chunks_of(found)


def test_a_slot_is_used_again_when_all_have_received_its_chunk(ring, other):
    claims = claim(ring, 2)
    assert chunks_of(claims) == [0, 1]
    assert claim(other, 2) == []
    ring.slot(claims[0].slot)[:3] = b"abc"
    publish(ring, *claims)
    assert bytes(other.slot(claims[0].slot)[:3]) == b"abc"
    assert receive(ring) == [0, 1]
    # The slowest one holds it back.
    assert claim(ring, 2) == []
    assert receive(other) == [0, 1]
    assert chunks_of(claim(other, 2)) == [2, 3]


def test_one_who_leaves_holds_nothing_back(ring, other):
    publish(ring, *claim(ring, 2))
    receive(ring)
    with other.locked():
        other.leave()
    # Alone it needs no slot.
    assert [(each.chunk, each.slot) for each in claim(ring, 2)] == [(2, None), (3, None)]


def test_the_first_chunks_stay_for_those_who_join_later(ring):
    claims = claim(ring, 3, waits=False)
    # The third one has no slot.
    assert [each.slot is None for each in claims] == [False, False, True]
    publish(ring, *claims[:2])
    assert receive(ring) == [0, 1]
    with ring.locked():
        ring.receive(2)
    later = Ring.join(ring.descriptor())
    assert receive(later) == [0, 1]
    # What only the first one has is read again.
    assert chunks_of(claim(later, 9, waits=False)) == [2, 3, 4, 5]
    later.close()


def test_a_failed_read_is_made_by_another_one(ring, other):
    [first] = claim(ring)
    with ring.locked():
        ring.give_back(first.chunk)
    assert chunks_of(claim(other)) == [0]


def die_with_a_claim(descriptor, claimed):
    own = Ring.join(descriptor)
    # The lock of its parent's file would be left.
    claim(own, 2)
    with own.locked():
        claimed.set()
        signal.pause()


def test_a_killed_process_leaves_neither_lock_nor_claim(ring):
    claimed = _context.Event()
    process = _context.Process(target=die_with_a_claim, args=(os.dup(ring.descriptor()), claimed))
    process.start()
    assert claimed.wait(30)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert claim(ring, 2) == []
    with ring.locked():
        assert ring.active() == 2
        ring.leave_dead()
        assert ring.active() == 1
    assert chunks_of(claim(ring, 2)) == [0, 1]


def die_with_a_child(descriptor, child_pid):
    own = Ring.join(descriptor)
    claim(own, 2)
    if os.fork() == 0:
        # After the fork has closed what it has to.
        child_pid.value = os.getpid()
    signal.pause()


def test_a_child_that_outlives_its_parent_keeps_no_lock(ring):
    child_pid = _context.Value("i", 0)
    process = _context.Process(target=die_with_a_child, args=(os.dup(ring.descriptor()), child_pid))
    process.start()
    until_s = time.monotonic() + 30
    while not child_pid.value and time.monotonic() < until_s:
        os.sched_yield()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with ring.locked():
        assert ring.leave_dead()
    os.kill(child_pid.value, signal.SIGKILL)


def hold_the_lock(descriptor, is_held):
    own = Ring.join(descriptor)
    with own.locked():
        is_held.set()
        signal.pause()


def test_a_lock_that_is_not_released_is_an_error(ring, monkeypatch):
    monkeypatch.setattr(ring_module, "_LOCK_S", 0.1)
    is_held = _context.Event()
    process = _context.Process(target=hold_the_lock, args=(os.dup(ring.descriptor()), is_held))
    process.start()
    assert is_held.wait(30)
    with pytest.raises(ring_module.StalledError, match="holds the lock of a shared read"), ring.locked():
        pass
    process.kill()
    process.join()
    with ring.locked():
        pass


def test_a_refused_mapping_leaves_no_descriptor(monkeypatch):
    def refused(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(ring_module.mmap, "mmap", refused)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="allocate"):
        Ring.create(SHAPE)
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_sealed_files_of_the_right_size_are_joined(ring):
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.write(unsealed, bytes(1 << 20))
    assert Ring.join(unsealed) is None
    import fcntl

    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    assert Ring.join(unsealed) is None
    os.close(unsealed)


def test_a_full_ring_is_not_joined(ring, monkeypatch):
    with ring.locked():
        ring._participants[:] = 1
    assert Ring.join(ring.descriptor()) is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("waits", [True, False])
def test_in_any_order_each_participant_receives_each_chunk_once(ring, seed, waits):
    choice, rings, joined = random.Random(seed), [ring], 1
    claims, received = {0: []}, {0: []}
    if waits:
        rings += [Ring.join(ring.descriptor()) for _ in range(2)]
        claims, received = {0: [], 1: [], 2: []}, {0: [], 1: [], 2: []}
    for _ in range(2000):
        if not waits and len(rings) < 3 and choice.random() < 0.05:
            rings.append(Ring.join(ring.descriptor()))
            claims[joined], received[joined] = [], []
            joined += 1
        number = choice.randrange(len(rings))
        own = rings[number]
        action = choice.random()
        if action < 0.4:
            claims[number] += claim(own, choice.randint(1, 3), waits=waits)
            slots = [each.slot for of_one in claims.values() for each in of_one if each.slot is not None]
            assert len(slots) == len(set(slots))
        elif action < 0.7 and claims[number]:
            done = claims[number].pop(choice.randrange(len(claims[number])))
            with own.locked():
                if done.slot is None:
                    own.receive(done.chunk)
                    received[number].append(done.chunk)
                else:
                    own.publish(done.chunk)
        else:
            received[number] += receive(own)
        with ring.locked():
            is_done = not any(each.needed(range(SHAPE.chunks)) for each in rings)
        if is_done:
            break
    assert is_done
    assert all(sorted(each) == list(range(SHAPE.chunks)) for each in received.values())
    for each in rings[1:]:
        each.close()
