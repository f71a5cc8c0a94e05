"""One configuration for URLs of all schemes, and options that have an effect on their provider alone."""

import dataclasses
import os
import shutil
import subprocess
import sys

import pytest

import torchobj

#: Replaces fsync of libc by one that says so on the standard error.
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
    """A library to be loaded before libc."""
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


def test_one_configuration_serves_a_call_that_mixes_schemes(place, tmp_path):
    config = dataclasses.replace(place.config, file=torchobj.FileOptions(sync=False), max_attempts=2)
    urls = [f"{place.url}/k", f"file://{tmp_path}/k", f"memory://{place.bucket}/k"]
    stores = [place.url, f"file://{tmp_path}", f"memory://{place.bucket}"]
    for number, url in enumerate(stores):
        torchobj.Store(url, config=config).put("k", b"%d" % number)
    assert torchobj.get_many(urls * 2, config=config) == [b"0", b"1", b"2"] * 2
    found = torchobj.get_many([urls[1], f"{place.url}/missing", urls[0]], config=config, return_errors=True)
    assert (found[0], found[2]) == (b"1", b"0")
    assert isinstance(found[1], FileNotFoundError)


def test_region_and_endpoint_are_those_of_s3_and_do_not_concern_other_schemes(place, tmp_path):
    profile = torchobj.StoreConfig(s3=torchobj.S3Options(profile=place.config.s3.profile))
    where = {"config": profile, "region": "us-east-1", "endpoint_url": place.config.s3.endpoint_url}
    for url in (place.url, f"file://{tmp_path}", f"memory://{place.bucket}"):
        store = torchobj.Store(url, **where)
        store.put("k", b"x")
        assert store.get("k") == b"x"
        assert (store.config.s3.region, store.config.s3.profile) == ("us-east-1", place.config.s3.profile)
