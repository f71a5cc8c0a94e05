"""The requests of `torchobj doctor`, and its advice after one that fails."""

import pytest

from torchobj.config import config_file


@pytest.mark.providers("s3", "gs")
@pytest.mark.parametrize("operation", ["LIST", "GET", "PUT"])
def test_a_missing_permission_is_named_and_the_credentials_are_accepted(cli, bucket, control, operation):
    bucket.write("train/k", b"1")
    refused = {"LIST": "ListObjectsV2", "GET": "GetObject", "PUT": "PutObject"}[operation]
    control.faults({"operation": refused, "action": {"status": 403, "code": "AccessDenied"}})
    records = cli.failed_records("doctor", f"{bucket.url}/train/", "--write")
    failed = {record["name"]: record["advice"] for record in records if record["state"] == "failed"}
    s3 = {"LIST": "s3:ListBucket", "GET": "s3:GetObject", "PUT": "s3:PutObject"}
    gcs = {"LIST": "storage.objects.list", "GET": "storage.objects.get", "PUT": "storage.objects.create"}
    # PUT reads what it wrote.
    assert {operation} <= failed.keys() <= {operation, "PUT"}
    assert "accepts the credentials" in failed[operation]
    assert (s3 if bucket.url.startswith("s3://") else gcs)[operation] in failed[operation]


@pytest.mark.providers("s3", "gs")
def test_requests_without_credentials_to_a_bucket_that_is_not_public(cli, bucket):
    records = cli.failed_records("doctor", bucket.url, "--no-sign-request")
    [failed] = [record for record in records if record["state"] == "failed"]
    assert failed["advice"].startswith("the bucket is not public, and no credentials are used: requests ")


@pytest.fixture
def advice(cli, bucket, monkeypatch, tmp_path):
    """Calls doctor with keys of the environment. Returns the failed checks and their advice."""
    (tmp_path / "torchobj.toml").write_text(f'["s3://"]\ns3 = {{ endpoint_url = "{bucket.server.endpoint}" }}\n')
    config_file._read.clear()

    def call(*options, url=bucket.url, key=bucket.server.access_key, secret=bucket.server.secret_key):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        records = cli.failed_records("doctor", url, *options)
        return {record["name"]: record["advice"] for record in records if record["state"] == "failed"}

    return call


def test_a_wrong_secret(advice):
    found = advice(secret="wrong")
    assert found.keys() == {"LIST"} and "rejects the credentials (AWS_ACCESS_KEY_ID and" in found["LIST"]
    assert found["LIST"].endswith("check the secret access key")


def test_an_unknown_access_key(advice):
    found = advice(key="AKIAUNKNOWN")
    assert found.keys() == {"LIST"} and found["LIST"].endswith("check that the access key belongs to this endpoint")


def test_an_unknown_bucket(advice, bucket):
    found = advice(url=bucket.url.replace("test-", "missing-"))
    assert found == {"LIST": "check the bucket's name and the endpoint"}


def test_no_credentials(advice):
    found = advice(key="")
    assert found["LIST"] == "no request was sent: see the check of credentials" and "credentials" in found


def test_a_bucket_of_another_server(advice, bucket, control):
    control.bucket(bucket.name, {"elsewhere": {"region": "eu-west-1", "endpoint": "b.s3.eu-west-1.example"}})
    assert "another region" in advice()["LIST"]


def test_an_endpoint_that_ends_with_the_bucket(cli, bucket):
    endpoint = f"{bucket.server.endpoint}/{bucket.name}"
    assert "ends with the bucket" in cli.error("ls", bucket.url, "--endpoint-url", endpoint)
    checks = cli.checks(bucket.url, "--endpoint-url", endpoint, fails=True)
    assert "ends with the bucket" in checks["LIST"]["found"]


def test_the_advice_for_a_token_that_no_request_can_contain_is_what_to_do(cli, tmp_path, monkeypatch):
    (tmp_path / "torchobj.toml").write_text("")
    for name, value in (("ACCESS_KEY_ID", "AKIA"), ("SECRET_ACCESS_KEY", "secret"), ("SESSION_TOKEN", "a\nb")):
        monkeypatch.setenv(f"AWS_{name}", value)
    check = cli.checks("s3://bucket/", "--endpoint-url", "http://127.0.0.1:9", fails=True)["LIST"]
    assert check["found"].endswith("AWS_SESSION_TOKEN must be printable ASCII without spaces")
    assert check["advice"] == "no request was sent: copy the value again, in one line and without quotes"


def test_the_advice_for_rejected_credentials_does_not_end_in_nothing(cli, bucket, control):
    bucket.write("k", b"1")
    for code in ("InvalidToken", "InvalidSecurity"):
        control.faults({"operation": "ListObjectsV2", "action": {"status": 400, "code": code}})
        advice = cli.checks(bucket.url, fails=True)["LIST"]["advice"]
        assert "rejects the credentials" in advice and not advice.rstrip().endswith(":")


def test_doctor_of_a_prefix_without_objects_names_the_next_step(cli, bucket):
    bucket.write("train/a", b"1")
    check = cli.checks(f"{bucket.url}/trian/")["GET"]
    assert check["state"] == "note" and f"`torchobj ls {bucket.url}/`" in check["advice"]
