"""`torchobj ls`, `du`, `head`, `cat` and `scan`, and what every command has in common."""

import json
import re
import threading
from datetime import datetime

import pytest

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import exceptions
from torchobj.cli import objects
from torchobj.store import list_buckets, reads

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

EVIL = "evil/\x1b[31mred"


@pytest.fixture
def filled(bucket):
    for key in ("a.txt", "train/0.jpg", "train/1.jpg", "train/x/2.jpg", "training/3.jpg"):
        bucket.write(key, key.encode() * 100)
    return bucket


def names(lines):
    return [line.split()[-1] for line in lines]


@pytest.mark.providers("s3", "gs")
def test_ls_shows_objects_and_folders_of_a_level(cli, filled):
    assert names(cli.lines("ls", filled.url)) == ["a.txt", "train/", "training/"]
    assert names(cli.lines("ls", f"{filled.url}/train/")) == ["0.jpg", "1.jpg", "x/"]


def test_ls_compares_a_prefix_without_a_slash_as_a_string(cli, filled):
    assert names(cli.lines("ls", f"{filled.url}/train")) == ["train/", "training/"]


def test_ls_lists_recursively_with_whole_keys(cli, filled):
    assert names(cli.lines("ls", "-r", f"{filled.url}/train/")) == ["train/0.jpg", "train/1.jpg", "train/x/2.jpg"]


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("train/*.jpg", ["train/0.jpg", "train/1.jpg"]),
        ("train/**/*.jpg", ["train/0.jpg", "train/1.jpg", "train/x/2.jpg"]),
        ("train*/[13].jpg", ["train/1.jpg", "training/3.jpg"]),
        ("{a.txt,train/?.jpg}", ["a.txt", "train/0.jpg", "train/1.jpg"]),
    ],
)
def test_ls_lists_the_keys_that_match_a_glob(cli, filled, pattern, keys):
    assert names(cli.lines("ls", f"{filled.url}/{pattern}")) == keys


@pytest.mark.providers("s3", "gs")
def test_ls_without_a_bucket_lists_the_buckets_page_by_page(cli, bucket, other_bucket, control):
    scheme = bucket.url.partition("://")[0]
    project = ["--project", "p"] if scheme == "gs" else []
    listed = {each["name"] for each in control.buckets()}
    before = control.limits()
    control.limits(max_keys=2)
    control.bucket("bucket-of-its-own")
    control.clear_requests()
    try:
        records = cli.records("ls", f"{scheme}://", *project)
        pages = len(control.requests("ListBuckets"))
        lines = cli.lines("ls", f"{scheme}://", *project)
    finally:
        control.limits(**before)
    assert {record["bucket"] for record in records} == listed | {"bucket-of-its-own"}
    assert pages == (len(records) + 1) // 2 > 1
    assert [record["url"] for record in records] == [f"{scheme}://{record['bucket']}/" for record in records]
    assert all(datetime.fromisoformat(record["created"]).tzinfo is not None for record in records)
    assert names(lines) == [record["bucket"] for record in records]
    assert all("  BUCKET  " in line for line in lines)


@pytest.mark.providers("gs")
def test_buckets_of_google_cloud_storage_are_listed_by_project(cli, bucket, monkeypatch, control):
    url = "gcs://"
    control.clear_requests()
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "of-the-environment")
    assert bucket.name in [record["bucket"] for record in cli.records("ls", url)]
    cli.records("ls", url, "--project", "p")
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT")
    # An emulator may need none; this server does, as Google Cloud Storage.
    assert "buckets are listed by project" in cli.error("ls", url)
    projects = [re.search(r"project=([^&]+)", each.target) for each in control.requests("ListBuckets")]
    assert [found and found[1] for found in projects] == ["of-the-environment", "p", None]
    monkeypatch.delenv("TORCHOBJ_CONFIG")
    assert "--project or GOOGLE_CLOUD_PROJECT names it" in cli.error("ls", url)
    assert len(control.requests("ListBuckets")) == 3


@pytest.mark.providers("s3", "gs")
def test_options_of_objects_and_projects_do_not_apply_to_other_listings(cli, bucket):
    scheme = bucket.url.partition("://")[0]
    assert "--recursive lists the objects of a bucket" in cli.error("ls", "-r", f"{scheme}://", "--project", "p")
    assert "--project: applies to gs://" in cli.error("ls", "--project", "p", bucket.url)


@pytest.mark.providers("s3", "gs")
def test_a_listing_of_buckets_that_repeats_itself_is_an_error(bucket, control):
    scheme = bucket.url.partition("://")[0]
    body = {
        "s3": "<ListAllMyBucketsResult><Buckets><Bucket><Name>b</Name></Bucket></Buckets>"
        "<ContinuationToken>t</ContinuationToken></ListAllMyBucketsResult>",
        "gs": '{"items": [{"name": "b"}], "nextPageToken": "t"}',
    }[scheme]
    control.faults({"operation": "ListBuckets", "times": 2, "action": {"status": 200, "body": body}})
    with pytest.raises(exceptions.StoreError, match="repeats the bucket"):
        list_buckets(scheme, config=bucket.config, project="p")


@pytest.mark.providers("s3", "gs")
def test_a_refused_listing_of_buckets_names_the_permission_or_the_endpoint(cli, bucket, control):
    scheme = bucket.url.partition("://")[0]
    control.faults({"operation": "ListBuckets", "times": 1, "action": {"status": 403, "code": "AccessDenied"}})
    message = cli.error("ls", f"{scheme}://", *(["--project", "p"] if scheme == "gs" else []))
    assert message.lower().startswith(f"torchobj: list buckets {scheme}://: 403 accessdenied")
    assert "the endpoint is" in message and message.endswith(
        "`torchobj doctor URL` shows which credentials are used and what they allow"
    )
    assert scheme == "s3" or "storage.buckets.list" in message


def test_raw_takes_wildcards_as_they_are(cli, bucket):
    for key in ("a*", "ab"):
        bucket.write(key, b"1")
    assert names(cli.lines("ls", "--raw", f"{bucket.url}/a*")) == ["a*"]


def test_sizes_are_for_people_or_exact(cli, bucket):
    bucket.write("k", bytes(2048))
    assert "2.00 KiB" in cli.lines("ls", bucket.url)[0]
    assert " 2048 " in cli.lines("ls", "--bytes", bucket.url)[0]


def test_ls_prints_objects_and_prefixes_as_json(cli, filled):
    found = cli.records("ls", f"{filled.url}/train/")
    assert [record["url"] for record in found] == [f"{filled.url}/train/{name}" for name in ("0.jpg", "1.jpg", "x/")]
    assert found[0]["size"] == 1100 and found[0]["version"] == filled.version("train/0.jpg")
    assert found[2] == {"url": f"{filled.url}/train/x/", "prefix": "train/x/"}


@pytest.mark.parametrize("place", ["before", "after"])
def test_shared_options_stand_before_or_after_the_command(cli, filled, place):
    arguments = ["--json", "du", filled.url] if place == "before" else ["du", filled.url, "--json"]
    assert json.loads(cli.run(*arguments).stdout) == {"url": filled.url, "objects": 5, "bytes": 5400}


@pytest.mark.parametrize("group", ["uploads", "manifest", "checkpoints"])
def test_shared_options_stand_between_a_group_and_its_command(cli, bucket, group):
    command = {"uploads": ["list"], "manifest": ["show"], "checkpoints": ["latest"]}[group]
    done = cli.run(group, "--json", *command, f"{bucket.url}/nothing")
    assert done.exit_code == (0 if group == "uploads" else 1), done.output
    assert group == "uploads" or json.loads(done.stderr)["error"]


@pytest.mark.parametrize("command", ["ls", "cat", "rm", "du", "scan", "bench"])
def test_a_glob_that_matches_nothing_is_an_error(cli, filled, command):
    assert "no key matches" in cli.error(command, f"{filled.url}/train/*.png")


@pytest.mark.parametrize("command", [["ls"], ["du"], ["rm", "-r", "--yes"], ["scan"], ["bench"]])
def test_a_prefix_without_keys_is_an_error(cli, filled, command):
    message = cli.error(*command, f"{filled.url}/nothing")
    assert f"{filled.url}/nothing: no objects; check the prefix with `torchobj ls {filled.url}/`" in message


@pytest.mark.parametrize("command", ["ls", "du"])
@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("my-bucket", "; did you mean s3://my-bucket/?"),
        ("s3:/b/x", "; did you mean s3://b/x?"),
        ("gs:b", "; did you mean gs://b/?"),
        ("s3", "; did you mean `torchobj ls s3://`?"),
        ("gs:/", "; did you mean `torchobj ls gs://`?"),
        ("file:///no/such/path", ""),
        ("./x", ""),
        ("/nowhere/x", ""),
    ],
)
def test_a_path_that_does_not_exist_may_be_a_url_with_an_error(cli, command, text, advice):
    assert cli.error(command, text) == f"torchobj: {text}: no such path{advice}"


def test_a_local_folder_without_files_is_an_error(cli, tmp_path):
    (tmp_path / "empty").mkdir()
    assert cli.error("du", tmp_path / "empty") == f"torchobj: {tmp_path}/empty: no files"


def test_an_empty_bucket_is_listed(cli, bucket):
    assert cli.lines("ls", bucket.url) == []
    assert cli.records("du", bucket.url) == [{"url": bucket.url, "objects": 0, "bytes": 0}]


def test_a_missing_bucket_and_a_missing_object_are_errors_of_one_line(cli, bucket):
    scheme = bucket.url.partition("://")[0]
    assert "missing-bucket" in cli.error("ls", f"{scheme}://missing-bucket")
    assert f"{bucket.url}/k" in cli.error("head", f"{bucket.url}/k")
    assert "`torchobj ls`" in cli.error("cat", f"{bucket.url}/k")


def test_errors_are_json_with_json(cli, bucket):
    done = cli.process("head", f"{bucket.url}/k", "--json")
    error = json.loads(done.stderr)
    assert done.returncode == 1 and error["type"] == "ObjectNotFoundError" and error["url"] == f"{bucket.url}/k"
    assert error["status"] == 404


def test_debug_shows_the_traceback(cli, bucket):
    assert "Traceback" in cli.run("head", f"{bucket.url}/k", "--log-level", "debug").stderr


def test_wrong_calls_have_exit_code_2(cli, bucket):
    for arguments in (["ls"], ["ls", bucket.url, "--nothing"], ["unknown"], ["--log-level", "loud", "ls", bucket.url]):
        assert cli.run(*arguments).exit_code == 2


def test_an_option_that_applies_to_no_url_is_an_error(cli, tmp_path):
    assert "--profile: applies to URLs of s3://" in cli.error("ls", "--profile", "p", tmp_path)
    assert "--region: applies" in cli.error("ls", "--region", "r", "gs://bucket")


def test_keys_are_raw_in_pipes_and_escaped_in_errors(cli, bucket):
    bucket.write(EVIL, b"1")
    assert "\x1b[31mred" in "\n".join(cli.lines("ls", f"{bucket.url}/evil/"))
    assert "\\x1b[31mother" in cli.error("head", f"{bucket.url}/evil/\x1b[31mother")


def test_keys_are_escaped_on_a_terminal_and_in_json(cli, bucket):
    bucket.write(EVIL, b"1")
    code, shown = cli.on_terminal("ls", f"{bucket.url}/evil/")
    assert code == 0 and "\\x1b[31mred" in shown and "\x1b" not in shown
    [record] = cli.records("ls", f"{bucket.url}/evil/")
    assert record["key"] == EVIL


def test_head_shows_headers_and_metadata(cli, bucket):
    torchobj.Store(bucket.url, config=bucket.config).put("k", b"abc", content_type="text/plain", metadata={"a": "b"})
    shown = "\n".join(cli.lines("head", f"{bucket.url}/k"))
    assert "size           3 (3 B)" in shown and "text/plain" in shown and "metadata a     b" in shown
    [record] = cli.records("head", f"{bucket.url}/k")
    assert record["metadata"] == {"a": "b"} and record["size"] == 3


def test_cat_writes_objects_one_after_the_other(cli, filled):
    assert cli.run("cat", f"{filled.url}/train/*.jpg").stdout_bytes == b"train/0.jpg" * 100 + b"train/1.jpg" * 100
    done = cli.run("cat", f"{filled.url}/a.txt", f"{filled.url}/train/0.jpg")
    assert done.stdout_bytes == b"a.txt" * 100 + b"train/0.jpg" * 100


def test_small_and_large_objects_and_empty_ones_are_written_in_key_order(cli, bucket):
    sizes = [100, (9 << 20) + 1, 0, 1 << 20, *range(1, 30)]
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    for number, body in enumerate(bodies):
        bucket.write(f"many/{number:02}.bin", body)
    assert cli.run("cat", f"{bucket.url}/many/*.bin").stdout_bytes == b"".join(bodies)


@pytest.mark.providers("s3")
def test_objects_are_read_concurrently(cli, bucket, monkeypatch):
    together, read = threading.Barrier(4), reads.get_many

    def waiting(*arguments, **settings):
        together.wait(timeout=150)
        return read(*arguments, **settings)

    for number in range(8):
        bucket.write(f"many/{number}", str(number).encode())
    monkeypatch.setattr(reads, "get_many", waiting)
    assert cli.run("cat", f"{bucket.url}/many/*").stdout == "01234567"


@pytest.mark.providers("s3")
def test_what_is_read_ahead_is_limited_in_bytes(bucket, monkeypatch):
    read, started, held = reads.get_many, [], []

    def counted(urls, **settings):
        started.append(urls)
        return read(urls, **settings)

    for number in range(12):
        bucket.write(f"many/{number:02}", bytes(100))
    monkeypatch.setattr(reads, "get_many", counted)
    monkeypatch.setattr(objects, "_AHEAD_BYTES", 300)
    monkeypatch.setattr(objects, "_AHEAD_OBJECT_BYTES", 100)

    class Out:
        def write(self, data):
            held.append(len(started) - len(held))

        def flush(self):
            pass

    store = objects.Store(bucket.url, config=bucket.config)
    assert objects._write_objects(store, store.list("many/"), Out(), bucket.config) == 12
    assert max(held) <= 3 and len(held) == 12


@pytest.mark.providers("s3")
def test_an_object_that_cannot_be_read_ends_the_output_after_those_before_it(cli, bucket, control):
    for number in range(4):
        bucket.write(f"many/{number}", str(number).encode())
    control.faults({"operation": "GetObject", "key": "many/2", "action": {"status": 403, "code": "AccessDenied"}})
    done = cli.run("cat", f"{bucket.url}/many/*")
    assert done.exit_code == 1 and done.stdout == "01" and "many/2" in done.stderr


def test_cat_of_a_closed_pipe_ends_quietly(cli, bucket):
    bucket.write("large", bytes(8 << 20))
    process = cli.start("cat", f"{bucket.url}/large", stdout=-1, stderr=-1)
    process.stdout.read(1000)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    # SIGPIPE, as cat(1).
    assert process.wait(60) == -13


def test_scan_prints_metadata_as_json_lines(cli, bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.put("x/labelled", b"1", metadata={"label": "cat"})
    store.put("x/plain", b"22")
    found = {record["key"]: record for record in map(json.loads, cli.lines("scan", f"{bucket.url}/x/"))}
    assert found["x/labelled"]["metadata"] == {"label": "cat"} and found["x/plain"]["size"] == 2
    assert len(cli.lines("scan", f"{bucket.url}/x/", "--limit", 1)) == 1
    [only] = cli.lines("scan", f"{bucket.url}/x/", "--has-metadata", "label")
    assert json.loads(only)["key"] == "x/labelled"


def test_local_folders_are_listed_like_buckets(cli, tmp_path):
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "a[1].txt").write_text("1")
    (tmp_path / "d" / "sub" / "b").write_text("22")
    assert names(cli.lines("ls", tmp_path / "d")) == ["a[1].txt", "sub/"]
    assert names(cli.lines("ls", tmp_path / "d" / "a[1].txt")) == ["a[1].txt"]
    assert cli.records("du", tmp_path / "d")[0]["bytes"] == 3
    assert cli.run("cat", tmp_path / "d" / "*.txt").stdout == "1"
