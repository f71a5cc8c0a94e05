"""Requests with the keys of a credential provider: in every process, renewed, and with an error if there are none."""

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time

import boto3
import obstore.auth.boto3
import pytest
import torch

import torchobj
from tests.support.credential_providers import CANARY, Asynchronous, Scripted
from tests.support.prefetching import eventually
from torchobj import S3Options, Store, StoreConfig
from torchobj.exceptions import AccessDeniedError, ConfigError, CredentialsError


@pytest.fixture
def provider(bucket, tmp_path):
    return Scripted(tmp_path, bucket.server.access_key, bucket.server.secret_key)


def config_of(bucket, provider, **options):
    s3 = S3Options(endpoint_url=bucket.config.s3.endpoint_url, credential_provider=provider, **options)
    return StoreConfig(s3=s3, max_attempts=2)


def works(bucket, provider, **options):
    store = Store(bucket.url, config=config_of(bucket, provider, **options))
    store.put("k", b"x")
    assert store.get_many(["k"] * 20) == [b"x"] * 20
    return store


@pytest.mark.parametrize("force_sdk", [False, True])
def test_one_call_serves_all_requests_of_stores_with_equal_configurations(bucket, provider, force_sdk):
    for _ in range(2):
        works(bucket, provider, force_sdk=force_sdk)
    assert provider.calls() == [os.getpid()]


def test_a_coroutine_is_awaited(bucket, tmp_path):
    works(bucket, Asynchronous(tmp_path, bucket.server.access_key, bucket.server.secret_key))


def test_a_provider_of_obstore_works(bucket):
    server = bucket.server
    session = boto3.Session(aws_access_key_id=server.access_key, aws_secret_access_key=server.secret_key)
    works(bucket, obstore.auth.boto3.Boto3CredentialProvider(session))


def test_credentials_that_expire_are_renewed_without_a_request(bucket, provider):
    # The tests of the store check the time.
    provider.behave("expire 2")
    works(bucket, provider)
    assert eventually(lambda: len(provider.calls()) >= 2)


def test_requests_continue_while_a_renewal_blocks_or_fails(bucket, provider):
    # Renewed after half of the time at the earliest.
    provider.behave("expire 8")
    store = works(bucket, provider)
    provider.behave("block")
    assert eventually(lambda: len(provider.calls()) >= 2)
    assert store.get("k") == b"x"
    provider.behave("return")


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("raise 10.0.0.1", "no credentials: credential_provider raised ValueError: no network at 10.0.0.1"),
        ("expire -90", "no credentials: credential_provider returned credentials that expired 90"),
    ],
)
def test_a_provider_without_valid_credentials_is_an_error_and_the_next_request_calls_it_again(
    bucket, provider, behaviour, message
):
    store = Store(bucket.url, config=config_of(bucket, provider))
    provider.behave(behaviour)
    with pytest.raises(CredentialsError, match=message):
        store.put("k", b"x")
    failed = store.get_many(["a"] * 20, return_errors=True)
    assert {type(error) for error in failed} == {CredentialsError}
    provider.behave("return")
    store.put("k", b"x")
    # Those that wait at the same time share a call: not each of the 22 requests makes one.
    assert len(provider.calls()) < 22


def test_a_provider_without_keys_is_an_error(bucket):
    store = Store(bucket.url, config=config_of(bucket, without_keys))
    with pytest.raises(CredentialsError, match='credential_provider returned no "access_key_id"'):
        store.get("k")


def without_keys():
    return {"expires_at": None}


@pytest.mark.matrix
def test_a_provider_that_blocks_is_an_error_after_20_s_for_every_waiting_request(bucket, provider):
    store = Store(bucket.url, config=config_of(bucket, provider))
    provider.behave("block")
    began = time.monotonic()
    failed = store.get_many(["a"] * 20, return_errors=True)
    # A second call would take as long again.
    assert 19 < time.monotonic() - began < 40
    assert all("did not return within 20 s" in str(error) for error in failed)
    provider.behave("return")
    store.put("k", b"x")


def test_a_request_that_waits_for_a_blocked_provider_does_not_block_other_threads(bucket, provider):
    provider.behave("block")
    store = Store(bucket.url, config=config_of(bucket, provider))
    thread = threading.Thread(target=store.put, args=("k", b"x"))
    thread.start()
    assert eventually(provider.calls)
    for _ in range(50):
        Store(bucket.url, config=bucket.config).list()
    assert thread.is_alive()
    provider.behave("return")
    thread.join()
    assert store.get("k") == b"x"


def test_keys_that_the_server_rejects_are_not_shown(bucket, provider, caplog):
    caplog.set_level(1)
    caplog.set_level(1, logger="torchobj")
    provider.behave("unknown")
    store = Store(bucket.url, config=config_of(bucket, provider))
    with pytest.raises(AccessDeniedError) as refused:
        store.get("k")
    provider.behave("raise x")
    with pytest.raises(CredentialsError) as raised:
        store.get("k")
    shown = [str(refused.value), repr(vars(refused.value)), str(raised.value), repr(vars(raised.value)), caplog.text]
    shown += [repr(store), repr(store.config), pickle.dumps(store).decode("latin-1")]
    assert all(CANARY not in text for text in shown)


def read_in_child(store):
    os._exit(0 if store.get("k") == b"x" else 1)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_another_process_calls_the_provider_itself(bucket, provider, method):
    store = works(bucket, provider)
    child = multiprocessing.get_context(method).Process(target=read_in_child, args=(store,))
    child.start()
    child.join(150)
    assert child.exitcode == 0
    assert provider.calls() == [os.getpid(), child.pid]


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (torchobj.DataLoader, "fork"),
        (torch.utils.data.DataLoader, "fork"),
        (torchobj.DataLoader, "forkserver"),
        pytest.param(torchobj.DataLoader, "spawn", marks=pytest.mark.matrix),
        pytest.param(torch.utils.data.DataLoader, "spawn", marks=pytest.mark.matrix),
    ],
)
def test_workers_of_a_data_loader_read(bucket, provider, method, kind):
    config = config_of(bucket, provider)
    for number in range(8):
        Store(bucket.url, config=config).put(f"{number}", bytes([number]))
    data = torchobj.ObjectMapDataset(f"{bucket.url}/", config=config, transform=first_byte)
    loader = kind(data, batch_size=2, num_workers=2, multiprocessing_context=method)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def first_byte(reader):
    return reader.read()[0]


EXIT = """
import sys, threading, torchobj
called, leaving = threading.Event(), threading.Event()
def provider():
    called.set()
    if sys.argv[1] != "at once":
        leaving.wait()
    raise ValueError
s3 = torchobj.S3Options(endpoint_url="http://127.0.0.1:9", credential_provider=provider)
store = torchobj.Store("s3://b", config=torchobj.StoreConfig(s3=s3, max_attempts=1))
threading.Thread(target=store.get, args=("k",), daemon=True).start()
called.wait()
if sys.argv[1] == "at the end":
    leaving.set()
"""


@pytest.mark.parametrize("fails", ["never", "at the end", "at once"])
def test_a_process_can_exit_while_its_provider_is_called(fails):
    command = [sys.executable, "-c", EXIT, fails]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (
            {"AccessKeyId": "a", "SecretAccessKey": "b", "SessionToken": "c", "Expiration": "d"},
            ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration"),
        ),
        (
            {"access_key": "a", "secret_key": "b", "token": "c", "expiry_time": "d"},
            ("access_key", "secret_key", None, "expiry_time"),
        ),
        (boto3.Session("a", "b", "c").get_credentials(), ("access_key", "secret_key", None, None)),
    ],
)
def test_names_of_botocore_are_mapped_to_ours_in_the_error(returned, names):
    config = StoreConfig(s3=S3Options(endpoint_url="http://127.0.0.1:9", credential_provider=lambda: returned))
    with pytest.raises(CredentialsError) as raised:
        Store("s3://b", config=config).get("k")
    ours = ("access_key_id", "secret_access_key", "token", "expires_at")
    for name, other in zip(ours, names, strict=True):
        if other is not None:
            assert f"'{name}' for {other}" in str(raised.value)


def keys_of(bucket, **options):
    server = bucket.server
    keys = {"access_key_id": server.access_key, "secret_access_key": server.secret_key, **options}
    s3 = S3Options(endpoint_url=bucket.config.s3.endpoint_url, **keys)
    return StoreConfig(s3=s3, max_attempts=2)


@pytest.mark.parametrize("force_sdk", [False, True])
def test_keys_in_the_options_sign_requests(bucket, monkeypatch, force_sdk):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOTHER")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    store = Store(bucket.url, config=keys_of(bucket, force_sdk=force_sdk))
    store.put("k", b"x")
    assert store.get("k") == b"x"
    with pytest.raises(CredentialsError):
        Store(bucket.url, config=keys_of(bucket, secret_access_key=CANARY)).get("k")


def test_temporary_keys_in_the_options_have_their_token(bucket, control):
    control.account("AKIATEMPORARY", "temporary-secret", token="temporary-token")
    keys = {"access_key_id": "AKIATEMPORARY", "secret_access_key": "temporary-secret"}
    store = Store(bucket.url, config=keys_of(bucket, **keys, session_token="temporary-token"))
    store.put("k", b"x")
    with pytest.raises((CredentialsError, AccessDeniedError)):
        Store(bucket.url, config=keys_of(bucket, **keys)).get("k")


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_a_worker_receives_the_keys_in_the_options(bucket, method):
    bucket.write("train/0", b"\x07")
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/train/", config=keys_of(bucket), transform=first_byte)
    loader = torchobj.DataLoader(dataset, num_workers=1, multiprocessing_context=method)
    assert [batch.tolist() for batch in loader] == [[7]]


def test_keys_in_the_options_are_not_shown_and_are_not_pickled_for_others(bucket, tmp_path):
    options = S3Options(access_key_id="AKIA" + CANARY, secret_access_key=CANARY, session_token=CANARY)
    config = StoreConfig(s3=options)
    store, dataset = Store(bucket.url, config=config), torchobj.ObjectMapDataset(f"{bucket.url}/", config=config)
    for thing in (options, config, store, dataset):
        assert CANARY not in repr(thing) + str(thing)
        with pytest.raises(ConfigError, match=r"secret_access_key: .*credential_provider") as raised:
            pickle.dumps(thing)
        assert CANARY not in str(raised.value)
        with pytest.raises(ConfigError):
            torch.save(thing, tmp_path / "file")
    assert (
        copy.deepcopy(config).s3
        == options
        == S3Options(access_key_id="AKIA" + CANARY, secret_access_key=CANARY, session_token=CANARY)
    )
    assert options != S3Options(access_key_id="AKIA" + CANARY, secret_access_key="other", session_token=CANARY)
    assert hash(options) == hash(copy.copy(options))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"access_key_id": CANARY}, "access_key_id and secret_access_key"),
        ({"secret_access_key": CANARY}, "access_key_id and secret_access_key"),
        ({"session_token": CANARY}, "session_token"),
        ({"access_key_id": CANARY + "\n", "secret_access_key": "x"}, "access_key_id: .*newline"),
        ({"access_key_id": "x", "secret_access_key": CANARY + " "}, "secret_access_key: "),
        ({"access_key_id": "x", "secret_access_key": ""}, "secret_access_key: "),
        ({"access_key_id": "x", "secret_access_key": CANARY.encode()}, "secret_access_key="),
        ({"access_key_id": "x", "secret_access_key": CANARY, "session_token": "\x00"}, "session_token: "),
        ({"access_key_id": "x", "secret_access_key": CANARY, "profile": "p"}, "access_key_id: .* profile"),
        ({"access_key_id": "x", "secret_access_key": CANARY, "anonymous": True}, "access_key_id: .* anonymous"),
        (
            {"access_key_id": "x", "secret_access_key": CANARY, "credential_provider": dict},
            "access_key_id: .* credential_provider",
        ),
    ],
)
def test_incomplete_or_contradicting_keys_are_refused_without_their_values(fields, named):
    with pytest.raises(ConfigError, match=named) as raised:
        S3Options(**fields)
    assert CANARY not in str(raised.value)


def test_a_configuration_file_cannot_contain_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHOBJ_CONFIG", "")
    file = tmp_path / "torchobj.toml"
    for name in ("access_key_id", "secret_access_key", "session_token"):
        file.write_text(f'["s3://b".s3]\n{name} = "{CANARY}"\n')
        with pytest.raises(ConfigError, match=f"{name}: a configuration file must not contain") as raised:
            torchobj.load_config(file)
        assert CANARY not in str(raised.value)
