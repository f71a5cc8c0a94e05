"""`torchobj cp`, `sync` and `mv` from bucket to bucket: the requests they send, what they skip and what they keep."""

import json

import pytest

import torchobj
from tests.support.command_line import CommandLine
from torchobj import Store
from torchobj.exceptions import IntegrityError
from torchobj.store.copies import _is_equal

pytestmark = pytest.mark.providers("s3", "gs")


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
    assert lines == [f"would copy {synced}/a.bin -> {other_bucket.url}/a.bin"]
    assert other_bucket.body("a.bin") == b"A.bin" * 100


@SYNC
def test_objects_of_another_program_are_unchanged_by_their_etags_or_checksums(cli, bucket, other_bucket, command):
    for key in ("x/a", "x/b", "x/c"):
        bucket.write(key, key.encode())
        other_bucket.write(key.removeprefix("x/"), key.encode())
    other_bucket.write("c", b"X/c")
    [record] = cli.records(*command, f"{bucket.url}/x", other_bucket.url)
    assert (record["files"], record["unchanged"]) == (1, 2)
    assert other_bucket.body("c") == b"x/c"


def in_parts(bucket, key, data, algorithm, kind):
    """Writes an object as an upload of one part, whose ETag is not the MD5 of its bytes."""
    name = {"Bucket": bucket.name, "Key": key}
    upload = bucket.boto.create_multipart_upload(**name, ChecksumAlgorithm=algorithm, ChecksumType=kind)
    name["UploadId"] = upload["UploadId"]
    part = bucket.boto.upload_part(**name, PartNumber=1, Body=data, ChecksumAlgorithm=algorithm)
    checksum = f"Checksum{algorithm}"
    parts = [{"PartNumber": 1, "ETag": part["ETag"], checksum: part[checksum]}]
    bucket.boto.complete_multipart_upload(**name, MultipartUpload={"Parts": parts}, ChecksumType=kind)


@pytest.mark.providers("s3")
@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME"])
def test_objects_with_different_etags_are_compared_by_their_checksums(cli, bucket, other_bucket, algorithm):
    for key, data in (("a", b"same"), ("b", b"old.")):
        bucket.boto.put_object(Bucket=bucket.name, Key=f"x/{key}", Body=b"same", ChecksumAlgorithm=algorithm)
        in_parts(other_bucket, key, data, algorithm, "FULL_OBJECT")
    heads = [
        each.boto.head_object(Bucket=each.name, Key=key, ChecksumMode="ENABLED")
        for each, key in ((bucket, "x/a"), (other_bucket, "a"))
    ]
    assert heads[0]["ETag"] != heads[1]["ETag"]
    assert heads[0][f"Checksum{algorithm}"] == heads[1][f"Checksum{algorithm}"]
    assert cli.lines("sync", "--dry-run", f"{bucket.url}/x", other_bucket.url) == [
        f"would copy {bucket.url}/x/b -> {other_bucket.url}/b"
    ]
    [record] = cli.records("sync", f"{bucket.url}/x", other_bucket.url)
    assert (record["files"], record["unchanged"]) == (1, 1)
    assert other_bucket.body("b") == b"same"


@pytest.mark.providers("s3")
@pytest.mark.parametrize(
    ("algorithm", "kind"), [("CRC32C", "FULL_OBJECT"), ("CRC32", "COMPOSITE"), ("SHA256", "COMPOSITE")]
)
def test_checksums_of_another_algorithm_or_of_parts_are_not_compared(cli, bucket, other_bucket, algorithm, kind):
    bucket.boto.put_object(Bucket=bucket.name, Key="x/a", Body=b"same", ChecksumAlgorithm="CRC32")
    in_parts(other_bucket, "a", b"same", algorithm, kind)
    command = ("sync", f"{bucket.url}/x", other_bucket.url)
    assert cli.lines(*command, "--dry-run")[1:] == ["1 file of equal size with nothing else to compare"]
    assert cli.records(*command, "--dry-run")[-1] == {"action": "nothing to compare", "files": 1}
    assert cli.records(*command)[0]["files"] == 1
    # The copy has the ETag of one request.
    assert cli.records(*command)[0]["unchanged"] == 1


def test_a_checksum_that_differs_counts_although_the_time_in_the_metadata_is_equal(cli, bucket, other_bucket):
    for each, key, data in ((bucket, "x/a", b"new"), (other_bucket, "a", b"old")):
        torchobj.Store(each.url, config=each.config).put(key, data, metadata={"mtime": "1700000000"})
    assert cli.records("sync", f"{bucket.url}/x", other_bucket.url)[0]["files"] == 1
    assert other_bucket.body("a") == b"new"


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
def test_objects_of_other_programs_are_compared_between_providers_by_crc32c(bucket, gcs_bucket, tmp_path, monkeypatch):
    cli = CommandLine(tmp_path, monkeypatch, bucket, gcs_bucket)
    for key in ("a", "b"):
        bucket.boto.put_object(Bucket=bucket.name, Key=f"x/{key}", Body=b"same", ChecksumAlgorithm="CRC32C")
    gcs_bucket.write("y/a", b"same")
    gcs_bucket.write("y/b", b"old.")
    for source, destination in (
        (f"{bucket.url}/x", f"{gcs_bucket.url}/y"),
        (f"{gcs_bucket.url}/y", f"{bucket.url}/x"),
    ):
        gcs_bucket.write("y/b", b"old.")
        [record] = cli.records("sync", source, destination)
        assert (record["files"], record["unchanged"]) == (1, 1)
    assert bucket.body("x/b") == b"old."


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
    # On S3, each copy and each delete look up the version, and a listing has the ETags of the copies. On Google Cloud
    # Storage, the checksums of both are looked up.
    assert len(control.requests("HeadObject")) == 6


def test_mv_from_bucket_to_bucket_keeps_a_source_that_changed_meanwhile(cli, synced, bucket, other_bucket, afterwards):
    afterwards(lambda: bucket.write("x/a.bin", b"new"))
    done = cli.run("mv", "-r", "--whole-bucket", synced, other_bucket.url)
    assert done.exit_code == 1 and "a.bin: kept, because it changed" in done.stderr
    assert bucket.keys() == ["x/a.bin"] and bucket.body("x/a.bin") == b"new"


def pretend_to_copy(control, bucket, key, stored):
    """Makes the server answer to a copy to `key` as usual, although it stores these bytes, or nothing if None."""
    if stored is not None:
        bucket.write(key, stored)
    version = "0" * 32 if stored is None else bucket.version(key).strip('"')
    if bucket.url.startswith("s3://"):
        body = f'<CopyObjectResult><ETag>"{version}"</ETag></CopyObjectResult>'
        headers = {"content-type": "application/xml"}
    else:
        version = "1" if stored is None else version
        resource = {"name": key, "bucket": bucket.name, "generation": version, "metageneration": "1", "size": "500"}
        body = json.dumps({"kind": "storage#rewriteResponse", "done": True, "resource": resource})
        headers = {"content-type": "application/json"}
    action = {"status": 200, "headers": headers, "body": body}
    control.faults({"operation": "CopyObject", "key": key, "action": action})


WRONG = pytest.mark.parametrize("stored", [None, b"a.BIN" * 100, b"a.bin"], ids=["nothing", "other bytes", "shorter"])


@WRONG
def test_mv_keeps_a_source_whose_copy_the_server_did_not_store(cli, synced, bucket, other_bucket, control, stored):
    pretend_to_copy(control, other_bucket, "y/a.bin", stored)
    done = cli.run("mv", "-r", synced, f"{other_bucket.url}/y")
    assert done.exit_code == 1 and f"{synced}/a.bin: kept, because {other_bucket.url}/y/a.bin" in done.stderr
    assert bucket.keys() == ["x/a.bin"] and bucket.body("x/a.bin") == b"a.bin" * 100
    assert "y/sub/c.bin" in other_bucket.keys()


@WRONG
def test_mv_keeps_a_single_source_whose_copy_the_server_did_not_store(
    cli, synced, bucket, other_bucket, control, stored
):
    pretend_to_copy(control, other_bucket, "k", stored)
    done = cli.run("mv", f"{synced}/a.bin", f"{other_bucket.url}/k")
    assert done.exit_code == 1 and f"{synced}/a.bin: kept, because {other_bucket.url}/k" in done.stderr
    assert len(bucket.keys()) == 3


@WRONG
def test_mv_of_fsspec_deletes_nothing_if_a_copy_is_wrong(synced, bucket, other_bucket, control, stored):
    pretend_to_copy(control, other_bucket, "y/a.bin", stored)
    with pytest.raises(IntegrityError, match=r"y/a\.bin .*; no source was deleted"):
        bucket.files.mv(f"{synced}/", f"{other_bucket.url}/y/", recursive=True)
    assert len(bucket.keys()) == 3


def test_no_source_is_deleted_before_all_copies_were_verified(cli, synced, bucket, other_bucket, control):
    control.clear_requests()
    cli.lines("mv", "-r", synced, f"{other_bucket.url}/y")
    names = [request.operation for request in control.requests()]
    assert names.index("DeleteObject") > names.index("ListObjectsV2", names.index("CopyObject"))
    assert "CopyObject" not in names[names.index("DeleteObject") :]


@pytest.mark.providers("s3")
@pytest.mark.parametrize("is_equal", [True, False])
def test_mv_compares_the_checksums_of_objects_in_parts(cli, bucket, other_bucket, control, is_equal):
    """Their ETags differ from those of their copies."""
    in_parts(bucket, "x/a", b"same", "CRC32", "FULL_OBJECT")
    bucket.write("x/b", b"1")
    if not is_equal:
        pretend_to_copy(control, other_bucket, "y/a", b"othr")
    done = cli.run("mv", "-r", f"{bucket.url}/x", f"{other_bucket.url}/y")
    assert done.exit_code == (0 if is_equal else 1) and bucket.keys() == ([] if is_equal else ["x/a"])


@pytest.mark.providers("s3")
def test_copies_whose_etags_differ_are_compared_by_their_bytes_if_they_have_no_checksums(bucket, other_bucket):
    """As those that are encrypted with keys of their own."""
    bucket.write("same", b"same")
    in_parts(other_bucket, "same", b"same", "CRC32", "COMPOSITE")
    bucket.write("other", b"some")
    stores = [Store(each.url, config=each.config) for each in (bucket, other_bucket)]
    infos = [store.head("same") for store in stores]
    plain = infos[1]._replace(version='"00000000000000000000000000000000"')
    assert _is_equal(*stores, infos[0], plain)
    assert not _is_equal(*stores, stores[0].head("other"), plain)


@pytest.mark.parametrize("command", [["cp", "-r"], ["sync"], ["mv", "-r"]], ids=["cp", "sync", "mv"])
def test_objects_whose_keys_end_with_a_slash_are_copied_if_they_are_not_empty(cli, bucket, other_bucket, command):
    before = {key: key.encode() for key in ("x/", "x/a", "x/s/", "x/s/b")} | {"x/empty/": b""}
    for key, body in before.items():
        bucket.write(key, body)
    [record] = cli.records(*command, f"{bucket.url}/x/", f"{other_bucket.url}/z/")
    assert record["files"] == 4
    copied = {f"z/{key.removeprefix('x/')}": body for key, body in before.items() if body}
    assert {key: other_bucket.body(key) for key in other_bucket.keys()} == copied
    assert bucket.keys() == (["x/empty/"] if command[0] == "mv" else sorted(before))


@pytest.mark.parametrize("command", [["cp", "-r"], ["sync"], ["mv", "-r"]], ids=["cp", "sync", "mv"])
def test_an_object_that_cannot_be_a_file_is_a_failure_and_is_kept(cli, bucket, tmp_path, command):
    for key in ("x/a", "x/s/", "x/s/b"):
        bucket.write(key, key.encode())
    done = cli.run(*command, f"{bucket.url}/x/", tmp_path / "z")
    assert done.exit_code != 0 and "x/s/" in done.stderr
    assert (tmp_path / "z/s/b").read_bytes() == b"x/s/b"
    assert "x/s/" in bucket.keys()
