"""Sources of credentials of AWS, alone and beside each other, and a server whose answers say who signed a request."""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import botocore.credentials
import botocore.session
import botocore.tokens
import pytest

import torchobj
from torchobj.exceptions import CredentialsError

SECRET = "canary-of-a-secret"
#: What is expected where no source has credentials, or one cannot be used.
ERROR = "error"
_EXPIRES = "2099-01-01T00:00:00Z"


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves objects whose bytes are the access key id of the request, and the services that issue keys.

    The access key id of a role names the role and the keys that it was assumed with.
    """

    server_version, sys_version, protocol_version = "Identities", "", "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""

    def _signer(self) -> str:
        if self.headers.get("X-Amz-Security-Token") == "":
            return "an empty token, which S3 refuses"
        authorization = self.headers.get("Authorization", "")
        return authorization.partition("Credential=")[2].partition("/")[0] or "unsigned"

    def _send(self, body: str, status: int = 200) -> None:
        self.send_response(status)
        for name, value in (("Content-Length", str(len(body))), ("ETag", '"0123"')):
            self.send_header(name, value)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("x-aws-ec2-metadata-token-ttl-seconds", "600")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    def _keys(self, name: str) -> str:
        keys = {"AccessKeyId": name, "SecretAccessKey": SECRET, "Token": "t", "Expiration": _EXPIRES}
        return json.dumps({**keys, "Code": "Success", "Type": "AWS-HMAC", "LastUpdated": "2026-01-01T00:00:00Z"})

    def do_GET(self) -> None:
        """An object, or keys of the container, of the machine, or of SSO."""
        path = urlsplit(self.path).path
        if path == "/container":
            self._send(self._keys("CONTAINER"))
        elif path == "/federation/credentials":
            role = parse_qs(urlsplit(self.path).query)["role_name"][0]
            keys = {"accessKeyId": f"SSO-{role}", "secretAccessKey": SECRET, "sessionToken": "t"}
            self._send(json.dumps({"roleCredentials": {**keys, "expiration": 4_000_000_000_000}}))
        elif path.rstrip("/").endswith("/security-credentials"):
            self._send("machine")
        elif path.startswith("/latest/"):
            self._send(self._keys("INSTANCE"))
        else:
            self._send(self._signer())

    do_HEAD = do_GET  # noqa: N815  name of the base class

    def do_PUT(self) -> None:
        """A token of the metadata service."""
        self._send("token")

    def do_POST(self) -> None:
        """Keys of an assumed role."""
        form = {name: value[0] for name, value in parse_qs(self._body()).items()}
        action, role = form["Action"], form["RoleArn"].rpartition("/")[2]
        scope = self.headers.get("Authorization", "").partition("Credential=")[2].split("/")
        self.server.seen.append({**form, "region": scope[2] if len(scope) > 2 else ""})  # type: ignore[attr-defined]
        base = "TOKEN" if action == "AssumeRoleWithWebIdentity" else self._signer()
        keys = f"<AccessKeyId>{role}-BY-{base}</AccessKeyId><SecretAccessKey>{SECRET}</SecretAccessKey>"
        keys += f"<SessionToken>t</SessionToken><Expiration>{_EXPIRES}</Expiration>"
        user = f"<AssumedRoleUser><Arn>arn:aws:sts::1:assumed-role/{role}/s</Arn></AssumedRoleUser>"
        result = f"<{action}Result>{user}<Credentials>{keys}</Credentials></{action}Result>"
        self._send(f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/">{result}</{action}Response>')

    def _body(self) -> str:
        return self.rfile.read(int(self.headers["Content-Length"])).decode()


@contextlib.contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[http.server.ThreadingHTTPServer]:
    """A running server. `seen` has the requests for roles, as the fields of their forms and the region that was signed."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.seen = []  # type: ignore[attr-defined]
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def keys(name: str) -> dict[str, str]:
    """Settings of a profile with keys."""
    return {"aws_access_key_id": name, "aws_secret_access_key": SECRET}


def role(name: str, **settings: str) -> dict[str, str]:
    """Settings of a profile with a role."""
    return {"role_arn": f"arn:aws:iam::123456789012:role/{name}", **settings}


def provided() -> dict[str, Any]:
    """A credential provider."""
    return {"access_key_id": "PROVIDED", "secret_access_key": SECRET, "expires_at": None}


@dataclasses.dataclass(frozen=True)
class Source:
    """Settings of one source. `{server}` and `{home}` in their values are replaced."""

    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    credentials: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    config: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def beside(self, other: "Source") -> "Source | None":
        """Both; None if they exclude each other."""
        if self.options and other.options:
            return None
        for mine, others in ((self.environ, other.environ), (self.credentials, other.credentials)):
            if any(mine[name] != others[name] for name in mine.keys() & others.keys()):
                return None
        sections = {
            name: {**other.config.get(name, {}), **self.config.get(name, {})} for name in self.config | other.config
        }
        return Source(
            {**other.environ, **self.environ},
            {**other.credentials, **self.credentials},
            sections,
            {**other.options, **self.options},
        )


SSO = {"sso_account_id": "123456789012", "sso_region": "us-east-1", "sso_start_url": "https://d-1.awsapps.com/start"}
_SESSION = {"sso_region": "us-east-1", "sso_start_url": "https://d-1.awsapps.com/start"}
_PROCESS = json.dumps({"Version": 1, "AccessKeyId": "PROCESS", "SecretAccessKey": SECRET})

SOURCES = {
    "nothing": Source(),
    "explicit keys": Source(options={"access_key_id": "EXPLICIT", "secret_access_key": SECRET}),
    "credential_provider": Source(options={"credential_provider": provided}),
    "profile=": Source(credentials={"o": keys("OPTION")}, options={"profile": "o"}),
    "profile= without keys": Source(config={"profile r": {"region": "us-east-1"}}, options={"profile": "r"}),
    "profile= of a role": Source(
        config={"profile s": role("OPTIONROLE", source_profile="t"), "profile t": keys("T")}, options={"profile": "s"}
    ),
    "profile= of a web identity": Source(
        config={"profile w": role("OPTIONWEB", web_identity_token_file="{home}/token")}, options={"profile": "w"}
    ),
    "profile= that does not exist": Source(options={"profile": "no such profile"}),
    "AWS_DEFAULT_PROFILE": Source({"AWS_DEFAULT_PROFILE": "d"}, config={"profile d": keys("DEFAULTPROFILE")}),
    "AWS_PROFILE": Source({"AWS_PROFILE": "p"}, credentials={"p": keys("PROFILE")}),
    "AWS_PROFILE of the config file": Source({"AWS_PROFILE": "c"}, config={"profile c": keys("CONFIGPROFILE")}),
    "AWS_PROFILE with spaces": Source({"AWS_PROFILE": "x y"}, config={'profile "x y"': keys("SPACES")}),
    "AWS_PROFILE with spaces in credentials": Source({"AWS_PROFILE": "x z"}, credentials={"x z": keys("SPACES2")}),
    "AWS_PROFILE with odd letters": Source({"AWS_PROFILE": "é#;[a,b]=c"}, config={"profile 'é#;[a,b]=c'": keys("ODD")}),
    "AWS_PROFILE with spaces and no quotes": Source({"AWS_PROFILE": "x y"}, config={"profile x y": keys("UNQUOTED")}),
    "AWS_PROFILE that does not exist": Source({"AWS_PROFILE": "missing"}),
    "AWS_DEFAULT_PROFILE that does not exist": Source({"AWS_DEFAULT_PROFILE": "missing"}),
    "empty AWS_PROFILE": Source({"AWS_PROFILE": ""}),
    "environment": Source({"AWS_ACCESS_KEY_ID": "ENVIRONMENT", "AWS_SECRET_ACCESS_KEY": SECRET}),
    "environment with a token": Source(
        {"AWS_ACCESS_KEY_ID": "TEMPORARY", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": "t"}
    ),
    "half a pair: the id": Source({"AWS_ACCESS_KEY_ID": "HALF"}),
    "half a pair: the secret": Source({"AWS_SECRET_ACCESS_KEY": SECRET}),
    "empty keys": Source({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}),
    "web identity": Source(
        {"AWS_WEB_IDENTITY_TOKEN_FILE": "{home}/token", "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/IRSA"}
    ),
    "web identity without a role": Source({"AWS_WEB_IDENTITY_TOKEN_FILE": "{home}/token"}),
    "role without a token": Source({"AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/ALONE"}),
    "[default] of credentials": Source(credentials={"default": keys("DEFAULT")}),
    "half of [default] of credentials": Source(credentials={"default": {"aws_access_key_id": "HALF"}}),
    "[default] of config": Source(config={"default": keys("CONFIGDEFAULT")}),
    "[profile default]": Source(config={"profile default": keys("PROFILEDEFAULT")}),
    "role of [default]": Source(
        config={
            "default": role("DEFAULTROLE", source_profile="base", external_id="external"),
            "profile base": keys("BASE"),
        }
    ),
    "role of a role": Source(
        config={
            "default": role("OUTER", source_profile="inner"),
            "profile inner": role("INNER", source_profile="base"),
            "profile base": keys("BASE"),
        }
    ),
    "role of its own keys": Source(config={"default": role("SELF", source_profile="default", **keys("OWN"))}),
    "role that leads back": Source(config={"default": role("LOOP", source_profile="default")}),
    "role without a source": Source(config={"default": role("ALONE")}),
    "role of a profile that does not exist": Source(config={"default": role("LOST", source_profile="lost")}),
    "role of a process": Source(
        config={
            "default": role("OFPROCESS", source_profile="process"),
            "profile process": {"credential_process": f"echo '{_PROCESS}'"},
        }
    ),
    "role of the environment": Source(config={"default": role("OFENVIRONMENT", credential_source="Environment")}),
    "role of the container": Source(config={"default": role("OFCONTAINER", credential_source="EcsContainer")}),
    "role of the machine": Source(config={"default": role("OFINSTANCE", credential_source="Ec2InstanceMetadata")}),
    "role with both sources": Source(
        config={"default": role("BOTH", credential_source="Environment", source_profile="b"), "profile b": keys("B")}
    ),
    "web identity of [default]": Source(config={"default": role("FILE", web_identity_token_file="{home}/token")}),
    "SSO of [default]": Source(config={"default": {**SSO, "sso_role_name": "legacy"}}),
    "SSO session of [default]": Source(
        config={
            "default": {"sso_account_id": "1", "sso_role_name": "session", "sso_session": "my sso"},
            "sso-session 'my sso'": _SESSION,
        }
    ),
    "SSO session that is repeated": Source(
        config={
            "default": {**SSO, "sso_role_name": "repeated", "sso_session": "my sso"},
            "sso-session 'my sso'": _SESSION,
        }
    ),
    "SSO without a session": Source(
        config={"default": {"sso_account_id": "1", "sso_role_name": "r", "sso_session": "x"}}
    ),
    "SSO of a start URL only": Source(config={"default": {"sso_start_url": "https://d-1.awsapps.com/start"}}),
    "process of [default]": Source(config={"default": {"credential_process": f"echo '{_PROCESS}'"}}),
    "boto 2": Source({"BOTO_CONFIG": "{home}/boto.cfg"}),
    "container": Source({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "{server}/container"}),
    "machine": Source({"AWS_EC2_METADATA_DISABLED": "false"}),
}


def _ini(sections: dict[str, dict[str, str]]) -> str:
    lines = [
        f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in section.items())
        for name, section in sections.items()
    ]
    return "".join(lines)


def apply(source: Source, server: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the files of a source below `home`, and sets its variables."""

    def filled(text: str) -> str:
        return text.replace("{server}", server).replace("{home}", str(home))

    token = json.dumps({"accessToken": "t", "expiresAt": _EXPIRES, "region": "us-east-1"})
    cache = home / ".aws" / "sso" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    for name in ("https://d-1.awsapps.com/start", "my sso"):
        (cache / f"{hashlib.sha1(name.encode()).hexdigest()}.json").write_text(token)
    (home / "token").write_text("identity")
    (home / "boto.cfg").write_text(_ini({"Credentials": keys("BOTO2")}))
    (home / ".aws" / "credentials").write_text(filled(_ini(source.credentials)))
    (home / ".aws" / "config").write_text(filled(_ini(source.config)))
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    services = {f"AWS_ENDPOINT_URL_{name}": server for name in ("STS", "SSO", "SSO_OIDC")}
    files = {"HOME": str(home), "AWS_EC2_METADATA_SERVICE_ENDPOINT": server, "BOTO_CONFIG": str(home / "no-boto")}
    region = {"AWS_REGION": "eu-west-3", "AWS_DEFAULT_REGION": "eu-west-3"}
    values = {**services, **files, **region, **{name: filled(value) for name, value in source.environ.items()}}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    for provider in (botocore.credentials.SSOProvider, botocore.tokens.SSOTokenProvider):
        monkeypatch.setattr(provider, "_SSO_TOKEN_CACHE_DIR", str(cache))


def signer_of_botocore(options: dict[str, Any]) -> str:
    """The access key id that botocore signs with, or `ERROR`."""
    session = botocore.session.Session()
    if "profile" in options:
        # As boto3 does: a profile that is named so excludes the environment.
        session.set_config_variable("profile", options["profile"])
    try:
        if "profile" not in options and options:
            # As a client with keys, which reads the settings of the profile.
            session.get_scoped_config()
            return "PROVIDED" if "credential_provider" in options else str(options["access_key_id"])
        credentials = session.get_credentials()
        return ERROR if credentials is None else str(credentials.get_frozen_credentials().access_key)
    except Exception:
        return ERROR


def signer(options: dict[str, Any], server: str, **settings: Any) -> str:
    """The access key id that torchobj signs with, or `ERROR`."""
    s3 = torchobj.S3Options(endpoint_url=server, **options, **settings)
    store = torchobj.Store("s3://bucket", config=torchobj.StoreConfig(s3=s3, max_attempts=1))
    try:
        return bytes(memoryview(store.get("key"))).decode()
    except CredentialsError as error:
        return "a secret in an error" if SECRET in str(error) else ERROR
