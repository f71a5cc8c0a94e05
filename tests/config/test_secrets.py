"""Secrets appear in no repr, message, log or pickle, whatever field contains them."""

import base64
import copy
import logging
import pickle

import pytest

import torchobj
from tests.support.settings import s3_config

CANARY = "canary8SECRET"
KEY = base64.b64encode(b"canary-SECRET-key-of-32-bytes!!!").decode()


def texts_of(error):
    """Returns everything that a report of an exception shows."""
    seen = []
    while error is not None:
        seen += [str(error), repr(error), repr(vars(error)), pickle.dumps(error).decode("latin-1")]
        error = error.__cause__ or error.__context__
    return seen


def attempts(url, config, caplog):
    """Returns what every kind of call shows for a store that refuses it."""
    caplog.set_level(1)
    caplog.set_level(1, logger="torchobj")
    store = torchobj.Store(url, config=config)
    data = torchobj.ObjectMapDataset(f"{url}/", config=config)
    seen = [repr(store), str(store), repr(config), str(config), repr(data), repr(copy.deepcopy(store))]
    seen += [pickle.dumps(thing).decode("latin-1") for thing in (store, config, data)]
    calls = [
        lambda: store.get("k"),
        lambda: store.head("k"),
        lambda: store.put("k", b"x"),
        lambda: list(store.list()),
        lambda: store.delete("k"),
        lambda: store.get_many(["a", "b"]),
        lambda: data[0],
        lambda: torchobj.save({"a": 1}, f"{url}/checkpoint", config=config),
    ]
    for call in calls:
        with pytest.raises(Exception) as caught:
            call()
        seen += texts_of(caught.value)
    return [*seen, caplog.text]


def assert_no_secret_in(seen, *secrets):
    for secret in secrets:
        for text in seen:
            assert secret not in text


@pytest.mark.parametrize("force_sdk", [False, True])
def test_keys_and_tokens_of_the_environment_are_not_shown(strict_server, monkeypatch, caplog, force_sdk):
    secrets = {
        "AWS_SECRET_ACCESS_KEY": f"{CANARY}-secret-key",
        "AWS_SESSION_TOKEN": f"{CANARY}-session-token",
    }
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN")
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    config = s3_config(endpoint_url=strict_server.endpoint, force_sdk=force_sdk, max_attempts=2)
    assert_no_secret_in(attempts("s3://any", config, caplog), CANARY)


@pytest.mark.parametrize(
    "profile",
    [
        f"aws_access_key_id=AKIAUNKNOWN\naws_secret_access_key={CANARY}\naws_session_token={CANARY}",
        f"aws_access_key_id=AKIAUNKNOWN\naws_secret_access_key {CANARY}",
        f"aws_access_key_id=AKIAUNKNOWN\n  {CANARY}",
        f"aws_secret_access_key={CANARY}",
        f"credential_process=echo {CANARY}",
        f'credential_process=echo \'{{"Version": 1, "SecretAccessKey": "{CANARY}"}}\'',
        f"{CANARY}",
    ],
)
def test_secrets_of_valid_and_broken_profiles_are_not_shown(strict_server, monkeypatch, tmp_path, caplog, profile):
    file = tmp_path / "credentials"
    file.write_text(f"[canary]\n{profile}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    config = s3_config(endpoint_url=strict_server.endpoint, profile="canary", max_attempts=2)
    assert_no_secret_in(attempts("s3://any", config, caplog), CANARY)


def test_the_password_of_a_proxy_is_not_shown(monkeypatch, caplog):
    for url in (
        f"http://user:{CANARY}@127.0.0.1:9",
        f"http://user:{CANARY}@no-such-host.invalid:9",
        f"https://user:{CANARY}@127.0.0.1:9",
        f"http://user:12/{CANARY}@127.0.0.1:9",
        f"http://user:{CANARY}@a b",
    ):
        monkeypatch.setenv("http_proxy", url)
        config = s3_config(endpoint_url="http://10.9.8.7:9", anonymous=True, max_attempts=1)
        assert_no_secret_in(attempts("s3://any", config, caplog), CANARY)


def test_secrets_in_an_endpoint_of_the_environment_are_not_shown(monkeypatch, caplog):
    for url in (f"http://user:{CANARY}@127.0.0.1:9", f"http://127.0.0.1:9/?token={CANARY}", f"{CANARY}@127.0.0.1"):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        for force_sdk in (False, True):
            config = s3_config(anonymous=True, max_attempts=1, force_sdk=force_sdk)
            assert_no_secret_in(attempts("s3://any", config, caplog), CANARY)


def test_a_setting_with_a_secret_is_refused_without_showing_it():
    for settings in (
        {"endpoint_url": f"http://user:{CANARY}@host"},
        {"endpoint_url": f"http://host/?X-Amz-Signature={CANARY}"},
        {"endpoint_url": f"ftp://host/#{CANARY}"},
        {"customer_key_file": KEY},
        {"customer_key_file": base64.b64decode(KEY).hex()},
        {"customer_key_file": KEY, "encryption": "AES256"},
        {"customer_key_file": f"{CANARY}-as-a-path", "encryption": "AES256"},
    ):
        with pytest.raises(torchobj.exceptions.ConfigError) as caught:
            torchobj.S3Options(**settings)
        assert_no_secret_in(texts_of(caught.value), CANARY, KEY, base64.b64decode(KEY).hex())


@pytest.mark.parametrize("config", [{"secret_access_key": CANARY}, f"http://user:{CANARY}@host"], ids=["dict", "str"])
def test_what_is_passed_instead_of_a_configuration_is_named_by_its_type(config):
    for call in (
        lambda: torchobj.Store("s3://b", config=config),
        lambda: torchobj.S3MapDataset.from_prefix("s3://b/", config=config),
        lambda: torchobj.S3Checkpoint(config=config),
    ):
        with pytest.raises(torchobj.exceptions.ConfigError, match="^config=<class '(dict|str)'>: must be a") as caught:
            call()
        assert_no_secret_in(texts_of(caught.value), CANARY)


def test_a_key_passed_instead_of_its_file_and_the_content_of_a_key_file_are_not_shown(strict_server, tmp_path, caplog):
    # 32 raw bytes look like a path.
    raw = base64.b64decode(KEY).decode()
    config = s3_config(endpoint_url=strict_server.endpoint, profile="strict", customer_key_file=raw)
    shown = [repr(config), str(config)]
    with pytest.raises(torchobj.exceptions.ConfigError, match="must be the path of a file") as caught:
        torchobj.Store("s3://any", config=config).get("k")
    assert_no_secret_in([*shown, *texts_of(caught.value), caplog.text], raw)
    for content in (raw, KEY, KEY[:-4], f"{KEY}!"):
        file = tmp_path / "key"
        file.write_text(content)
        config = s3_config(endpoint_url=strict_server.endpoint, profile="strict", customer_key_file=file)
        assert_no_secret_in(attempts("s3://any", config, caplog), raw, KEY, KEY[:-4])


def test_a_presigned_url_or_one_with_a_password_is_refused_without_showing_it():
    for url in (
        f"https://bucket.s3.amazonaws.com/k?X-Amz-Signature={CANARY}&X-Amz-Security-Token={CANARY}",
        f"s3://AKIA:{CANARY}@bucket/k",
        f"s3://{CANARY}@bucket",
        f"bucket.s3.amazonaws.com/k?X-Amz-Signature={CANARY}",
    ):
        for kind in (torchobj.Store, torchobj.ObjectMapDataset, torchobj.open, torchobj.load):
            with pytest.raises(torchobj.exceptions.ConfigError) as caught:
                kind(url)
            assert_no_secret_in(texts_of(caught.value), CANARY)


def test_a_pickled_dataset_has_the_users_arguments_and_no_key(bucket, monkeypatch):
    bucket.write("k", b"x")
    data = torchobj.ObjectMapDataset(f"{bucket.url}/", config=bucket.config)
    assert len(data) == 1
    logging.getLogger("torchobj").debug("the dataset was used")
    secret = bucket.server.secret_key
    assert_no_secret_in([pickle.dumps(data).decode("latin-1"), repr(data), repr(vars(data))], secret)
