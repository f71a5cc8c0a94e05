"""`torchobj cp`, `sync` and `mv` from bucket to bucket: the requests they send, what they skip and what they keep."""

import pytest

import torchobj
from tests.cli.test_moves import synced
from tests.cli.test_transfers import tree
from tests.support.command_line import CommandLine
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


SYNC = pytest.mark.parametrize("command", [["cp", "-r", "--skip-unchanged"], ["sync"]], ids=["cp", "sync"])


@SYNC
def test_a_copy_that_changed_is_replaced_although_it_is_later_and_of_equal_size(
    cli, synced, bucket, other_bucket, command
):
    cli.lines(*command, synced, other_bucket.url)
    other_bucket.write("a.bin", b"A.bin" * 100)
    bucket.write("x/b.txt", b"B.txt" * 100)
    [record] = cli.records(*command, synced, other_bucket.url)
    assert (record["files"], record["unchanged"]) == (2, 1)
    assert other_bucket.body("a.bin") == bucket.body("x/a.bin") == b"a.bin" * 100
    assert other_bucket.body("b.txt") == b"B.txt" * 100


@SYNC
def test_a_dry_run_shows_what_would_be_copied_from_bucket_to_bucket(cli, synced, bucket, other_bucket, command):
    cli.lines("sync", synced, other_bucket.url)
    assert cli.lines(*command, "--dry-run", synced, other_bucket.url) == []
    other_bucket.write("a.bin", b"A.bin" * 100)
    lines = cli.lines(*command, "--dry-run", synced, other_bucket.url)
    assert lines[0] == f"would copy {synced}/a.bin -> {other_bucket.url}/a.bin"
    assert lines[1:] == ["1 file of equal size with nothing else to compare"]
    last = cli.records(*command, "--dry-run", synced, other_bucket.url)[-1]
    assert last == {"action": "nothing to compare", "files": 1}
    assert other_bucket.body("a.bin") == b"A.bin" * 100


@SYNC
def test_objects_of_another_program_are_copied_again_unless_their_etags_are_equal(cli, bucket, other_bucket, command):
    for key in ("x/a", "x/b"):
        bucket.write(key, key.encode())
        other_bucket.write(key.removeprefix("x/"), key.encode())
    [record] = cli.records(*command, f"{bucket.url}/x", other_bucket.url)
    assert (record["files"], record["unchanged"]) == ((2, 0) if bucket.url.startswith("gs:") else (0, 2))


def test_an_object_in_parts_is_unchanged_by_its_time(cli, bucket, other_bucket, tmp_path):
    (tmp_path / "k").write_bytes(bytes(17 << 20))
    cli.lines("cp", tmp_path / "k", f"{bucket.url}/k")
    skipping = ("cp", "--skip-unchanged", f"{bucket.url}/k", f"{other_bucket.url}/k")
    assert [cli.records(*skipping)[0]["unchanged"] for _ in range(2)] == [0, 1]
    other_bucket.write("k", bytes(16 << 20) + b"x" * (1 << 20))
    assert cli.lines(*skipping, "--dry-run")[0] == f"would copy {bucket.url}/k -> {other_bucket.url}/k"
    assert cli.records(*skipping)[0]["files"] == 1
    assert other_bucket.body("k") == bytes(17 << 20)
    cli.error("cp", "--skip-unchanged", f"{bucket.url}/missing", f"{other_bucket.url}/k")


@pytest.mark.providers("s3")
def test_objects_are_compared_between_providers_by_their_time(bucket, gcs_bucket, tree, tmp_path, monkeypatch):
    cli = CommandLine(tmp_path, monkeypatch, bucket, gcs_bucket)
    cli.lines("sync", tree, f"{bucket.url}/x")
    for source, destination in (
        (f"{bucket.url}/x", f"{gcs_bucket.url}/y"),
        (f"{gcs_bucket.url}/y", f"{bucket.url}/z"),
    ):
        assert cli.records("sync", source, destination)[0]["files"] == 3
        assert cli.records("sync", source, destination)[0]["unchanged"] == 3
    gcs_bucket.write("y/a.bin", b"A.bin" * 100)
    assert cli.records("sync", f"{bucket.url}/x", f"{gcs_bucket.url}/y")[0]["files"] == 1
    assert gcs_bucket.body("y/a.bin") == b"a.bin" * 100


@pytest.mark.providers("s3")
def test_headers_are_kept_between_providers(bucket, gcs_bucket, tmp_path, monkeypatch):
    cli = CommandLine(tmp_path, monkeypatch, bucket, gcs_bucket)
    headers = {name: f"{name}-1" for name in ("content_type", "content_encoding", "content_language", "cache_control")}
    source = torchobj.Store(bucket.url, config=bucket.config)
    source.put("k", b"1", content_disposition="inline", metadata={"a": "b"}, **headers)
    cli.lines("cp", f"{bucket.url}/k", f"{gcs_bucket.url}/k")
    copied = torchobj.Store(gcs_bucket.url, config=gcs_bucket.config).head("k")
    names = (*headers, "content_disposition", "metadata")
    assert [getattr(copied, name) for name in names] == [getattr(source.head("k"), name) for name in names]


def test_mv_from_bucket_to_bucket_deletes_the_version_that_it_listed(cli, synced, bucket, other_bucket, control):
    control.clear_requests()
    cli.lines("mv", "-r", "--whole-bucket", synced, other_bucket.url)
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
    done = cli.run("mv", "-r", "--whole-bucket", synced, other_bucket.url)
    assert done.exit_code == 1 and "a.bin: kept, because it changed" in done.stderr
    assert bucket.keys() == ["x/a.bin"] and bucket.body("x/a.bin") == b"new"
