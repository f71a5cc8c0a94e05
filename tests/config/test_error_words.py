"""How errors and warnings about a store's settings begin, and what they suggest."""

import datetime
import logging
import socket
import ssl
import threading

import pytest

import torchobj
from tests.servers import launch
from tests.support.settings import s3_config
from torchobj import exceptions


def config(server, **changed):
    return s3_config(endpoint_url=server.endpoint, **{"profile": "strict", **changed})


@pytest.mark.parametrize("force_sdk", [False, True])
def test_a_profile_that_does_not_exist_is_named_first(strict_server, force_sdk):
    missing = config(strict_server, profile="no-such-profile", force_sdk=force_sdk)
    with pytest.raises(exceptions.CredentialsError, match=r's3://any/: the profile "no-such-profile" does not exist'):
        torchobj.Store("s3://any", config=missing).get("k")


@pytest.mark.parametrize("force_sdk", [False, True])
def test_https_to_a_server_without_tls_suggests_http(strict_server, force_sdk):
    endpoint = strict_server.endpoint.replace("http://", "https://")
    settings = s3_config(endpoint_url=endpoint, profile="strict", force_sdk=force_sdk)
    with pytest.raises(exceptions.StoreError, match="begin endpoint_url with http://"):
        torchobj.Store("s3://any", config=settings).get("k")


@pytest.mark.parametrize("force_sdk", [False, True])
def test_errors_of_refused_and_missing_objects_name_the_endpoint(strict_server, bucket, force_sdk):
    store = torchobj.Store(bucket.url, config=config(strict_server, force_sdk=force_sdk))
    with pytest.raises(exceptions.ObjectNotFoundError, match=f"the endpoint is {strict_server.endpoint}"):
        store.get("missing")
    stranger = torchobj.Store(bucket.url, config=config(strict_server, anonymous=True, force_sdk=force_sdk))
    for call in (lambda: stranger.get("k"), lambda: stranger.put("k", b"x"), lambda: list(stranger.list())):
        with pytest.raises(exceptions.AccessDeniedError, match=f"the endpoint is {strict_server.endpoint}"):
            call()


def test_an_endpoint_with_a_path_warns_once(strict_server, caplog):
    caplog.set_level(logging.WARNING)
    settings = s3_config(endpoint_url=f"{strict_server.endpoint}/bucket", profile="strict", max_attempts=1)
    store = torchobj.Store("s3://any", config=settings)
    for _ in range(2):
        with pytest.raises(exceptions.StoreError):
            store.get("k")
    assert caplog.text.count("the endpoint has the path /bucket") == 1


def test_a_region_with_a_line_break_is_a_wrong_setting(strict_server, monkeypatch):
    with pytest.raises(exceptions.ConfigError, match="region="):
        torchobj.S3Options(region="eu-west-1\r\nx-amz-acl: public-read")
    monkeypatch.setenv("AWS_REGION", "eu west 1")
    for force_sdk in (False, True):
        with pytest.raises(exceptions.ConfigError, match="region="):
            torchobj.Store("s3://any", config=config(strict_server, force_sdk=force_sdk)).get("k")


def self_signed(folder):
    """Creates a CA certificate that a server uses as its own, as `openssl req -x509` does."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return files


def test_the_error_of_a_self_signed_certificate_has_a_hint(tmp_path):
    certificate, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def serve(listener):
        while True:
            try:
                context.wrap_socket(listener.accept()[0], server_side=True).close()
            except ssl.SSLError:
                pass
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        endpoint = f"https://localhost:{listener.getsockname()[1]}"
        settings = s3_config(endpoint_url=endpoint, anonymous=True, ca_bundle=certificate, max_attempts=1)
        with pytest.raises(exceptions.StoreError, match="basicConstraints=CA:FALSE"):
            torchobj.Store("s3://any", config=settings).get("k")


def test_the_error_of_an_unknown_ca_names_the_setting(credentials):
    with launch.start("strict", "--tls") as server:
        credentials("words", server)
        with pytest.raises(exceptions.StoreError, match="set ca_bundle to the PEM file of the CA"):
            torchobj.Store("s3://any", config=config(server, profile="words")).get("k")


def test_a_commit_without_a_response_times_out_with_its_setting_and_a_log(control, strict_server, bucket, caplog):
    caplog.set_level(logging.WARNING)
    control.faults({"operation": "CompleteMultipartUpload", "action": {"delay_first_byte_s": 3600, "status": 500}})
    waits = {"first_byte_timeout_s": 1.0, "idle_timeout_s": 1.0, "commit_timeout_s": 3.0}
    store = torchobj.Store(bucket.url, config=config(strict_server, whole_below_bytes=1 << 20, **waits))
    with pytest.raises(exceptions.StoreTimeoutError, match="commit_timeout_s=3"):
        store.put("k", bytes(6 << 20))
    assert f"commit {bucket.url}/k: the store sent nothing for 1 s" in caplog.text
