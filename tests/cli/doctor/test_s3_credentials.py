"""Where `torchobj doctor` finds the credentials of S3."""

import pytest

from torchobj import S3Options
from torchobj.cli.doctor.s3_credentials import s3_source
from torchobj.config import StoreConfig

S3 = S3Options

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
        (
            S3(),
            {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "topsecret"},
            "ok",
            "without AWS_SESSION_TOKEN",
        ),
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
        (
            S3(),
            {"AWS_ACCESS_KEY_ID": "a"},
            "failed",
            "AWS_ACCESS_KEY_ID is set, and AWS_SECRET_ACCESS_KEY is not",
        ),
        (
            S3(),
            {"AWS_SECRET_ACCESS_KEY": "topsecret", "AWS_PROFILE": "p"},
            "warning",
            "is not used; profile p in",
        ),
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
