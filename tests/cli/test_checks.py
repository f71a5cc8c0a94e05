"""`torchobj doctor` and `torchobj bench`."""

import signal
import ssl

import pytest

import torchobj
from tests.config.test_error_words import listening, self_signed, with_tls
from tests.support.interrupting import HELD_BACK_S
from tests.support.prefetching import eventually
from torchobj import exceptions
from torchobj.cli import doctor, write_checks
from torchobj.cli.bench import Level, is_rising, knee, measure, suggestions
from torchobj.cli.doctor import gcs_source, s3_source
from torchobj.config import StoreConfig, config_file


def states(records):
    return {record["name"]: record["state"] for record in records}


@pytest.mark.parametrize(
    ("failure", "why"),
    [(KeyboardInterrupt(), "was interrupted"), (exceptions.AccessDeniedError("delete: 403"), "failed (delete: 403")],
    ids=["interrupted", "denied"],
)
def test_the_object_of_an_interrupted_check_that_is_not_deleted_is_named(monkeypatch, failure, why):
    def fail_with(error):
        def fail(*_, **__):
            raise error

        return fail

    store = torchobj.Store("memory://interrupted")
    monkeypatch.setattr(torchobj.Store, "get", fail_with(KeyboardInterrupt()))
    monkeypatch.setattr(torchobj.Store, "delete", fail_with(failure))
    with pytest.raises(KeyboardInterrupt) as caught:
        write_checks.put(store, "a {b}/")
    message = str(caught.value)
    assert message.startswith("interrupted; memory://interrupted/a {b}/") and f"its deletion {why}" in message


@pytest.mark.providers("s3", "gs")
class TestDoctor:
    def test_it_lists_and_reads_without_writing(self, cli, bucket, control):
        bucket.write("train/k", b"1")
        control.clear_requests()
        found = states(cli.records("doctor", f"{bucket.url}/train/"))
        assert {found[name] for name in ("LIST", "GET", "DNS", "connection", "clock", "memfd")} == {"ok"}
        assert found["PUT"] == "note" and found["credentials"] in ("ok", "note")
        assert {request.method for request in control.requests()} <= {"GET", "HEAD"}

    def test_write_deletes_its_own_object_only(self, cli, bucket, control):
        bucket.write("train/k", b"1")
        found = states(cli.records("doctor", f"{bucket.url}/train/", "--write"))
        assert (found["PUT"], found["conditions"]) == ("ok", "ok") and bucket.keys() == ["train/k"]
        deleted = {request.key for request in control.requests() if request.method == "DELETE"}
        assert len(deleted) == 2 and all(key.startswith("train/.torchobj-doctor-") for key in deleted)

    def test_an_object_that_could_not_be_read_back_is_deleted(self, cli, bucket, control):
        control.faults({"operation": "GetObject", "action": {"status": 403, "code": "AccessDenied"}})
        done = cli.run("doctor", f"{bucket.url}/train/", "--write", "--json")
        assert done.exit_code == 1 and bucket.keys() == []

    def test_an_object_whose_write_had_no_response_is_deleted(self, cli, bucket, control, monkeypatch):
        """The server stores the object, and the command does not wait for the response for minutes."""
        monkeypatch.setattr(doctor, "_WRITE_LIMIT_S", 0.3)
        control.faults({"operation": "PutObject", "action": {"delay_first_byte_s": HELD_BACK_S}})
        shown = cli.run("doctor", f"{bucket.url}/train/", "--write").output
        assert control.requests("PutObject") and bucket.keys() == [] and "may exist" not in shown

    def test_an_object_that_could_not_be_deleted_after_a_failed_check_is_named(self, cli, bucket, control, monkeypatch):
        monkeypatch.setattr(doctor, "_WRITE_LIMIT_S", 0.3)
        denied = {"action": {"status": 403, "code": "AccessDenied"}}
        control.faults({"operation": "GetObject"} | denied, {"operation": "DeleteObject"} | denied)
        found = {record["name"]: record for record in cli.failed_records("doctor", f"{bucket.url}/a b/", "--write")}
        [key] = bucket.keys()
        left = f"{bucket.url}/{key} may exist, because its deletion failed"
        assert (
            left in found["PUT"]["found"] and f"`torchobj rm '{bucket.url}/{key}'` deletes it" in found["PUT"]["found"]
        )

    @pytest.mark.parametrize("skip", [0, 2], ids=["PUT", "conditions"])
    def test_an_interrupted_write_is_deleted(self, cli, bucket, control, skip):
        control.faults({"operation": "PutObject", "skip": skip, "action": {"delay_first_byte_s": HELD_BACK_S}})
        process = cli.start("doctor", f"{bucket.url}/train/", "--write", stdout=-1, stderr=-1)
        assert eventually(lambda: len(control.requests("PutObject")) > skip and len(bucket.keys()) == 1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HELD_BACK_S / 2)
        assert (process.returncode, err) == (130, b"torchobj: interrupted\n") and bucket.keys() == []

    def test_a_failed_check_is_exit_code_1_with_advice(self, cli, bucket):
        done = cli.run("doctor", bucket.url.replace("test-", "missing-"))
        assert done.exit_code == 1 and "FAILED  LIST" in done.stdout
        assert "not tried: LIST failed" in done.stdout

    @pytest.mark.parametrize("operation", ["LIST", "GET", "PUT"])
    def test_a_missing_permission_is_named_and_the_credentials_are_accepted(self, cli, bucket, control, operation):
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

    def test_requests_without_credentials_to_a_bucket_that_is_not_public(self, cli, bucket):
        records = cli.failed_records("doctor", bucket.url, "--no-sign-request")
        [failed] = [record for record in records if record["state"] == "failed"]
        assert failed["advice"].startswith("the bucket is not public, and no credentials are used: requests ")

    def test_a_clock_that_differs_is_a_warning(self, cli, bucket, control):
        control.clock(-3600)
        assert states(cli.records("doctor", bucket.url))["clock"] == "warning"

    def test_no_secret_is_shown(self, cli, bucket, control):
        shown = cli.run("doctor", bucket.url, "--write").output
        assert bucket.server.secret_key not in shown and str(bucket.server.token) not in shown


class TestDoctorOfS3:
    """Conditions that servers do not compare, and the advice after a refused LIST."""

    @pytest.mark.parametrize(
        ("flag", "state", "found"),
        [("ignores_conditions", "warning", "(overwrite=False)"), ("refuses_if_match", "note", "refuses If-Match")],
    )
    def test_conditions_that_the_server_does_not_compare_are_named(self, cli, bucket, control, flag, state, found):
        control.bucket(bucket.name, {flag: True})
        records = {record["name"]: record for record in cli.records("doctor", bucket.url, "--write")}
        assert records["conditions"]["state"] == state and found in records["conditions"]["found"]
        assert bucket.keys() == []

    @pytest.mark.parametrize(("method", "skip"), [("PUT", 1), ("PUT", 2), ("DELETE", 2)])
    def test_a_condition_that_could_not_be_tried_is_a_failed_check(self, cli, bucket, control, method, skip):
        operation = {"PUT": "PutObject", "DELETE": "DeleteObject"}[method]
        control.faults({"operation": operation, "skip": skip, "action": {"status": 403, "code": "AccessDenied"}})
        records = {record["name"]: record for record in cli.failed_records("doctor", bucket.url, "--write")}
        assert (
            records["conditions"]["state"] == "failed" and "accepts the credentials" in records["conditions"]["advice"]
        )
        assert "torchobj doctor" not in records["conditions"]["found"]

    @pytest.fixture
    def advice(self, cli, bucket, monkeypatch, tmp_path):
        """Calls doctor with keys of the environment. Returns the failed checks and their advice."""
        (tmp_path / "torchobj.toml").write_text(f'["s3://"]\ns3 = {{ endpoint_url = "{bucket.server.endpoint}" }}\n')
        config_file._read.clear()

        def call(*options, url=bucket.url, key=bucket.server.access_key, secret=bucket.server.secret_key):
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
            records = cli.failed_records("doctor", url, *options)
            return {record["name"]: record["advice"] for record in records if record["state"] == "failed"}

        return call

    def test_a_wrong_secret(self, advice):
        found = advice(secret="wrong")
        assert found.keys() == {"LIST"} and "rejects the credentials (AWS_ACCESS_KEY_ID and" in found["LIST"]
        assert found["LIST"].endswith("check the secret access key")

    def test_an_unknown_access_key(self, advice):
        found = advice(key="AKIAUNKNOWN")
        assert found.keys() == {"LIST"} and found["LIST"].endswith("check that the access key belongs to this endpoint")

    def test_an_unknown_bucket(self, advice, bucket):
        found = advice(url=bucket.url.replace("test-", "missing-"))
        assert found == {"LIST": "check the bucket's name and the endpoint"}

    def test_no_credentials(self, advice):
        found = advice(key="")
        assert found["LIST"] == "no request was sent: see the check of credentials" and "credentials" in found

    def test_a_bucket_of_another_server(self, advice, bucket, control):
        control.bucket(bucket.name, {"elsewhere": {"region": "eu-west-1", "endpoint": "b.s3.eu-west-1.example"}})
        assert "another region" in advice()["LIST"]

    def test_a_wrong_region_is_a_warning(self, cli, bucket):
        found = {record["name"]: record for record in cli.records("doctor", bucket.url, "--region", "eu-west-1")}
        assert found["region"]["state"] == "warning" and "--region us-east-1" in found["region"]["advice"]

    def test_an_endpoint_that_ends_with_the_bucket(self, cli, bucket):
        endpoint = f"{bucket.server.endpoint}/{bucket.name}"
        assert "ends with the bucket" in cli.error("ls", bucket.url, "--endpoint-url", endpoint)
        records = cli.failed_records("doctor", bucket.url, "--endpoint-url", endpoint)
        assert "ends with the bucket" in next(record for record in records if record["name"] == "LIST")["found"]


def test_doctor_without_a_url_checks_the_machine(cli):
    found = states(cli.records("doctor"))
    assert {"versions", "open files", "locked memory", "/dev/shm", "memfd", "memory budget"} <= found.keys()


def test_doctor_of_an_endpoint_without_a_server_fails(cli, bucket):
    done = cli.run("doctor", bucket.url, "--endpoint-url", "http://127.0.0.1:9", "--json")
    assert done.exit_code == 1 and '"connection", "state": "failed"' in done.stdout


def test_doctor_of_an_endpoint_with_https_and_a_server_without_names_the_scheme(cli, bucket):
    endpoint = bucket.server.endpoint.replace("http://", "https://")
    records = cli.failed_records("doctor", bucket.url, "--endpoint-url", endpoint)
    found = next(record for record in records if record["name"] == "connection")
    assert "begin the endpoint with http://" in found["advice"] and "urlopen" not in found["found"]


def checks_of(cli, *arguments):
    """The checks of a `doctor` that fails, by their names."""
    return {record["name"]: record for record in cli.failed_records("doctor", *arguments)}


def test_doctor_of_a_server_whose_ca_is_unknown_names_the_variable(cli, bucket, tmp_path):
    with listening(with_tls(*self_signed(tmp_path, is_ca=False))) as host:
        checks = checks_of(cli, bucket.url, "--endpoint-url", f"https://{host}")
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
    assert doctor._certificate_advice("s3", error).startswith(advice)
    assert "AWS" not in doctor._certificate_advice("gs", error)


def test_doctor_of_a_port_of_tls_without_https_names_the_scheme(cli, bucket):
    def answer(connection):
        connection.recv(1 << 20)
        connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    with listening(answer) as host:
        checks = checks_of(cli, bucket.url, "--endpoint-url", f"http://{host}")
    assert (
        checks["connection"]["state"] == "warning"
        and "begin the endpoint with https://" in checks["connection"]["advice"]
    )


def test_doctor_notes_that_http_proxy_in_upper_case_is_ignored(cli, bucket, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:1")
    found = {record["name"]: record for record in cli.records("doctor", bucket.url)}
    assert found["proxy"]["found"] == "none: HTTP_PROXY is ignored"


def test_the_advice_for_a_token_that_no_request_can_contain_is_what_to_do(cli, tmp_path, monkeypatch):
    (tmp_path / "torchobj.toml").write_text("")
    for name, value in (("ACCESS_KEY_ID", "AKIA"), ("SECRET_ACCESS_KEY", "secret"), ("SESSION_TOKEN", "a\nb")):
        monkeypatch.setenv(f"AWS_{name}", value)
    check = checks_of(cli, "s3://bucket/", "--endpoint-url", "http://127.0.0.1:9")["LIST"]
    assert check["found"].endswith("AWS_SESSION_TOKEN must be printable ASCII without spaces")
    assert check["advice"] == "no request was sent: copy the value again, in one line and without quotes"


def test_the_advice_for_rejected_credentials_does_not_end_in_nothing(cli, bucket, control):
    bucket.write("k", b"1")
    for code in ("InvalidToken", "InvalidSecurity"):
        control.faults({"operation": "ListObjectsV2", "action": {"status": 400, "code": code}})
        advice = checks_of(cli, bucket.url)["LIST"]["advice"]
        assert "rejects the credentials" in advice and not advice.rstrip().endswith(":")


def test_doctor_of_a_prefix_without_objects_names_the_next_step(cli, bucket):
    bucket.write("train/a", b"1")
    found = {record["name"]: record for record in cli.records("doctor", f"{bucket.url}/trian/")}
    assert found["GET"]["state"] == "note" and f"`torchobj ls {bucket.url}/`" in found["GET"]["advice"]


def test_doctor_shows_a_proxy_without_its_password(cli, bucket, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://user:topsecret@127.0.0.1:9")
    done = cli.run("doctor", bucket.url)
    assert done.exit_code == 1 and "http://...@127.0.0.1:9" in done.stdout and "topsecret" not in done.output


@pytest.mark.parametrize(
    ("proxy", "expected"),
    [
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


@pytest.mark.parametrize("value", ['["topsecret"]', '{ name = "topsecret" }'])
def test_a_value_of_the_wrong_type_in_the_configuration_file_is_not_shown(cli, tmp_path, value):
    (tmp_path / "torchobj.toml").write_text(f'["s3://"]\ns3 = {{ profile = {value} }}\n')
    config_file._read.clear()
    done = cli.run("doctor")
    assert done.exit_code == 1 and "profile=<class" in done.stdout and "topsecret" not in done.output


@pytest.mark.parametrize(
    "url", ["s3://AKIA:topsecret/x@bkt/", "gs://AKIA:topsecret@bkt/", "s4://AKIA:topsecret/x@bkt/"]
)
def test_a_password_in_a_url_is_not_repeated(cli, url):
    for command in ("ls", "doctor"):
        assert "topsecret" not in cli.error(command, url)
    assert "topsecret" not in cli.error("ls", url.replace("AKIA", "\n"))
    assert "topsecret" not in cli.error("ls", url.replace("://", ":///"))
    assert "topsecret" not in cli.error("ls", "--region", "x", url.replace("s3://", "gs://"))


S3 = torchobj.S3Options


WEB = {"AWS_WEB_IDENTITY_TOKEN_FILE": "/no/token", "AWS_ROLE_ARN": "arn:aws:iam::1:role/irsa"}


@pytest.mark.parametrize(
    ("options", "environ", "state", "expected"),
    [
        (S3(anonymous=True), {}, "note", "not signed"),
        (
            S3(access_key_id="a", secret_access_key="topsecret"),
            {},
            "ok",
            "access_key_id and secret_access_key of S3Options",
        ),
        (S3(), {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "topsecret"}, "ok", "without AWS_SESSION_TOKEN"),
        (S3(profile="p"), {}, "ok", "profile p in {home}/credentials: keys (access key id ...WXYZ)"),
        (S3(profile="p"), WEB, "ok", "profile p in {home}/credentials: keys"),
        (S3(), {"AWS_DEFAULT_PROFILE": "my p", "AWS_PROFILE": "p"}, "ok", "profile my p in {home}/config: keys"),
        (S3(), {"AWS_PROFILE": "sso"}, "ok", "profile sso in {home}/config: SSO, role r of account 1"),
        (
            S3(profile="role"),
            {},
            "ok",
            "role arn:aws:iam::1:role/r, assumed with profile p in {home}/credentials: keys",
        ),
        (S3(profile="mfa"), {}, "failed", "needs a code of mfa_serial=device"),
        (
            S3(),
            {"AWS_PROFILE": "p", **WEB},
            "ok",
            "role arn:aws:iam::1:role/irsa, assumed with the web identity token /no/token",
        ),
        (S3(profile="unknown"), {}, "failed", 'the profile "unknown" does not exist in {home}/config or'),
        (S3(), {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://x"}, "ok", "container's credential service"),
        (S3(), {"AWS_EC2_METADATA_DISABLED": "true"}, "failed", "none, and AWS_EC2_METADATA_DISABLED=true"),
        (S3(), {}, "note", "those of the machine's role"),
        (S3(), {"AWS_ACCESS_KEY_ID": "a"}, "failed", "AWS_ACCESS_KEY_ID is set, and AWS_SECRET_ACCESS_KEY is not"),
        (S3(), {"AWS_SECRET_ACCESS_KEY": "topsecret", "AWS_PROFILE": "p"}, "warning", "is not used; profile p in"),
    ],
)
def test_the_source_of_credentials_of_s3_is_named(tmp_path, monkeypatch, options, environ, state, expected):
    keys = "aws_secret_access_key = topsecret\n"
    (tmp_path / "credentials").write_text(f"[p]\naws_access_key_id = ABCDEFGHIJKLMNOPWXYZ\n{keys}")
    role = "role_arn = arn:aws:iam::1:role/r\nsource_profile = p\n"
    (tmp_path / "config").write_text(
        "[profile sso]\nsso_session = s\nsso_account_id = 1\nsso_role_name = r\n"
        "[sso-session s]\nsso_region = us-east-1\nsso_start_url = https://x\n"
        f"[profile role]\n{role}[profile mfa]\n{role}mfa_serial = device\n[profile 'my p']\naws_access_key_id = a\n{keys}"
    )
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    files = {"AWS_SHARED_CREDENTIALS_FILE": "credentials", "AWS_CONFIG_FILE": "config"}
    for name, value in {**{name: str(tmp_path / file) for name, file in files.items()}, **environ}.items():
        monkeypatch.setenv(name, value)
    check = s3_source(StoreConfig(s3=options))
    assert expected.format(home=tmp_path) in check.found and check.state == state and "topsecret" not in str(check)


def test_the_source_of_credentials_of_gcs_is_named(tmp_path):
    key = tmp_path / "key.json"
    key.write_text('{"type": "service_account", "private_key": "topsecret"}')
    options, named = torchobj.GCSOptions(), {"GOOGLE_APPLICATION_CREDENTIALS": str(key)}
    assert gcs_source(options, named).found == f"GOOGLE_APPLICATION_CREDENTIALS={key}: service_account"
    assert gcs_source(options, {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "none")}).state == "failed"
    assert "emulator" in gcs_source(options, {"STORAGE_EMULATOR_HOST": "localhost:1"}).found
    assert "service account of the machine" in gcs_source(options, {"CLOUDSDK_CONFIG": str(tmp_path)}).found


@pytest.mark.providers("s3", "gs")
def test_bench_measures_each_number_of_requests_and_suggests_one(cli, bucket):
    for number in range(20):
        bucket.write(f"train/{number}", bytes(1000))
    listed, first, second, advice = cli.records(
        "bench", f"{bucket.url}/train/", "--seconds", "0.1", "--concurrency", "1,8"
    )
    assert listed["objects"] == 20 and listed["bytes"] == 20_000
    assert (first["concurrency"], second["concurrency"]) == (1, 8)
    assert first["objects_per_s"] > 0 and first["p50_s"] <= first["p99_s"] and second["errors"] == {}
    assert advice["suggested_max_in_flight"] in (1, 8)


def test_bench_sends_no_more_requests_at_a_time_than_it_says(cli, bucket, control):
    control.reset()
    bucket.boto.create_bucket(Bucket=bucket.name)
    for number in range(20):
        bucket.write(f"train/{number}", bytes(1000))
    control.faults({"operation": "GetObject", "action": {"delay_first_byte_s": 0.05}})
    cli.lines("bench", f"{bucket.url}/train/", "--seconds", "0.1", "--concurrency", "5")
    # And a hedged read.
    assert 2 <= control.connections().most_in_flight <= 5 + 1


def test_bench_counts_failed_reads_by_type(cli, bucket, control):
    bucket.write("k", b"1")
    control.faults({"operation": "GetObject", "action": {"status": 403, "code": "AccessDenied"}})
    records = cli.records("bench", bucket.url, "--seconds", "0.1", "--concurrency", "4")
    assert records[1]["errors"].keys() == {"AccessDeniedError"}
    assert "No object could be read" in records[-1]["suggestions"][0]


def test_a_level_of_bench_reads_objects_even_if_its_time_elapses_before_its_threads_start(tmp_path):
    (tmp_path / "k").write_bytes(b"123")
    level = measure(f"file://{tmp_path}", [torchobj.ObjectRef(f"file://{tmp_path}/k", size=3)], StoreConfig(), 4, 0.0)
    assert level.objects >= 2 and level.bytes == 3 * level.objects and level.latencies_s and level.errors == {}


def test_bench_refuses_other_numbers_of_requests(cli, bucket):
    assert cli.run("bench", bucket.url, "--concurrency", "0,1").exit_code == 2


def level(concurrency, objects, errors=None, cpu_s=0.1):
    return Level(concurrency, 1.0, objects, objects * 1000, cpu_s, [0.01] * 10, errors or {})


def test_the_knee_is_the_lowest_number_with_nearly_all_of_the_throughput():
    assert knee([level(1, 100), level(4, 380), level(16, 400), level(64, 390)]).concurrency == 4


def test_the_throughput_rises_if_the_last_number_gives_more_than_all_others():
    assert is_rising([level(1, 100), level(4, 380)]) and is_rising([level(4, 100), level(8, 90), level(16, 120)])
    assert not is_rising([level(1, 100)]) and not is_rising([level(1, 100), level(4, 108)])
    assert not is_rising([level(1, 0), level(4, 0)])


@pytest.mark.parametrize(("limit", "last"), [(600, 2048), (10_000, 4096), (100, 256)])
def test_bench_doubles_the_number_until_the_throughput_no_longer_rises(cli, bucket, monkeypatch, limit, last):
    bucket.write("k", b"1")
    monkeypatch.setattr("torchobj.cli.bench.measure", lambda *call: level(call[3], min(call[3], limit)))
    *levels, advice = cli.records("bench", bucket.url)[1:]
    assert [each["concurrency"] for each in levels[:6]] == [1, 4, 16, 64, 128, 256]
    assert levels[-1]["concurrency"] == last
    assert ("still rises" in advice["suggestions"][0]) == (limit == 10_000)
    # Numbers that are given are the only ones.
    assert len(cli.records("bench", bucket.url, "--concurrency", "1,2")) == 1 + 2 + 1


def test_suggestions_name_the_limit():
    rising = suggestions([level(1, 100), level(256, 25_000)], 1000, 8)
    assert "still rises at 256 requests" in rising[0] and "--concurrency 256,512,1024" in rising[2]
    assert not any("--concurrency" in line for line in suggestions([level(1, 1), level(4096, 400)], 1000, 8))
    busy = suggestions([level(1, 100), level(64, 400, cpu_s=7.5), level(256, 400)], 1000, 8)
    assert any("The CPU is the limit: 7.5 of 8 cores" in line for line in busy)
    throttled = suggestions([level(1, 100), level(64, 90, {"ThrottledError": 3})], 1000, 8)
    assert any("The store throttled" in line for line in throttled)
    large = suggestions([level(64, 400)], 1 << 30, 8)
    assert any("torchobj.set_memory_budget(" in line for line in large)
