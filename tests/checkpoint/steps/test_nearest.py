"""Which copies on local disks count as the newest step."""

import datetime

import pytest

from torchobj.checkpoint.leftovers import Attempt
from torchobj.checkpoint.steps.commit import Commit, LocalPart, StoredObject, folder_of
from torchobj.checkpoint.steps.nearest import newer_copies

TIME = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
#: The nonces of attempts.
OLD, NEW, OTHER = "0" * 32, "1" * 32, "2" * 32


def copy_of(step, nonce, continues, names=("a",), total=1):
    attempt = Attempt(step, nonce)
    objects = tuple(StoredObject(f"{folder_of(attempt)}{name}", 1) for name in names)
    return Commit(attempt, "dcp", objects, {}, TIME, LocalPart(continues, total))


def in_bucket(step, nonce):
    return Commit(Attempt(step, nonce), "dcp", (), {}, TIME)


def found(newest, *of_ranks, wanted=None, disks="xy", damaged=()):
    copies = newer_copies(newest, wanted, disks, of_ranks, damaged=damaged, source="the bucket")
    return None if copies is None else (copies.attempt.checkpoint, copies.attempt.nonce, copies.is_on(disks))


@pytest.mark.parametrize(
    ("continues", "newest", "counts"),
    [
        ((None,), None, True),
        ((NEW, None), None, True),
        ((OLD,), in_bucket(1, OLD), True),
        ((NEW, OLD), in_bucket(1, OLD), True),
        ((), in_bucket(1, OLD), False),
        ((), None, False),
        ((None,), in_bucket(1, OLD), False),
        ((OLD,), None, False),
        ((OTHER,), in_bucket(1, OLD), False),
        # Not newer, by its number.
        ((OLD,), in_bucket(2, OLD), False),
        ((OLD,), in_bucket(3, OLD), False),
    ],
)
def test_a_copy_counts_if_it_continues_the_newest_step(continues, newest, counts, caplog):
    copy = copy_of(2, NEW, continues)
    assert found(newest, [copy], [copy]) == ((2, NEW, True) if counts else None)
    is_of_another_run = not counts and bool(continues) and (newest is None or newest.step < 2)
    assert ("does not continue" in caplog.text) == is_of_another_run


def test_the_newest_copy_that_is_complete_counts(caplog):
    newest = in_bucket(1, OLD)
    copies = [copy_of(2, NEW, (OLD,)), copy_of(3, NEW, (OLD,), ("a",), 2), copy_of(4, OTHER, (OTHER,))]
    assert found(newest, copies, []) == (2, NEW, False)
    assert "the local copy of step 4 is ignored" in caplog.text
    assert "the local copy of step 3 is not complete: the disks have 1 of its 2 objects" in caplog.text
    assert found(newest, copies, [copy_of(3, NEW, (OLD,), ("b",), 2)]) == (3, NEW, False)
    both = copy_of(3, NEW, (OLD,), ("a", "b"), 2)
    assert found(newest, [both], [both]) == (3, NEW, True)
    assert found(newest, [both], [], disks="xx") == (3, NEW, True)
    assert found(newest, [both], [both], damaged={Attempt(3, NEW)}) is None


def test_a_step_that_is_asked_for_counts_alone(caplog):
    copies = [copy_of(2, NEW, (OLD,)), copy_of(3, OTHER, (OLD,))]
    assert found(in_bucket(1, OLD), copies, [], wanted=2) == (2, NEW, False)
    assert found(in_bucket(1, OLD), copies, [], wanted=4) is None
    assert found(in_bucket(1, OLD), copies, [], wanted=1) is None
    assert not caplog.records


def test_parts_of_two_attempts_are_not_one_step():
    first, second = copy_of(2, NEW, (OLD,), ("a",), 2), copy_of(2, OTHER, (OLD,), ("b",), 2)
    assert found(in_bucket(1, OLD), [first], [second]) is None
