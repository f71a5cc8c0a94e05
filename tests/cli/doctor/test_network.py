"""The checks of `torchobj doctor` on endpoint, proxy, TLS, region and clock."""

import ssl

import pytest

from tests.config.test_error_words import listening, self_signed, with_tls
from torchobj.cli.doctor import network


@pytest.mark.providers("s3", "gs")
def test_a_clock_that_differs_is_a_warning(cli, bucket, control):
    control.clock(-3600)
    assert cli.checks(bucket.url)["clock"]["state"] == "warning"


def test_a_wrong_region_is_a_warning(cli, bucket):
    check = cli.checks(bucket.url, "--region", "eu-west-1")["region"]
    assert check["state"] == "warning" and "--region us-east-1" in check["advice"]


def test_doctor_of_an_endpoint_without_a_server_fails(cli, bucket):
    checks = cli.checks(bucket.url, "--endpoint-url", "http://127.0.0.1:9", fails=True)
    assert checks["connection"]["state"] == "failed"


def test_doctor_of_an_endpoint_with_https_and_a_server_without_names_the_scheme(cli, bucket):
    endpoint = bucket.server.endpoint.replace("http://", "https://")
    check = cli.checks(bucket.url, "--endpoint-url", endpoint, fails=True)["connection"]
    assert "begin the endpoint with http://" in check["advice"] and "urlopen" not in check["found"]


def test_doctor_of_a_server_whose_ca_is_unknown_names_the_variable(cli, bucket, tmp_path):
    with listening(with_tls(*self_signed(tmp_path, is_ca=False))) as host:
        checks = cli.checks(bucket.url, "--endpoint-url", f"https://{host}", fails=True)
        error = cli.error("ls", bucket.url, "--endpoint-url", f"https://{host}")
    assert "AWS_CA_BUNDLE" in error
    for check in (checks["connection"], checks["LIST"]):
        assert check["state"] == "failed" and "AWS_CA_BUNDLE" in check["advice"], check
        assert "to the PEM file of the CA that signed the server's certificate" in check["advice"]
    assert "check the endpoint" not in checks["connection"]["advice"]


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (18, "set AWS_CA_BUNDLE to the PEM file of the CA"),
        (20, "set AWS_CA_BUNDLE to the PEM file of the CA"),
        (62, "the endpoint must have a name that is in the server's certificate"),
        (10, "the server's certificate is not valid"),
        (23, "the operator of the server must replace its certificate"),
        (26, "the operator of the server must replace its certificate"),
    ],
)
def test_the_advice_for_a_certificate_is_that_for_its_reason(code, advice):
    error = ssl.SSLCertVerificationError()
    error.verify_code = code
    assert network._certificate_advice("s3", error).startswith(advice)
    assert "AWS" not in network._certificate_advice("gs", error)


def test_doctor_of_a_port_of_tls_without_https_names_the_scheme(cli, bucket):
    def answer(connection):
        connection.recv(1 << 20)
        connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    with listening(answer) as host:
        check = cli.checks(bucket.url, "--endpoint-url", f"http://{host}", fails=True)["connection"]
    assert check["state"] == "warning" and "begin the endpoint with https://" in check["advice"]


def test_doctor_notes_that_http_proxy_in_upper_case_is_ignored(cli, bucket, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:1")
    assert cli.checks(bucket.url)["proxy"]["found"] == "none: HTTP_PROXY is ignored"


@pytest.mark.parametrize(
    ("proxy", "expected"),
    [
        ("http://user:topsecret@127.0.0.1:9", "http://...@127.0.0.1:9"),
        ("user:topsecret@127.0.0.1:9", "...@127.0.0.1:9"),
        ("http://user:topsecret/x@127.0.0.1:9", "not a valid URL"),
        ("http://user:topsecret?x@127.0.0.1:9", "not a valid URL"),
        ("http://127.0.0.1:topsecret", "not a valid URL"),
        ("http://[topsecret", "not a valid URL"),
    ],
)
def test_doctor_masks_all_before_the_last_at_sign_of_a_proxy(cli, bucket, monkeypatch, proxy, expected):
    monkeypatch.setenv("http_proxy", proxy)
    done = cli.run("doctor", bucket.url)
    assert done.exit_code == 1 and expected in done.stdout
    assert "topsecret" not in done.output and "unexpected" not in done.output


def test_doctor_shows_no_password_of_an_endpoint_that_is_not_a_url(cli, bucket, monkeypatch, tmp_path):
    (tmp_path / "torchobj.toml").write_text("")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:topsecret/x@127.0.0.1:9")
    done = cli.run("doctor", "s3://bucket")
    assert done.exit_code == 1 and "not a valid URL (AWS_ENDPOINT_URL)" in done.stdout
    assert "topsecret" not in done.output and "unexpected" not in done.output
