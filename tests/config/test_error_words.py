"""How errors and warnings about a store's settings begin, and what they suggest."""

import contextlib
import datetime
import http.server
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
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
@pytest.mark.parametrize("profile", [None, "empty"])
@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"AWS_EC2_METADATA_DISABLED": "true"}, "IMDS disabled"),
        (
            {"AWS_EC2_METADATA_DISABLED": "false", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9"},
            "Connection refused",
        ),
    ],
)
def test_the_sources_without_credentials_are_named_first_and_the_metadata_service_last(
    strict_server, tmp_path, monkeypatch, force_sdk, profile, variables, reason
):
    (tmp_path / "config").write_text("[profile empty]\nregion = us-east-1\n")
    variables |= {"AWS_CONFIG_FILE": str(tmp_path / "config")} | ({"AWS_PROFILE": profile} if profile else {})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(exceptions.CredentialsError) as caught:
        torchobj.Store("s3://any", config=config(strict_server, profile=None, force_sdk=force_sdk)).get("k")
    text = str(caught.value)
    sources = f'the environment, the profile "{profile or "default"}" of {tmp_path}/config or '
    assert f"s3://any/: no credentials were found in {sources}" in text and "\n" not in text
    assert "or a role of this machine; set AWS_ACCESS" in text
    assert "`aws sso login`, or S3Options(anonymous=True)" in text
    assert text.index("anonymous=True") < text.index("(the metadata service of the machine: ") < text.index(reason)


def test_a_profile_without_credentials_is_named(strict_server, tmp_path, monkeypatch):
    (tmp_path / "config").write_text("[profile empty]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    words = f'no credentials were found in the profile "empty" of {tmp_path}/config or .* a role of this machine; set '
    with pytest.raises(exceptions.CredentialsError, match=words):
        torchobj.Store("s3://any", config=config(strict_server, profile="empty")).get("k")


def test_an_expired_login_is_the_reason(strict_server, tmp_path, monkeypatch):
    (tmp_path / "config").write_text(
        "[profile sso]\nsso_session = s\nsso_account_id = 1\nsso_role_name = r\nregion = us-east-1\n"
        "[sso-session s]\nsso_region = us-east-1\nsso_start_url = https://d-1.awsapps.com/start\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "sso")
    with pytest.raises(exceptions.CredentialsError, match="no credentials: .*SSO token; `aws sso login --profile sso`"):
        torchobj.Store("s3://any", config=config(strict_server, profile=None)).get("k")


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


@pytest.mark.parametrize("force_sdk", [False, True])
@pytest.mark.parametrize("path", ["/minio", "/a/b/"])
def test_errors_name_the_path_of_the_endpoint(strict_server, force_sdk, path):
    settings = s3_config(endpoint_url=f"{strict_server.endpoint}{path}", profile="strict", force_sdk=force_sdk)
    with pytest.raises(exceptions.StoreError, match=f"the endpoint is {strict_server.endpoint}{path.rstrip('/')}; "):
        torchobj.Store("s3://any", config=settings).get("k")


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


def self_signed(folder, *, is_ca=True):
    """Creates a certificate that a server uses as its own: that of a CA, as `openssl req -x509` does, or not."""
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
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return files


@contextlib.contextmanager
def listening(answer):
    """A server that calls a function with each connection. Yields its host and port."""

    def serve(listener):
        while True:
            try:
                with listener.accept()[0] as connection:
                    answer(connection)
            except ssl.SSLError:
                pass
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"localhost:{listener.getsockname()[1]}"


def with_tls(certificate, key):
    """A function for `listening`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return lambda connection: context.wrap_socket(connection, server_side=True).close()


def test_the_error_of_a_self_signed_certificate_has_a_hint(tmp_path):
    certificate, key = self_signed(tmp_path)
    with listening(with_tls(certificate, key)) as host:
        settings = s3_config(endpoint_url=f"https://{host}", anonymous=True, ca_bundle=certificate, max_attempts=1)
        with pytest.raises(exceptions.StoreError, match="the self-signed certificate of the server"):
            torchobj.Store("s3://any", config=settings).get("k")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_the_error_of_a_certificate_of_version_1_says_so(tmp_path):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    request = ["openssl", "req", "-new", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", key]
    made = subprocess.run(request, capture_output=True, check=True).stdout
    # Without extensions, it has version 1.
    sign = ["openssl", "x509", "-req", "-signkey", key, "-out", certificate]
    subprocess.run(sign, input=made, capture_output=True, check=True)
    with listening(with_tls(certificate, key)) as host:
        settings = s3_config(endpoint_url=f"https://{host}", anonymous=True, ca_bundle=certificate, max_attempts=1)
        with pytest.raises(exceptions.StoreError, match=r"X\.509 version 1, which is not supported"):
            torchobj.Store("s3://any", config=settings).get("k")


NGINX = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
GO = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"
PAGE = b"<html><body>The plain HTTP request was sent to HTTPS port</body></html>"
ALERT = b"\x15\x03\x01\x00\x02\x02\x46"


@pytest.mark.parametrize(
    "response", [NGINX % (len(PAGE), PAGE), GO, ALERT, b""], ids=["nginx", "Go", "alert", "closed"]
)
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_plain_request_to_a_port_of_tls_suggests_https(monkeypatch, scheme, response):
    def answer(connection):
        head = connection.recv(1 << 20)
        connection.sendall(response.partition(b"<html>")[0] if head.startswith(b"HEAD ") else response)

    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    with listening(answer) as host:
        options = {"endpoint_url": f"http://{host}", "anonymous": True}
        settings = s3_config(**options, max_attempts=1)
        if scheme == "gs":
            settings = torchobj.StoreConfig(gcs=torchobj.GCSOptions(**options), max_attempts=1)
        store = torchobj.Store(f"{scheme}://bucket", config=settings)
        for call in (lambda: store.get("k"), lambda: store.head("k"), lambda: list(store.list())):
            with pytest.raises(exceptions.StoreError, match="if the server uses TLS, begin endpoint_url with https://"):
                call()


def test_other_responses_to_a_plain_request_suggest_nothing_about_tls():
    body = b"<Error><Code>InvalidArgument</Code><Message>HTTPS</Message></Error>"
    response = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)

    def answer(connection):
        connection.recv(1 << 20)
        connection.sendall(response)

    with listening(answer) as host:
        settings = s3_config(endpoint_url=f"http://{host}", anonymous=True, max_attempts=1)
        with pytest.raises(exceptions.StoreError) as error:
            torchobj.Store("s3://bucket", config=settings).get("k")
    assert "if the server uses TLS" not in str(error.value)


PROXIED = """
import sys, torchobj
options = torchobj.S3Options(endpoint_url=sys.argv[1], anonymous=True)
for seconds in (5, 6):
    config = torchobj.StoreConfig(s3=options, max_attempts=1, first_byte_timeout_s=seconds)
    try: torchobj.Store("s3://bucket", config=config).get("k")
    except torchobj.StoreError: pass
"""


@pytest.mark.parametrize(
    ("variables", "endpoint", "count"),
    [
        ({"HTTP_PROXY": "http://proxy:1"}, "http://127.0.0.1:9", 1),
        ({"HTTP_PROXY": "http://proxy:1", "no_proxy": "127.0.0.1"}, "http://127.0.0.1:9", 0),
        ({"HTTP_PROXY": "http://proxy:1", "http_proxy": "http://127.0.0.1:9"}, "http://127.0.0.1:9", 0),
        ({"HTTP_PROXY": "http://proxy:1"}, "https://127.0.0.1:9", 0),
    ],
)
def test_that_the_variable_http_proxy_in_upper_case_is_ignored_is_logged_once(variables, endpoint, count):
    script = [sys.executable, "-c", PROXIED, endpoint]
    done = subprocess.run(script, env=os.environ | variables, capture_output=True, text=True, check=True)
    assert done.stderr.count("HTTP_PROXY is ignored") == count, done.stderr


def test_the_error_of_an_unknown_ca_names_the_setting(credentials):
    with launch.start("strict", "--tls") as server:
        credentials("words", server)
        with pytest.raises(exceptions.StoreError, match="set ca_bundle to the PEM file of the CA .* AWS_CA_BUNDLE"):
            torchobj.Store("s3://any", config=config(server, profile="words")).get("k")


def test_a_commit_without_a_response_times_out_with_its_setting_and_a_log(control, strict_server, bucket, caplog):
    caplog.set_level(logging.WARNING)
    control.faults({"operation": "CompleteMultipartUpload", "action": {"delay_first_byte_s": 3600, "status": 500}})
    waits = {"first_byte_timeout_s": 1.0, "idle_timeout_s": 1.0}
    store = torchobj.Store(
        bucket.url,
        config=config(
            strict_server, advanced=torchobj.AdvancedOptions(whole_below_bytes=1 << 20, commit_timeout_s=3.0), **waits
        ),
    )
    with pytest.raises(exceptions.StoreTimeoutError, match="commit_timeout_s=3"):
        store.put("k", bytes(6 << 20))
    assert f"commit {bucket.url}/k: the store sent nothing for 1 s" in caplog.text


class Console(http.server.BaseHTTPRequestHandler):
    """Responds as the console of MinIO: a page to any GET, an error to any other method."""

    server_version, sys_version = "MinIO Console", ""

    def do_GET(self):
        """Sends the page."""
        body = b"<!doctype html><html></html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0123"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  name of the base class

    def do_PUT(self):
        """Refuses."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def version_string(self):
        """The value of `Server`."""
        return self.server_version

    def log_message(self, *_):
        """Logs nothing."""


def test_the_console_of_minio_is_recognized():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Console) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        store = torchobj.Store("s3://b", config=s3_config(endpoint_url=endpoint, anonymous=True, max_attempts=2))
        for call in (
            lambda: store.get("k"),
            lambda: store.head("k"),
            lambda: list(store.list()),
            lambda: store.put("k", b"x"),
        ):
            with pytest.raises(exceptions.TorchobjError, match="console of MinIO.*9000"):
                call()
        server.shutdown()


@pytest.mark.parametrize("force_sdk", [False, True])
def test_an_unsupported_condition_is_named(bucket, control, force_sdk):
    store = torchobj.Store(bucket.url, config=config(bucket.server, force_sdk=force_sdk))
    control.faults({"operation": "PutObject", "action": {"status": 501, "code": "NotImplemented"}})
    with pytest.raises(exceptions.StoreError, match=r"\(If-None-Match\).*conditional_writes=False") as raised:
        store.put("k", b"x", overwrite=False)
    assert "checksum" not in str(raised.value)
    with pytest.raises(exceptions.StoreError, match=r"\(If-Match\).*conditional_writes=False"):
        store.put("k", b"x", if_version='"0"')
    with pytest.raises(exceptions.StoreError, match="checksum"):
        store.put("k", b"x")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE\n"),
        ("AWS_SECRET_ACCESS_KEY", "canary\n"),
        ("AWS_SESSION_TOKEN", "can ary"),
        ("AWS_ACCESS_KEY_ID", "AKIA EXAMPLE"),
    ],
)
def test_a_variable_that_no_request_can_contain_is_named(strict_server, monkeypatch, variable, value):
    for name, usual in (("AWS_ACCESS_KEY_ID", "AKIA"), ("AWS_SECRET_ACCESS_KEY", "secret"), (variable, value)):
        monkeypatch.setenv(name, usual)
    settings = s3_config(endpoint_url=strict_server.endpoint)
    with pytest.raises(exceptions.CredentialsError, match=f"{variable} must be printable ASCII") as raised:
        torchobj.Store("s3://any", config=settings).get("k")
    assert value.strip() not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "damaged"),
        ("[1]", "damaged"),
        ('{"type": "authorized_user"}', "authorized_user"),
        (
            json.dumps(
                {
                    "type": "external_account",
                    "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
                    "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
                    "token_url": "http://127.0.0.1:9/token",
                    "credential_source": {"file": "/no/such/token"},
                }
            ),
            "/no/such/token",
        ),
    ],
)
def test_a_file_of_google_credentials_that_cannot_be_used_is_named(tmp_path, monkeypatch, content, words):
    file = tmp_path / "adc.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    settings = torchobj.StoreConfig(gcs=torchobj.GCSOptions(endpoint_url="http://127.0.0.1:9"), max_attempts=1)
    with pytest.raises(exceptions.CredentialsError, match=f"GOOGLE_APPLICATION_CREDENTIALS={file}") as raised:
        torchobj.Store("gs://b", config=settings).get("k")
    assert words in str(raised.value)


def test_a_missing_token_file_of_aws_is_named(strict_server, monkeypatch):
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/no/such/token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/r")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    settings = s3_config(endpoint_url=strict_server.endpoint)
    with pytest.raises(exceptions.CredentialsError, match="/no/such/token"):
        torchobj.Store("s3://any", config=settings).get("k")


def test_a_role_of_a_profile_is_assumed_in_the_region_of_the_environment(strict_server, tmp_path, monkeypatch):
    regions = []

    class Sts(Console):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            regions.append(self.headers["Authorization"].split("/")[2])
            keys = f"<AccessKeyId>{strict_server.access_key}</AccessKeyId>"
            keys += f"<SecretAccessKey>{strict_server.secret_key}</SecretAccessKey><SessionToken>t</SessionToken>"
            keys = f"<Credentials>{keys}<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>"
            body = f"<AssumeRoleResponse><AssumeRoleResult>{keys}</AssumeRoleResult></AssumeRoleResponse>".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    file = tmp_path / "config"
    file.write_text(
        "[profile role]\nrole_arn = arn:aws:iam::123456789012:role/r\nsource_profile = keys\n"
        "[profile keys]\naws_access_key_id = AKIA\naws_secret_access_key = secret\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sts) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{server.server_port}")
        settings = s3_config(endpoint_url=strict_server.endpoint, profile="role", max_attempts=1)
        # The server does not know the token; the keys were requested nevertheless.
        with pytest.raises(exceptions.StoreError):
            torchobj.Store("s3://any", config=settings).get("k")
        server.shutdown()
    assert set(regions) == {"eu-west-3"}
