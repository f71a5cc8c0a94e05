"""The build that checkouts share: cargo compares the times of files only."""

import os
import shutil

import pytest

from tests import tools


@pytest.fixture
def target(tmp_path):
    unit = tmp_path / "target" / "release" / ".fingerprint" / "torchobj-core-0123"
    unit.mkdir(parents=True)
    (unit / "invoked.timestamp").touch()
    return tmp_path / "target"


def checkout(folder, text):
    (folder / "rust").mkdir(parents=True)
    for name in ("same.rs", "other.rs"):
        (folder / "rust" / name).write_text(name if name == "same.rs" else text)
    return folder


def modified_ns(folder, name):
    return (folder / "rust" / name).stat().st_mtime_ns


def test_only_sources_that_are_built_are_older_than_the_build(tmp_path, target):
    one, two = checkout(tmp_path / "one", "1"), checkout(tmp_path / "two", "2")
    for name in ("same.rs", "other.rs"):
        for each in (one, two):
            os.utime(each / "rust" / name, ns=(10**9, 10**9))
    os.utime(one / "rust" / "same.rs", ns=(5 * 10**9, 5 * 10**9))
    tools.take(one, target)
    assert modified_ns(one, "same.rs") > 10**10, "nothing is known of what is there"
    tools.built(one, target)
    tools.take(two, target)
    assert modified_ns(two, "same.rs") == modified_ns(one, "same.rs")
    assert modified_ns(two, "other.rs") > modified_ns(one, "other.rs")


def test_a_clone_in_the_place_of_the_last_one_has_its_build(tmp_path, target):
    clone = checkout(tmp_path / "clone", "1")
    tools.take(clone, target)
    tools.built(clone, target)
    before = {name: modified_ns(clone, name) for name in ("same.rs", "other.rs")}
    shutil.rmtree(clone)
    checkout(clone, "2")
    edited = modified_ns(clone, "other.rs")
    tools.take(clone, target)
    assert modified_ns(clone, "same.rs") == before["same.rs"]
    # As it was edited: newer than the build.
    assert modified_ns(clone, "other.rs") == edited


def test_after_a_build_that_was_not_recorded_all_sources_are_new(tmp_path, target):
    one, two = checkout(tmp_path / "one", "1"), checkout(tmp_path / "two", "1")
    tools.take(one, target)
    tools.built(one, target)
    (target / "release" / ".fingerprint" / "torchobj-core-0123" / "invoked.timestamp").touch()
    tools.take(two, target)
    assert modified_ns(two, "same.rs") > modified_ns(one, "same.rs")
