"""`torchobj doctor`: which checks it makes, and what it shows of them."""

import pytest


@pytest.mark.providers("s3", "gs")
def test_doctor_lists_and_reads_without_writing(cli, bucket, control):
    bucket.write("train/k", b"1")
    control.clear_requests()
    found = {name: check["state"] for name, check in cli.checks(f"{bucket.url}/train/").items()}
    assert {found[name] for name in ("LIST", "GET", "DNS", "connection", "clock", "memfd")} == {"ok"}
    assert found["PUT"] == "note" and found["credentials"] in ("ok", "note")
    assert {request.method for request in control.requests()} <= {"GET", "HEAD"}


@pytest.mark.providers("s3", "gs")
def test_a_failed_check_is_exit_code_1_with_advice(cli, bucket):
    done = cli.run("doctor", bucket.url.replace("test-", "missing-"))
    assert done.exit_code == 1 and "FAILED  LIST" in done.stdout
    assert "not tried: LIST failed" in done.stdout


@pytest.mark.providers("s3", "gs")
def test_no_secret_is_shown(cli, bucket, control):
    shown = cli.run("doctor", bucket.url, "--write").output
    assert bucket.server.secret_key not in shown and str(bucket.server.token) not in shown


@pytest.mark.parametrize(
    "url", ["s3://AKIA:topsecret/x@bkt/", "gs://AKIA:topsecret@bkt/", "s4://AKIA:topsecret/x@bkt/"]
)
def test_a_password_in_a_url_is_not_repeated(cli, url):
    for command in ("ls", "doctor"):
        assert "topsecret" not in cli.error(command, url)
    assert "topsecret" not in cli.error("ls", url.replace("AKIA", "\n"))
    assert "topsecret" not in cli.error("ls", url.replace("://", ":///"))
    assert "topsecret" not in cli.error("ls", "--region", "x", url.replace("s3://", "gs://"))
