"""`torchobj cp`, `sync` and `mv` from bucket to bucket: the requests they send, and what they keep."""

import pytest

from tests.cli.test_moves import synced
from tests.cli.test_transfers import tree
from torchobj.cli import moving

pytestmark = pytest.mark.providers("s3", "gs")

__all__ = ["synced", "tree"]


@pytest.mark.parametrize("command", [["cp", "-r"], ["sync"]], ids=["cp", "sync"])
def test_a_copy_from_bucket_to_bucket_asks_no_metadata_of_its_own(cli, synced, other_bucket, control, command):
    control.clear_requests()
    cli.lines(*command, synced, other_bucket.url)
    assert len(control.requests("CopyObject")) == 3 and len(other_bucket.keys()) == 3
    # `Store.copy` looks up the version on S3.
    assert len(control.requests("HeadObject")) == (0 if synced.startswith("gs:") else 3)


def test_mv_from_bucket_to_bucket_deletes_the_version_that_it_listed(cli, synced, bucket, other_bucket, control):
    control.clear_requests()
    cli.lines("mv", "-r", synced, other_bucket.url)
    assert bucket.keys() == [] and len(other_bucket.keys()) == 3
    deletes = control.requests("DeleteObject")
    assert len(control.requests("CopyObject")) == len(deletes) == 3
    if synced.startswith("gs:"):
        assert all("ifGenerationMatch=" in each.target for each in deletes)
    else:
        assert all("if-match" in each.headers for each in deletes)
    assert len(control.requests("HeadObject")) == (0 if synced.startswith("gs:") else 6)


def test_mv_from_bucket_to_bucket_keeps_a_source_that_changed_meanwhile(cli, synced, bucket, other_bucket, monkeypatch):
    run_all = moving.run_all

    def change_afterwards(transfers, options, report):
        outcome = run_all(transfers, options, report)
        bucket.write("x/a.bin", b"new")
        return outcome

    monkeypatch.setattr(moving, "run_all", change_afterwards)
    done = cli.run("mv", "-r", synced, other_bucket.url)
    assert done.exit_code == 1 and "a.bin: kept, because it changed" in done.stderr
    assert bucket.keys() == ["x/a.bin"] and bucket.body("x/a.bin") == b"new"
