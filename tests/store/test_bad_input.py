"""A permanent failure is one clear error with kind, URL, status, request id, attempts and the next step."""

import logging
import os
import time

import pytest

import torchobj
from tests.support.settings import s3_config
from torchobj import exceptions

SECRET_WORDS = ("secret", "aws_secret_access_key")


def config(server, **changed):
    return s3_config(endpoint_url=server.endpoint, **{"profile": "strict", **changed})


def test_missing_credentials_are_an_error(strict_server, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    started = time.monotonic()
    with pytest.raises(exceptions.CredentialsError) as caught:
        torchobj.Store("s3://any", config=config(strict_server, profile=None)).get("k")
    assert "AWS_ACCESS_KEY_ID" in str(caught.value)
    assert "anonymous=True" in str(caught.value)
    assert time.monotonic() - started < 20


def test_a_wrong_secret_is_refused_and_not_printed(strict_server, bucket, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", strict_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-wrong-SECRET-key")
    store = torchobj.Store(bucket.url, config=config(strict_server, profile=None, max_attempts=3))
    with pytest.raises(exceptions.CredentialsError, match="403 SignatureDoesNotMatch") as caught:
        store.get("k")
    assert caught.value.request_id
    seen = [str(caught.value), repr(store), repr(store.config), caplog.text]
    assert not any("a-wrong-SECRET-key" in text for text in seen)


def test_missing_objects_and_forbidden_buckets_are_typed_errors(bucket, strict_server):
    store = torchobj.Store(bucket.url, config=bucket.config)
    with pytest.raises(exceptions.ObjectNotFoundError) as caught:
        store.get("missing")
    assert (caught.value.status, caught.value.code, caught.value.attempts) == (404, "NoSuchKey", 1)
    assert f"get {bucket.url}/missing: 404 NoSuchKey" in str(caught.value)
    assert f"(request id {caught.value.request_id})" in str(caught.value)
    with pytest.raises(exceptions.BucketNotFoundError, match="check the bucket's name"):
        torchobj.Store("s3://no-such-bucket", config=bucket.config).get("k")
    with pytest.raises(exceptions.BucketNotFoundError):
        list(torchobj.Store("s3://no-such-bucket", config=bucket.config).list())
    with pytest.raises(PermissionError, match="403 AccessDenied"):
        torchobj.Store(bucket.url, config=config(strict_server, anonymous=True)).get("k")


def test_a_wrong_region_is_corrected_with_a_warning(control, strict_server, caplog):
    caplog.set_level(logging.INFO)
    control.bucket("elsewhere", {"region": "ap-south-1"})
    store = torchobj.Store("s3://elsewhere", config=config(strict_server, region="eu-west-1"))
    store.put("k", b"x")
    assert store.get("k") == b"x"
    assert "s3://elsewhere/ is in region ap-south-1" in caplog.text


def test_an_endpoint_without_a_server_is_an_error_after_all_attempts():
    settings = s3_config(endpoint_url="http://127.0.0.1:9", max_attempts=3, anonymous=True)
    with pytest.raises(exceptions.StoreConnectionError) as caught:
        torchobj.Store("s3://any", config=settings).get("k")
    assert isinstance(caught.value, ConnectionError)
    assert "after 3 attempts" in str(caught.value)
    assert "127.0.0.1:9" in str(caught.value)


def test_a_server_that_does_not_respond_is_an_error(control, bucket, strict_server):
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.put("k", b"x")
    control.faults({"operation": "GetObject", "action": {"delay_first_byte_s": 60}})
    quick = config(strict_server, first_byte_timeout_s=0.2, max_attempts=2)
    with pytest.raises(TimeoutError, match=r"no response within 0.2 s, after 2 attempts"):
        torchobj.Store(bucket.url, config=quick).get("k")


def test_the_error_of_endless_throttling_suggests_a_lower_max_in_flight(control, bucket, strict_server):
    control.faults({"operation": "PutObject", "action": {"status": 503, "code": "SlowDown"}})
    with pytest.raises(exceptions.ThrottledError, match="lower max_in_flight") as caught:
        torchobj.Store(bucket.url, config=config(strict_server, retry_timeout_s=3.0)).put("k", b"x")
    assert caught.value.status == 503
    # The second retry starts after 3 s at the latest.
    assert caught.value.attempts >= 3


def test_tls_certificates_are_verified_unless_disabled(credentials):
    from tests.servers import launch

    with launch.start("strict", "--tls") as server:
        credentials("tls", server)
        url = "s3://tls-bucket"
        for settings in ({"ca_bundle": server.ca_file}, {"verify_tls": False}):
            with pytest.raises(exceptions.BucketNotFoundError):
                torchobj.Store(url, config=config(server, profile="tls", **settings)).get("k")
        with pytest.raises(exceptions.StoreError, match="TLS handshake failed"):
            torchobj.Store(url, config=config(server, profile="tls")).get("k")
        os.environ["AWS_CA_BUNDLE"] = server.ca_file
        try:
            with pytest.raises(exceptions.BucketNotFoundError):
                torchobj.Store(
                    url, config=config(server, profile="tls", advanced=torchobj.AdvancedOptions(keep_alive_s=7.0))
                ).get("k")
        finally:
            del os.environ["AWS_CA_BUNDLE"]
        with pytest.raises(exceptions.ConfigError, match="no-such-file"):
            torchobj.Store(url, config=config(server, profile="tls", ca_bundle="/no-such-file")).get("k")


def test_endpoints_come_from_the_environment(bucket, strict_server, monkeypatch):
    bucket.write("k", b"x")
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, strict_server.endpoint)
        # Another configuration reads the environment again.
        settings = s3_config(profile="strict", advanced=torchobj.AdvancedOptions(keep_alive_s=5.0 + len(name) / 100))
        assert torchobj.Store(bucket.url, config=settings).get("k") == b"x"
        monkeypatch.delenv(name)


def test_a_proxy_is_used_unless_the_host_is_exempt(bucket, strict_server, monkeypatch):
    bucket.write("k", b"x")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    through = config(strict_server, max_attempts=1, advanced=torchobj.AdvancedOptions(keep_alive_s=6.0))
    with pytest.raises(exceptions.StoreConnectionError, match="127.0.0.1:9"):
        torchobj.Store(bucket.url, config=through).get("k")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert (
        torchobj.Store(
            bucket.url, config=config(strict_server, advanced=torchobj.AdvancedOptions(keep_alive_s=6.1))
        ).get("k")
        == b"x"
    )
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:9")
    with pytest.raises(exceptions.ConfigError, match="http_proxy"):
        torchobj.Store(
            bucket.url, config=config(strict_server, advanced=torchobj.AdvancedOptions(keep_alive_s=6.2))
        ).get("k")


def test_an_expiring_credential_is_renewed(control, strict_server, bucket, monkeypatch, tmp_path):
    import json

    script = tmp_path / "credentials.json"
    aws = tmp_path / "config"
    aws.write_text(f"[profile turning]\ncredential_process = cat {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(aws))

    def issue(number, life_s):
        control.account(f"AKIA{number}", "S" * 20, token=f"token-{number}", expires_in_s=life_s)
        script.write_text(
            json.dumps(
                {
                    "Version": 1,
                    "AccessKeyId": f"AKIA{number}",
                    "SecretAccessKey": "S" * 20,
                    "SessionToken": f"token-{number}",
                }
            )
        )

    bucket.write("k", b"x")
    issue(1, 3600)
    store = torchobj.Store(bucket.url, config=config(strict_server, profile="turning"))
    assert store.get("k") == b"x"
    control.clock(7200)
    issue(2, 3600)
    assert store.get_many(["k"] * 20) == [b"x"] * 20


def test_a_new_store_sees_what_changed_in_the_environment(bucket, monkeypatch):
    bucket.write("k", b"here")
    config = torchobj.StoreConfig(max_attempts=1)
    profile, endpoint = bucket.config.s3.profile, bucket.config.s3.endpoint_url
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(torchobj.StoreError):
        torchobj.Store(bucket.url, config=config).get("k")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert torchobj.Store(bucket.url, config=config).get("k") == b"here"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(PermissionError):
        torchobj.Store(bucket.url, config=config).get("k")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert torchobj.Store(bucket.url, config=config).get("k") == b"here"


def test_keys_that_xml_cannot_contain_are_deleted_with_others(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    keys = ["a", "b\ufffe", "c\uffff", "d\x01", "e"]
    for key in keys:
        store.put(key, b"x")
    store.delete(keys)
    assert [key for key in keys if store.exists(key)] == []
