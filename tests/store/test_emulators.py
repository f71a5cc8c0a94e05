"""Emulators of S3 and GCS that programs of other people are tested with: the conformance suite and a round trip on each.

`LACKS` has what each cannot do, with the reason: a test fails as well if an emulator, or torchobj, has learnt it.
docs/s3-compatible.md and docs/gcs.md say the same to users.
"""

import dataclasses
import itertools
import os
import subprocess
from typing import Any

import pytest
import torch

import torchobj
from tests.servers import launch
from tests.servers.install import EMULATORS, ToolsMissing, install
from tests.support.buckets import new_gcs_bucket, new_s3_bucket
from tests.tools import CACHE, ROOT
from torchobj import exceptions

pytestmark = pytest.mark.matrix

#: Options of the provider that an emulator needs.
OPTIONS: dict[str, dict[str, Any]] = {
    # It computes a CRC32C in Python, of 1 MiB in about a second.
    "ministack": {"checksum": "none"},
    "s3rver": {"conditional_writes": False},
    "s3proxy": {"key_rules": "path"},
}

OTHER_ETAG = "the object has another ETag than its upload in parts returned"
UPLOADS = "uploads in parts are neither listed nor aborted"
NO_CONDITIONS = "conditions are ignored"

#: Checks of the conformance suite, and tests of this file without "test_", that an emulator does not pass.
LACKS: dict[str, dict[str, str]] = {
    "ministack": {},
    "s3rver": {
        "every_key_is_stored_unchanged_or_refused": "a//b is 404; a name of 255 characters ends the server",
        "different_keys_are_different_objects": "a//b is 404",
        "a_prefix_and_a_delimiter_select": "a-1 is listed after a/1",
        "a_listing_has_the_objects_of_a_prefix_in_order": "train.txt is listed after train/x.txt",
        "all_keys_are_listed_once_and_in_order": "the second page of a listing is a 500",
        "objects_are_copied_and_deleted": "a source with + or é is a 404",
        "a_folder_is_moved_and_removed": "a source with + or é is a 404",
        "a_large_put_is_complete": UPLOADS,
        "a_writer_makes_an_object_of_the_written_bytes": UPLOADS,
        "a_gathered_object_is_complete_with_its_checksums": UPLOADS,
        "an_aborted_gather_leaves_nothing": UPLOADS,
        "an_aborted_writer_leaves_nothing": UPLOADS,
        "a_dropped_writer_leaves_nothing": UPLOADS,
        "an_upload_replaces_only_at_its_commit": UPLOADS,
        "an_aborted_upload_accepts_no_parts": UPLOADS,
        "an_aborted_upload_leaves_nothing": UPLOADS,
        "a_wrong_part_is_refused_at_the_commit": "it is accepted",
        "a_write_replaces_no_object": NO_CONDITIONS,
        "a_write_replaces_only_a_version": NO_CONDITIONS,
    },
    "gofakes3": {
        "attributes_are_stored": "Cache-Control and Content-Language are lost",
        "attributes_are_kept": "Cache-Control and Content-Language are lost",
        "a_large_put_is_complete": OTHER_ETAG,
        "a_writer_makes_an_object_of_the_written_bytes": OTHER_ETAG,
        "a_gathered_object_is_complete_with_its_checksums": OTHER_ETAG,
        "an_object_of_any_size_is_written": "a new object keeps the checksum of the object that it replaces",
        "a_write_replaces_only_a_version": "conditions of deletes are ignored",
    },
    "s3proxy": {
        "an_aborted_upload_accepts_no_parts": "it does",
    },
    "gcp-storage-emulator": {
        "every_key_is_stored_unchanged_or_refused": "a connection is closed for keys with ..",
        "different_keys_are_different_objects": "a connection is closed for keys with ..",
        "a_read_of_a_replaced_version_fails_as_changed": NO_CONDITIONS,
        "a_get_has_the_attributes_and_the_checksum_of_the_object": "a read has the content type only",
        "a_put_if_absent_never_replaces": NO_CONDITIONS,
        "a_put_if_matches_replaces_only_this_version": NO_CONDITIONS,
        "one_of_two_conditional_writers_succeeds": NO_CONDITIONS,
        "a_commit_if_absent_never_replaces": NO_CONDITIONS,
        "a_write_replaces_no_object": NO_CONDITIONS,
        "a_write_replaces_only_a_version": NO_CONDITIONS,
        "all_keys_are_listed_once_and_in_order": "maxResults is ignored",
        "a_listing_begins_after_a_key": "startOffset is ignored",
    },
}

_numbers = itertools.count(1)

SUITE = "emulator::the_suite_runs_on_the_named_server"
MIB = 1 << 20
#: Parts have the minimum size of S3. Some emulators accept few connections.
LIMITS: dict[str, Any] = {
    "part_bytes": 5 * MIB,
    "advanced": torchobj.AdvancedOptions(whole_below_bytes=6 * MIB),
    "max_in_flight": 8,
    "max_attempts": 3,
}
#: An object of three parts.
LARGE = 11 * MIB


def _is_gcs(kind):
    return kind == "gcp-storage-emulator"


@pytest.fixture(scope="module", params=EMULATORS)
def emulator(request, credentials):
    try:
        # The virtual machine of Java starts slowly on a busy machine.
        with launch.start(request.param, timeout_s=60) as server:
            credentials(request.param, server)
            yield request.param, server
    except ToolsMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def kind(emulator):
    return emulator[0]


@pytest.fixture
def place(emulator, request):
    """An empty bucket; the test is expected to fail if the emulator lacks what it needs."""
    kind, server = emulator
    name = request.function.__name__.removeprefix("test_")
    if name in LACKS[kind]:
        request.applymarker(pytest.mark.xfail(reason=LACKS[kind][name], strict=True))
    bucket_name = f"bucket-{next(_numbers)}"
    if _is_gcs(kind):
        bucket = new_gcs_bucket(bucket_name, server, **OPTIONS.get(kind, {}))
    else:
        bucket = new_s3_bucket(bucket_name, kind, server)
        options = dataclasses.replace(bucket.config.s3, **OPTIONS.get(kind, {}))
        bucket = bucket._replace(config=dataclasses.replace(bucket.config, s3=options))
    return bucket._replace(config=dataclasses.replace(bucket.config, **LIMITS))


@pytest.fixture
def store(place):
    return torchobj.Store(place.url, config=place.config)


def pattern(size):
    return bytes(range(251)) * (size // 251 + 1)


def test_an_emulator_without_its_tools_names_them(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolsMissing, match="s3rver needs node and npm"):
        install("s3rver")


def test_the_conformance_suite_passes_except_for_what_is_listed(kind):
    command = ["cargo", "--config", "rust/tests.toml", "test", "--locked", "--release", "-p", "torchobj-store"]
    command += ["--test", "servers", "--", "--ignored", "--exact", SUITE, "--nocapture"]
    settings = [f"{name}={value}" for name, value in OPTIONS.get(kind, {}).items()] + ["gcs"] * _is_gcs(kind)
    environment = {"CARGO_TARGET_DIR": str(CACHE / "target"), **os.environ}
    environment |= {"TORCHOBJ_SERVER": kind, "TORCHOBJ_SERVER_SETTINGS": " ".join(settings), "MAKEFLAGS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = dict(reversed(line.split()[:2]) for line in done.stdout.splitlines() if line.endswith(" s"))
    failed = {name for name, result in results.items() if result != "passed"}
    assert failed == LACKS[kind].keys() & results.keys(), done.stdout + done.stderr


def test_a_listing_has_the_objects_of_a_prefix_in_order(place, store):
    keys = ["train/a b.txt", "train/x+y.txt", "train/é.txt", "train/deep/1.txt", "other/1.txt", "train.txt"]
    for index, key in enumerate(keys):
        place.write(key, bytes(index))
    expected = {key: index for index, key in enumerate(keys)}
    assert {item.key: item.size for item in store.list()} == expected
    listed = [item.key for item in store.list("train/")]
    assert listed == sorted(key for key in keys if key.startswith("train/"))
    assert [page.prefixes for page in store.list("train/", "/").pages()] == [["train/deep/"]]
    for item in store.list():
        assert item.version == store.head(item.key).version


def test_whole_objects_and_their_ranges_are_read(place, store):
    body = pattern(3 * MIB)
    place.write("k", body)
    place.write("empty", b"")
    assert bytes(store.get("k")) == body
    assert bytes(store.get("empty")) == b""
    ranges = [(0, 1), (5, 1000), (MIB, None), (3 * MIB - 7, 3 * MIB)]
    for start, end in ranges:
        assert bytes(store.get_range("k", start, end)) == body[start:end]
    assert [bytes(found) for found in store.get_ranges("k", ranges)] == [body[start:end] for start, end in ranges]
    with store.open("k") as file:
        file.seek(-100, 2)
        assert file.read() == body[-100:]
    with pytest.raises(exceptions.ObjectNotFoundError):
        store.get("missing")


def test_an_object_of_any_size_is_written(place, store):
    for size in (0, 1, 100_000, LARGE):
        body = pattern(size)[:size]
        version = store.put("k", body)
        assert place.body("k") == body
        assert store.head("k").version == version == place.version("k")


def test_an_object_is_written_as_a_file(place, store):
    body = pattern(LARGE)
    with store.open("k", "wb") as file:
        for start in range(0, len(body), 1_000_003):
            file.write(body[start : start + 1_000_003])
    assert place.body("k") == body


def test_an_aborted_upload_leaves_nothing(place, store):
    file = store.open("k", "wb")
    file.write(bytes(LARGE))
    file.abort()
    assert (place.keys(), place.uploads(), store.unfinished_uploads()) == ([], [], [])


def test_attributes_are_kept(place, store):
    headers = {"content_type": "image/png", "cache_control": "max-age=60", "content_language": "de"}
    for size in (1, LARGE):
        store.put("k", bytes(size), **headers, metadata={"epoch": "3"})
        assert place.headers("k") == tuple(headers.values())
        assert store.head("k").metadata == {"epoch": "3"}


def test_objects_are_copied_and_deleted(place, store):
    keys = ["a", "b c", "d/e", "é+&<>"]
    for key in keys:
        place.write(key, key.encode())
    for key in keys:
        store.copy(f"{place.url}/{key}", f"copy of {key}")
        assert place.body(f"copy of {key}") == key.encode()
    store.delete([*keys, "missing"])
    assert sorted(place.keys()) == sorted(f"copy of {key}" for key in keys)
    store.delete("copy of a")
    assert not store.exists("copy of a")


def test_a_write_replaces_no_object(place, store):
    store.put("k", b"first", overwrite=False)
    with pytest.raises(exceptions.PreconditionFailedError):
        store.put("k", b"second", overwrite=False)
    assert place.body("k") == b"first"


def test_a_write_replaces_only_a_version(place, store):
    version = store.put("k", b"first")
    second = store.put("k", b"second", if_version=version)
    with pytest.raises(exceptions.PreconditionFailedError):
        store.put("k", b"third", if_version=version)
    assert place.body("k") == b"second"
    with pytest.raises(exceptions.PreconditionFailedError):
        store.delete("k", if_version=version)
    store.delete("k", if_version=second)
    assert place.keys() == []


def test_checkpoints_are_saved_and_loaded(place):
    state = {"weight": torch.arange(2_000_000.0), "step": 7}
    torchobj.save(state, f"{place.url}/step.pt", config=place.config)
    loaded = torchobj.load(f"{place.url}/step.pt", config=place.config)
    assert torch.equal(loaded["weight"], state["weight"]) and loaded["step"] == 7
    with torchobj.CheckpointManager(f"{place.url}/run", keep_last=2, config=place.config) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": torch.full((3,), float(step))})
        checkpoints.save(3, {"x": torch.zeros(3)}, overwrite=True)
    with torchobj.CheckpointManager(f"{place.url}/run", config=place.config) as checkpoints:
        assert checkpoints.steps() == [2, 3]
        assert torch.equal(checkpoints.restore()["x"], torch.zeros(3))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_has_every_sample(place, num_workers):
    bodies = {f"train/{index:03}": pattern(index * 977)[: index * 977] for index in range(60)}
    for key, body in bodies.items():
        place.write(key, body)
    dataset = torchobj.ObjectMapDataset(f"{place.url}/train/", config=place.config)
    loader = torchobj.DataLoader(dataset, batch_size=7, shuffle=True, num_workers=num_workers, collate_fn=list)
    for _ in range(2):
        found = {sample.key: bytes(sample.read()) for batch in loader for sample in batch}
        assert found == bodies


def test_a_folder_is_moved_and_removed(place):
    files = place.files
    files.pipe({f"{place.url}/run/{name}": name.encode() for name in ("a b", "deep/c", "d+é")})
    # Tools and consoles make such markers of folders.
    place.write("run/", b"")
    folder = f"{place.name}/run"
    assert sorted(files.ls(folder, detail=False)) == sorted(f"{folder}/{name}" for name in ("a b", "deep", "d+é"))
    files.mv(folder, f"{place.name}/moved", recursive=True)
    assert files.cat(f"{place.name}/moved/deep/c") == b"deep/c"
    files.rm(f"{place.name}/moved", recursive=True)
    assert [key for key in place.keys() if not key.endswith("/")] == []
