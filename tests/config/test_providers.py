"""One configuration for URLs of all schemes, and options that affect their provider only."""

import dataclasses
import os
import shutil
import subprocess
import sys

import pytest

import torchobj
from torchobj import exceptions

#: Replaces libc's fsync by one that logs each call to standard error.
FSYNC = """
#include <unistd.h>
int fsync(int file) { (void)file; return write(2, "fsync\\n", 6) == 6 ? 0 : -1; }
"""

WRITES = """
import sys, torchobj
sync, folder = sys.argv[1] == "True", sys.argv[2]
options = torchobj.FileOptions(sync=sync)
store = torchobj.Store(f"file://{folder}", config=torchobj.StoreConfig(file=options, part_bytes=5 << 20))
def count(name, write):
    print(name, file=sys.stderr, flush=True)
    write()
count("put", lambda: store.put("whole", b"x"))
count("copy", lambda: store.copy("whole", "copied"))
def in_parts():
    with torchobj.open(f"file://{folder}/parts", "wb", config=store.config) as file:
        file.write(bytes(17 << 20))
count("parts", in_parts)
assert sorted(info.key for info in store.list()) == ["copied", "parts", "whole"]
"""


@pytest.fixture(scope="module")
def counted_fsync(tmp_path_factory):
    """Builds a library to preload before libc."""
    compiler = shutil.which("cc")
    assert compiler is not None, "the tests need a C compiler"
    folder = tmp_path_factory.mktemp("fsync")
    (folder / "fsync.c").write_text(FSYNC)
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "fsync.so"), str(folder / "fsync.c")]
    subprocess.run(command, check=True)
    return str(folder / "fsync.so")


@pytest.mark.parametrize(("sync", "flushes"), [(True, 2), (False, 0)])
def test_a_write_flushes_its_file_and_its_folder_unless_sync_is_false(tmp_path, counted_fsync, sync, flushes):
    environment = os.environ | {"LD_PRELOAD": counted_fsync}
    command = [sys.executable, "-c", WRITES, str(sync), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    expected = [line for name in ("put", "copy", "parts") for line in (name, *["fsync"] * flushes)]
    assert [line for line in done.stderr.splitlines() if line in ("put", "copy", "parts", "fsync")] == expected


def test_one_configuration_serves_a_call_that_mixes_schemes(bucket, tmp_path):
    config = dataclasses.replace(bucket.config, file=torchobj.FileOptions(sync=False), max_attempts=2)
    urls = [f"{bucket.url}/k", f"file://{tmp_path}/k", f"memory://{bucket.name}/k"]
    stores = [bucket.url, f"file://{tmp_path}", f"memory://{bucket.name}"]
    for number, url in enumerate(stores):
        torchobj.Store(url, config=config).put("k", b"%d" % number)
    assert torchobj.get_many(urls * 2, config=config) == [b"0", b"1", b"2"] * 2
    found = torchobj.get_many([urls[1], f"{bucket.url}/missing", urls[0]], config=config, return_errors=True)
    assert (found[0], found[2]) == (b"1", b"0")
    assert isinstance(found[1], FileNotFoundError)


def test_s3_options_are_ignored_for_other_schemes_and_s3_arguments_are_refused(bucket, tmp_path):
    s3 = torchobj.S3Options(profile=bucket.config.s3.profile, region="eu-west-1")
    where = {"region": "us-east-1", "endpoint_url": bucket.config.s3.endpoint_url}
    store = torchobj.Store(bucket.url, config=torchobj.StoreConfig(s3=s3), **where)
    store.put("k", b"x")
    assert (store.config.s3.region, store.config.s3.profile) == ("us-east-1", bucket.config.s3.profile)
    for url in (f"file://{tmp_path}", f"memory://{bucket.name}"):
        with pytest.raises(torchobj.exceptions.ConfigError, match="^region='us-east-1': must be None for a URL of"):
            torchobj.Store(url, **where)
        store = torchobj.Store(url, config=torchobj.StoreConfig(s3=s3))
        store.put("k", b"x")
        assert store.get("k") == b"x"


def test_a_named_pipe_is_no_object(tmp_path):
    # Opening it waited for a writer, on one thread more for each attempt.
    os.mkfifo(tmp_path / "pipe")
    store = torchobj.Store(f"file://{tmp_path}")
    for operation in (lambda: store.get("pipe"), lambda: store.copy("pipe", "copy")):
        with pytest.raises(torchobj.exceptions.ObjectNotFoundError):
            operation()


def test_a_profile_that_the_caller_names_is_used_instead_of_keys_in_the_environment(bucket, monkeypatch):
    torchobj.Store(bucket.url, config=bucket.config).put("k", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOTHER")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    # Another configuration than that of the fixture, whose credentials are loaded already.
    config = dataclasses.replace(bucket.config, advanced=torchobj.AdvancedOptions(keep_alive_s=7.5))
    assert bytes(torchobj.Store(bucket.url, config=config).get("k")) == b"x"
    unnamed = dataclasses.replace(config, s3=dataclasses.replace(config.s3, profile=None))
    with pytest.raises(exceptions.AccessDeniedError):
        torchobj.Store(bucket.url, config=unnamed).get("k")
    missing = dataclasses.replace(config, s3=dataclasses.replace(config.s3, profile="missing"))
    with pytest.raises(exceptions.CredentialsError, match='the profile "missing" does not exist'):
        torchobj.Store(bucket.url, config=missing).get("k")
