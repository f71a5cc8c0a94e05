"""What only Google Cloud Storage has: credentials, names, classes, generations, holds, permissions."""

import contextlib
import dataclasses
import datetime
import pickle
import time

import google.api_core.exceptions
import pytest
import torch

import torchobj
from tests.support.buckets import PARTS, new_gcs_bucket
from tests.support.credential_providers import CANARY, refused_token
from torchobj import GCSOptions, ObjectDataset, ObjectRef, Store, StoreConfig, exceptions
from torchobj.checkpoint import CheckpointManager

NAMES = ["a#b", "a[0-9]*?", "a%2Fb", "a/%2F/b", "a b+c&d=e", "ü/日本", "k" * 1024, "é" * 512, "/a//b/", "tab\there"]


@pytest.fixture
def store(gcs_bucket):
    return Store(gcs_bucket.url, config=gcs_bucket.config)


def with_gcs(bucket, **changed):
    return dataclasses.replace(bucket.config, gcs=dataclasses.replace(bucket.config.gcs, **changed), max_attempts=2)


def without_credentials(bucket):
    return with_gcs(bucket, credential_provider=None)


# ---------------------------------------------------------------------------------------------------- credentials


@pytest.fixture
def metadata_server(monkeypatch, strict_gcs_server):
    """Application Default Credentials are those of a virtual machine."""
    monkeypatch.setenv("GCE_METADATA_HOST", strict_gcs_server.endpoint.removeprefix("http://"))


@pytest.mark.usefixtures("metadata_server")
def test_a_token_of_the_metadata_server_is_loaded_once_also_if_it_is_slow(gcs_bucket, gcs_control):
    gcs_control.faults({"operation": "Token", "action": {"delay_first_byte_s": 1.0}})
    # A configuration that no other test has: stores with equal ones share the token.
    config = with_gcs(gcs_bucket, credential_provider=None, storage_class="STANDARD")
    store = Store(gcs_bucket.url, config=config)
    store.put("k", b"x")
    assert store.get_many(["k"] * 20) == [b"x"] * 20
    assert len(gcs_control.requests("Token")) == 1


@pytest.mark.usefixtures("metadata_server")
def test_a_token_that_the_server_revokes_is_replaced(gcs_bucket, gcs_control):
    store = Store(gcs_bucket.url, config=without_credentials(gcs_bucket))
    store.put("k", b"x")
    gcs_control.clear_tokens()
    assert store.get_many(["k"] * 20) == [b"x"] * 20
    assert len(gcs_control.requests("Token")) == 2


def test_missing_credentials_are_an_error_with_the_next_steps(gcs_bucket, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    with pytest.raises(exceptions.CredentialsError) as caught:
        Store(gcs_bucket.url, config=without_credentials(gcs_bucket)).get("k")
    for way in ("GOOGLE_APPLICATION_CREDENTIALS", "gcloud auth application-default login", "service account"):
        assert way in str(caught.value)
    text = str(caught.value)
    assert f"get {gcs_bucket.url}/: no credentials were found in GOOGLE_APPLICATION_CREDENTIALS, /" in text
    assert text.endswith("(the metadata service of the machine: Connection refused (os error 111))")


class Renewed:
    """Returns a new token of the server at each call, valid for some seconds by the clock of this process."""

    def __init__(self, control, valid_s):
        self.control, self.valid_s, self.calls, self.ended = control, valid_s, 0, False

    def __call__(self):
        if self.ended:
            return refused_token()
        self.calls += 1
        token = f"ya29.renewed-{self.calls}"
        self.control.token(token, expires_in_s=self.valid_s)
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self.valid_s)
        return {"token": token, "expires_at": expires}


@pytest.fixture
def renewed(gcs_control):
    renewed = Renewed(gcs_control, 1000)
    yield renewed
    # The store renews its token until the process exits.
    renewed.ended = True


def test_a_token_that_expires_during_a_read_is_replaced(gcs_bucket, gcs_control, renewed):
    gcs_bucket.write("k", bytes(40 << 20))
    renewed.valid_s = 2
    store = Store(gcs_bucket.url, config=with_gcs(gcs_bucket, credential_provider=renewed))
    gcs_control.faults({"operation": "GetMedia", "action": {"stall_body_at": 1 << 20, "stall_s": 1.0}})
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        assert len(store.get("k")) == 40 << 20
    assert renewed.calls >= 2
    assert {request.status for request in gcs_control.requests("GetMedia")} <= {200, 206}


def test_a_revoked_token_of_a_provider_is_requested_again(gcs_bucket, gcs_control, renewed):
    store = Store(gcs_bucket.url, config=with_gcs(gcs_bucket, credential_provider=renewed))
    store.put("k", b"x" * 100)
    gcs_control.revoke_token("ya29.renewed-1")
    assert store.get_many(["k"] * 10) == [b"x" * 100] * 10
    assert renewed.calls == 2


def test_a_token_that_the_server_rejects_is_not_shown(gcs_bucket, caplog):
    caplog.set_level(1)
    caplog.set_level(1, logger="torchobj")
    config = with_gcs(gcs_bucket, credential_provider=refused_token)
    store = Store(gcs_bucket.url, config=config)
    data = torchobj.ObjectMapDataset(f"{gcs_bucket.url}/", config=config)
    shown = [repr(store), repr(config), repr(data), *(pickle.dumps(each).decode("latin-1") for each in (store, data))]
    calls = [
        lambda: store.get("k"),
        lambda: store.put("k", b"x"),
        lambda: list(store.list()),
        lambda: store.delete("k"),
        lambda: data[0],
        lambda: torchobj.save({"a": 1}, f"{gcs_bucket.url}/checkpoint", config=config),
    ]
    for call in calls:
        with pytest.raises(exceptions.AccessDeniedError) as caught:
            call()
        error = caught.value
        shown += [str(error), repr(error), repr(vars(error)), pickle.dumps(error).decode("latin-1")]
    assert all(CANARY not in text for text in [*shown, caplog.text])


def test_the_token_of_a_store_in_use_is_not_shown(gcs_bucket, caplog):
    caplog.set_level(1)
    caplog.set_level(1, logger="torchobj")
    store = Store(gcs_bucket.url, config=gcs_bucket.config)
    store.put("k", b"x")
    with pytest.raises(exceptions.ObjectNotFoundError) as caught:
        store.get("missing")
    shown = [repr(store), repr(store.config), repr(vars(caught.value)), str(caught.value), caplog.text]
    assert all(gcs_bucket.server.token not in text for text in shown)


# ---------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_is_kept_unchanged(gcs_bucket, store, name):
    store.put(name, b"ours")
    assert gcs_bucket.body(name) == b"ours"
    assert [info.key for info in store.list()] == gcs_bucket.keys() == [name]
    assert torchobj.get_many([f"{gcs_bucket.url}/{name}"], config=gcs_bucket.config) == [b"ours"]
    store.copy(name, "copy")
    store.put(name, bytes(17 << 20))
    assert (store.head(name).size, store.get("copy")) == (17 << 20, b"ours")
    store.delete([name, "copy"])
    assert gcs_bucket.keys() == gcs_bucket.uploads() == []


@pytest.mark.parametrize("name", ["a\nb", "a\rb", ".", "..", "k" * 1025, f"{PARTS}x", ".well-known/acme-challenge/x"])
def test_a_name_that_gcs_does_not_allow_is_refused_without_a_request(store, gcs_control, name):
    gcs_control.clear_requests()
    for call in (lambda: store.put(name, b"x"), lambda: store.get(name), lambda: store.delete(name)):
        with pytest.raises(exceptions.InvalidKeyError):
            call()
    assert gcs_control.requests() == []


def test_gcs_is_another_name_of_gs(gcs_bucket, store):
    store.put("k", b"x")
    alias = Store(f"gcs://{gcs_bucket.name}", config=gcs_bucket.config)
    assert (alias.url, alias.get("k")) == (gcs_bucket.url, b"x")
    url = f"gcs://{gcs_bucket.name}/k"
    assert torchobj.get_many([url, ObjectRef(url, end=1)], config=gcs_bucket.config) == [b"x", b"x"]
    assert torchobj.open(url, config=gcs_bucket.config).read() == b"x"
    [(reader, _)] = [
        (sample, sample.url)
        for sample in torchobj.ObjectMapDataset(f"gcs://{gcs_bucket.name}/", config=gcs_bucket.config)
    ]
    assert reader.read() == b"x"


# ---------------------------------------------------------------------------------------------------- objects


def test_an_archived_object_is_read_at_once(gcs_bucket, store):
    store.put("k", b"cold", storage_class="ARCHIVE")
    assert gcs_bucket.official.get_blob("k").storage_class == "ARCHIVE"
    assert (store.get("k"), next(iter(store.list())).storage_class) == (b"cold", "ARCHIVE")


@pytest.mark.parametrize("size", [5, 17 << 20])
def test_a_key_that_may_not_be_used_is_a_typed_error(gcs_bucket, gcs_control, size):
    key = "projects/p/locations/eu/keyRings/r/cryptoKeys/k"
    store = Store(gcs_bucket.url, config=with_gcs(gcs_bucket, kms_key_name=key))
    store.put("k", bytes(size))
    assert gcs_bucket.official.get_blob("k").kms_key_name.startswith(key)
    gcs_control.bucket(gcs_bucket.name, {"denied": ["cloudkms.cryptoKeyVersions.useToDecrypt"]})
    with pytest.raises(exceptions.AccessDeniedError, match=f"get {gcs_bucket.url}/k: 403"):
        store.get("k")
    gcs_control.bucket(gcs_bucket.name, {"denied": ["cloudkms.cryptoKeyVersions.useToEncrypt"]})
    with pytest.raises(exceptions.AccessDeniedError):
        store.put("new", bytes(size))
    assert gcs_bucket.keys() == ["k"]
    assert gcs_bucket.uploads() == []


def test_a_soft_deleted_object_is_not_found(gcs_bucket, store, gcs_control):
    gcs_control.bucket(gcs_bucket.name, {"soft_delete": True})
    store.put("k", b"x")
    store.delete("k")
    for call in (lambda: store.get("k"), lambda: store.head("k")):
        with pytest.raises(exceptions.ObjectNotFoundError):
            call()
    assert list(store.list()) == []


def test_a_noncurrent_generation_is_read_by_its_version(gcs_bucket, store, gcs_control):
    gcs_control.bucket(gcs_bucket.name, {"versioning": True})
    old, new = store.put("k", b"old"), store.put("k", b"newer")
    assert (store.get("k", version=old), store.get("k", version=new), store.get("k")) == (b"old", b"newer", b"newer")
    url = f"{gcs_bucket.url}/k"
    wanted = [ObjectRef(url, version=old), ObjectRef(url), ObjectRef(url, start=1, end=2, version=old)]
    assert store.get_many(wanted) == [b"old", b"newer", b"l"]
    store.delete("k")
    assert store.get("k", version=old) == b"old"
    assert [info.key for info in store.list()] == []


def test_a_replaced_generation_of_an_unversioned_bucket_is_an_error(gcs_bucket, store):
    old = store.put("k", b"old")
    store.put("k", b"new")
    with pytest.raises(exceptions.ObjectChangedError):
        store.get("k", version=old)
    [found] = store.get_many([ObjectRef(f"{gcs_bucket.url}/k", version=old)], return_errors=True)
    assert isinstance(found, exceptions.ObjectChangedError)


# ---------------------------------------------------------------------------------------------------- permissions


@pytest.mark.parametrize(
    ("permission", "call"),
    [
        ("storage.objects.get", lambda store: store.get("k")),
        ("storage.objects.get", lambda store: store.head("k")),
        ("storage.objects.create", lambda store: store.put("new", b"x")),
        ("storage.objects.create", lambda store: store.put("new", bytes(17 << 20))),
        ("storage.objects.delete", lambda store: store.delete("k")),
        ("storage.objects.delete", lambda store: store.put("k", b"x")),
        ("storage.objects.list", lambda store: list(store.list())),
    ],
)
def test_a_missing_permission_is_access_denied(gcs_bucket, store, gcs_control, permission, call):
    store.put("k", b"x")
    gcs_control.bucket(gcs_bucket.name, {"denied": [permission]})
    with pytest.raises(exceptions.AccessDeniedError, match="403"):
        call(store)
    gcs_control.bucket(gcs_bucket.name, {"denied": []})
    assert gcs_bucket.keys() == ["k"]
    assert gcs_bucket.uploads() == []


def test_objects_are_uploaded_without_permission_to_delete(gcs_bucket, store, gcs_control, caplog):
    gcs_control.bucket(gcs_bucket.name, {"denied": ["storage.objects.delete"]})
    store.put("k", bytes(20 << 20))
    assert "uploaded sequentially" in caplog.text and "storage.objects.delete" in caplog.text
    assert (gcs_bucket.keys(), store.head("k").size) == (["k"], 20 << 20)


def test_an_error_with_status_200_is_not_an_empty_listing(gcs_bucket, gcs_control, store):
    gcs_bucket.write("k", b"1")
    gcs_control.faults({"operation": "ListObjects", "times": 1, "action": {"error_in_200": "backendError"}})
    assert [info.key for info in store.list()] == ["k"]
    gcs_control.faults({"operation": "ListObjects", "action": {"error_in_200": "backendError"}})
    with pytest.raises(exceptions.StoreError, match="an error with status 200"):
        list(Store(gcs_bucket.url, config=with_gcs(gcs_bucket)).list())


def test_a_bucket_that_does_not_exist_is_not_found(gcs_bucket):
    store = Store(f"{gcs_bucket.url}-missing", config=gcs_bucket.config)
    for call in (lambda: store.put("k", b"x"), lambda: list(store.list())):
        with pytest.raises(exceptions.BucketNotFoundError):
            call()


@pytest.mark.parametrize("flags", [{"retention_s": 3600.0}, {"default_event_based_hold": True}], ids=str)
def test_a_manager_commits_to_a_bucket_whose_objects_cannot_be_deleted(gcs_bucket, gcs_control, flags):
    gcs_control.bucket(gcs_bucket.name, flags)
    manager = CheckpointManager(f"{gcs_bucket.url}/run", config=gcs_bucket.config, keep_last=1)
    for step in (1, 2):
        with contextlib.suppress(exceptions.StoreError):
            manager.save(step, {"x": torch.full((6_000_000,), float(step))})
    assert 1 in manager.steps()
    for step in manager.steps():
        assert manager.restore(step)["x"][0].item() == step
    with contextlib.suppress(exceptions.StoreError):
        manager.sweep(0)
    for step in manager.steps():
        assert manager.restore(step)["x"][0].item() == step
    # Only those that the policy forbids to delete are left.
    with pytest.raises(google.api_core.exceptions.Forbidden):
        gcs_bucket.remove(gcs_bucket.keys()[0])


# ---------------------------------------------------------------------------------------------------- with others


class Pairs(ObjectDataset):
    def __init__(self, pairs, config):
        super().__init__(config=config)
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def objects_at(self, index):
        return [ObjectRef(url) for url in self.pairs[index]]

    def build(self, index, readers):
        return [reader.read() for reader in readers]


def test_one_configuration_reads_objects_of_s3_and_gcs(bucket, gcs_bucket):
    config = dataclasses.replace(bucket.config, gcs=gcs_bucket.config.gcs)
    for number in range(6):
        bucket.write(f"{number}", b"s3 %d" % number)
        gcs_bucket.write(f"{number}", b"gs %d" % number)
    pairs = [(f"{bucket.url}/{number}", f"{gcs_bucket.url}/{number}") for number in range(6)]
    expected = [[b"s3 %d" % number, b"gs %d" % number] for number in range(6)]
    flat = [url for pair in pairs for url in pair]
    assert torchobj.get_many(flat, config=config) == [data for pair in expected for data in pair]
    for workers in (0, 2):
        loader = torchobj.DataLoader(Pairs(pairs, config), batch_size=None, num_workers=workers)
        assert [[bytes(data) for data in sample] for sample in loader] == expected


def test_the_emulator_of_the_environment_needs_no_credentials(fake_gcs_bucket, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake_gcs_bucket.server.endpoint)
    parallel = fake_gcs_bucket.config.gcs.parallel_upload
    config = StoreConfig(gcs=GCSOptions(parallel_upload=parallel))
    store = Store(fake_gcs_bucket.url, config=config)
    body = bytes(range(256)) * (80 << 10)
    store.put("large", body)
    assert fake_gcs_bucket.body("large") == store.get("large") == body
    assert fake_gcs_bucket.uploads() == []


def test_equal_providers_share_credentials(gcs_bucket, strict_gcs_server):
    other = new_gcs_bucket(f"{gcs_bucket.name}-other", strict_gcs_server)
    assert other.config.gcs.credential_provider is not gcs_bucket.config.gcs.credential_provider
    assert other.config == gcs_bucket.config
    for bucket in (gcs_bucket, other):
        bucket.write("k", bucket.name.encode())
    urls = [f"{other.url}/k", f"{gcs_bucket.url}/k"]
    assert torchobj.get_many(urls, config=other.config) == [other.name.encode(), gcs_bucket.name.encode()]


def test_a_refused_operation_names_the_permission(gcs_bucket, gcs_control, store):
    store.put("k", b"x")
    for name, call in (
        ("delete", lambda: store.delete("k")),
        ("create", lambda: store.put("new", b"x")),
        ("list", lambda: list(store.list())),
    ):
        permission = f"storage.objects.{name}"
        gcs_control.bucket(gcs_bucket.name, {"denied": [permission]})
        with pytest.raises(exceptions.AccessDeniedError, match=rf"needs the permission {permission}"):
            call()
    gcs_control.bucket(gcs_bucket.name, {"denied": []})
