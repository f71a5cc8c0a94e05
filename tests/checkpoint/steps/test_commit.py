"""Commit objects are not trusted: anyone with access to the bucket may write one, and it names objects to delete."""

import dataclasses
import itertools
import json
import logging
import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from torchobj import Store, exceptions
from torchobj.checkpoint import CheckpointManager, StorageWriter
from torchobj.checkpoint.steps.commit import Commit, LocalPart, attempt_of

_names = itertools.count()
NONCE = "ab" * 16
FOLDER = f"steps/{1:012}-{NONCE}/"
VICTIMS = ("victim", "other/victim", "run/victim", "run/steps/victim", "run/steps/x/victim", "run/commits/notes")
GOOD = {
    "version": 1,
    "step": 1,
    "nonce": NONCE,
    "kind": "state",
    "time": "2026-01-01T00:00:00+00:00",
    "metrics": {"loss": 1.0},
    "objects": [{"key": f"{FOLDER}state.pt", "size": 1, "etag": None, "crc32": None}],
}

#: Path components that leave the folder, at least on some systems, and some that do not.
COMPONENTS = st.sampled_from(
    ["..", ".", "", "\\", "..\\..", "a\0", "\ud800", "a", "state.pt", "victim", "other", "%2e%2e", "steps", "run", " "]
)
PATHS = st.lists(COMPONENTS, min_size=1, max_size=8).map("/".join)
KEYS = PATHS | PATHS.map(lambda path: FOLDER + path) | PATHS.map(lambda path: f"steps/{2:012}-{NONCE}/{path}")
#: Values that JSON, or Python's JSON parser, accepts.
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**63, -1, math.nan, math.inf, -math.inf, 1e300, "inf", "nan"])
    | st.floats()
    | st.text(max_size=5)
    | KEYS
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
TIMES = st.sampled_from(["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-01-01", "now", ""]) | VALUES
OBJECTS = st.lists(
    st.fixed_dictionaries(
        {"key": KEYS | VALUES, "size": st.integers() | VALUES},
        optional={"etag": VALUES, "crc32": VALUES, "sha256": VALUES, "x": VALUES},
    )
    | VALUES,
    max_size=3,
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "version": VALUES,
        "step": VALUES | st.just(1.0),
        "nonce": VALUES | st.just("../../../../other/" + "a" * 14),
        "kind": VALUES,
        "time": TIMES,
        "metrics": VALUES | st.dictionaries(st.text(max_size=3), VALUES, max_size=2),
        "objects": OBJECTS | VALUES,
        "local": VALUES | st.fixed_dictionaries({"continues": st.lists(VALUES, max_size=2) | VALUES, "total": VALUES}),
    },
)
#: Bodies that are not commit objects, or that repeat fields.
BODIES = [
    b"\xff\xfe",
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b"[]",
    b"null",
    b"1" * 5000,
    b'{"version": 1, "version": 1e999}',
    b" ",
    json.dumps(GOOD | {"time": "0001-01-01T00:00:00+14:00"}).encode(),
    json.dumps(GOOD | {"metrics": {"loss": 10**400}}).encode(),
    json.dumps(GOOD | {"metrics": {"loss": True}}).encode(),
    json.dumps(GOOD | {"step": True}).encode(),
    json.dumps(GOOD | {"version": True}).encode(),
    json.dumps(GOOD | {"objects": GOOD["objects"] * 2}).encode(),
    json.dumps(GOOD | {"objects": [GOOD["objects"][0] | {"size": -1}]}).encode(),
    json.dumps(GOOD | {"objects": [GOOD["objects"][0] | {"sha256": "A" * 64}]}).encode(),
    json.dumps(GOOD | {"objects": {"key": 1}}).encode(),
    json.dumps(GOOD | {"objects": [[]]}).encode(),
    json.dumps(GOOD | {"nonce": "A" * 32, "objects": []}).encode(),
    json.dumps(GOOD | {"nonce": f"{NONCE}\n", "objects": []}).encode(),
    json.dumps(GOOD | {"nonce": None, "objects": []}).encode(),
]
ODD_KEYS = [
    f"{FOLDER}../../../other/victim",
    f"{FOLDER}..",
    f"{FOLDER}./state.pt",
    f"{FOLDER}/victim",
    f"{FOLDER}a//victim",
    f"{FOLDER}folder/",
    f"{FOLDER}..\\..\\victim",
    f"{FOLDER}a\0",
    f"{FOLDER}\ud800",
    FOLDER,
    "victim",
    f"steps/{'١' * 12}-{NONCE}/state.pt",
]


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """Each invalid commit object logs a warning."""
    logging.getLogger("torchobj").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("torchobj").setLevel(logging.NOTSET)


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_parsing_other_data_raises_value_error_only(body):
    with pytest.raises(ValueError, match=".") as caught:
        Commit.from_json(body, 1)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("key", ODD_KEYS, ids=ascii)
def test_a_key_that_is_not_canonical_or_not_below_the_attempts_folder_is_refused(key):
    assert attempt_of(key) is None
    with pytest.raises(ValueError, match="which is not below"):
        Commit.from_json(json.dumps(GOOD | {"objects": [{"key": key, "size": 1}]}).encode(), 1)


def test_a_key_that_no_store_can_hold_is_refused():
    for length in (1024, 1025):
        objects = [{"key": FOLDER + "k" * (length - len(FOLDER)), "size": 1}]
        data = json.dumps(GOOD | {"objects": objects}).encode()
        if length == 1024:
            assert Commit.from_json(data, 1).objects[0].key == objects[0]["key"]
            continue
        with pytest.raises(ValueError, match="longer than 1024 bytes"):
            Commit.from_json(data, 1)


def test_a_commit_object_round_trips():
    commit = Commit.from_json(json.dumps(GOOD).encode(), 1)
    odd = {"loss": math.inf, "least": -math.inf, "none": math.nan, "": 2.0}
    parts = (None, LocalPart((None, NONCE), 3), LocalPart((), 0))
    for metrics, part in itertools.product(({}, odd), parts):
        written = Commit(commit.attempt, "dcp", commit.objects, metrics, commit.time, part)
        again = Commit.from_json(written.to_json(), 1)
        assert again == written or repr(again) == repr(written)


def test_only_files_of_folders_have_a_sha256_which_earlier_versions_do_not_read():
    commit = Commit.from_json(json.dumps(GOOD).encode(), 1)
    assert json.loads(commit.to_json())["objects"] == GOOD["objects"]
    [item] = commit.objects
    folder = dataclasses.replace(commit, kind="folder", objects=(dataclasses.replace(item, sha256="0" * 64),))
    assert Commit.from_json(folder.to_json(), 1) == folder


def run_everything(store, url):
    """All operations of a job; each must succeed in spite of invalid commit objects."""
    manager = CheckpointManager(url, keep_last=1, keep_best=("loss", "min", 1))
    for step in (5, 6):
        manager.save(step, {"x": torch.full((2,), float(step))}, {"loss": 1.0 / step})
    assert set(manager.steps()) >= {6}
    assert isinstance(manager.latest(), int)
    assert manager.best() is not None
    assert manager.restore(6)["x"][0] == 6
    manager.leftovers()
    manager.sweep(0)
    for step in manager.steps():
        manager.delete(step)
    assert manager.steps() == []
    manager.sweep(0)


def planted(bodies, keys=()):
    """A store with foreign objects and commit objects with these bodies, and all its keys."""
    store = Store(f"memory://hostile-{next(_names)}")
    for key in (*VICTIMS, *keys):
        store.put(key, b"precious")
    for number, body in enumerate(bodies, 1):
        store.put(f"run/commits/{number:012}.json", body)
    return store


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_an_invalid_commit_object_does_not_stop_save_restore_sweep_or_delete(body):
    store = planted([body])
    run_everything(store, f"{store.url}/run")
    assert {info.key for info in store.list()} == set(VICTIMS)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@example({"objects": [{"key": f"{FOLDER}../../../other/victim", "size": 1}]})
@example({"objects": [{"key": "victim", "size": 1}]})
@example({"nonce": "../../../other", "objects": []})
@given(CHANGES)
def test_hostile_commit_objects_delete_nothing_outside_of_their_attempts(changes):
    document = {**GOOD, **changes}
    store = planted([json.dumps(document).encode()])
    named = document["objects"] if isinstance(document["objects"], list) else []
    keys = [item.get("key") for item in named if isinstance(item, dict)]
    foreign = set()
    for key in keys:
        if isinstance(key, str) and key.isprintable() and 0 < len(key) < 900:
            # As named, and as a path would be resolved.
            for name in {f"run/{key}", key}:
                store.put(name, b"x")
                foreign.add(name)
    run_everything(store, f"{store.url}/run")
    owned = {name for name in foreign if attempt_of(name.removeprefix("run/")) is not None}
    assert {info.key for info in store.list()} >= {*VICTIMS, *(foreign - owned)}


NAMES = PATHS.map(lambda path: f"{path}.distcp") | PATHS | VALUES


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@example(["../../victim", "../victim.distcp"])
@given(st.lists(NAMES, max_size=3))
def test_hostile_metadata_deletes_nothing_outside_of_its_folder(names):
    store = planted([])
    store.put("victim.distcp", b"precious")
    items = {MetadataIndex(str(number)): _StorageInfo(name, 0, 1) for number, name in enumerate(names)}
    store.put("run/dcp/.metadata", pickle.dumps(Metadata({}, storage_data=items)))
    before = {info.key for info in store.list() if not info.key.startswith("run/dcp/")}
    writer = StorageWriter(f"{store.url}/run/dcp")
    for _ in range(2):
        dcp.save({"x": torch.ones(2)}, storage_writer=writer, no_dist=True)
    assert {info.key for info in store.list() if not info.key.startswith("run/dcp/")} == before


def test_a_planted_commit_does_not_make_a_save_delete_foreign_files(tmp_path):
    victim = tmp_path / "other" / "victim"
    victim.parent.mkdir()
    victim.write_text("precious")
    run = tmp_path / "run"
    (run / "commits").mkdir(parents=True)
    document = GOOD | {"objects": [{"key": f"{FOLDER}../../../other/victim", "size": 8}]}
    (run / f"commits/{1:012}.json").write_text(json.dumps(document))
    manager = CheckpointManager(f"file://{run}", keep_last=1)
    manager.save(2, {"x": torch.ones(2)})
    manager.delete(1)
    assert victim.read_text() == "precious"
    with pytest.raises(exceptions.CheckpointError, match="step 1 is not committed"):
        manager.restore(1)
