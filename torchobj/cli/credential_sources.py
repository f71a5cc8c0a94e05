"""Finds where credentials come from, for `torchobj doctor`: in the order in which the SDKs look, and without secrets.

Reads the environment and files only. Does not ask the metadata service of a machine, and does not show values.
"""

import configparser
import json
import os
from collections.abc import Mapping
from pathlib import Path

from torchobj.cli.checks import Check
from torchobj.config import GCSOptions, S3Options

__all__ = ["gcs_source", "s3_source"]

_NAME = "credentials"


def _file(environ: Mapping[str, str], variable: str, default: str) -> Path:
    return Path(environ.get(variable) or default).expanduser()


def _section(path: Path, *names: str) -> dict[str, str]:
    """The first section of an INI file that exists."""
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(path.read_text())
    except (OSError, ValueError, configparser.Error):
        return {}
    return next((dict(parser[name]) for name in names if parser.has_section(name)), {})


def s3_source(options: S3Options, environ: Mapping[str, str] = os.environ) -> Check:
    """Where the credentials of S3 come from: the first source of the chain of the AWS SDKs that is configured."""
    if options.anonymous:
        return Check(_NAME, "note", "none are used: requests are not signed")
    if options.credential_provider is not None:
        return Check(_NAME, "ok", "from a credential_provider")
    # Keys in the environment take precedence over AWS_PROFILE, but not over the option.
    if options.profile is None and environ.get("AWS_ACCESS_KEY_ID") and environ.get("AWS_SECRET_ACCESS_KEY"):
        token = "with" if environ.get("AWS_SESSION_TOKEN") else "without"
        return Check(_NAME, "ok", f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, {token} AWS_SESSION_TOKEN")
    profile = options.profile or environ.get("AWS_PROFILE") or "default"
    if found := _of_profile(profile, environ):
        return Check(_NAME, "ok", found)
    named = options.profile or environ.get("AWS_PROFILE")
    if named:
        files = f"{_credentials_file(environ)} and {_config_file(environ)}"
        return Check(_NAME, "failed", f"the profile {named} has none in {files}", "`aws configure` writes them")
    return _of_machine(environ)


def _credentials_file(environ: Mapping[str, str]) -> Path:
    return _file(environ, "AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")


def _config_file(environ: Mapping[str, str]) -> Path:
    return _file(environ, "AWS_CONFIG_FILE", "~/.aws/config")


def _of_profile(profile: str, environ: Mapping[str, str]) -> str | None:
    secrets, config = _credentials_file(environ), _config_file(environ)
    for path, names in ((secrets, [profile]), (config, [f"profile {profile}", profile])):
        section = _section(path, *names)
        kinds = {
            "role_arn": "an assumed role",
            "sso_session": "SSO",
            "sso_start_url": "SSO",
            "aws_access_key_id": "keys",
            "web_identity_token_file": "a web identity",
            "credential_process": "credential_process",
        }
        for key, kind in kinds.items():
            if section.get(key):
                return f"profile {profile} in {path}: {kind}"
    return None


def _of_machine(environ: Mapping[str, str]) -> Check:
    if environ.get("AWS_WEB_IDENTITY_TOKEN_FILE") and environ.get("AWS_ROLE_ARN"):
        path = environ["AWS_WEB_IDENTITY_TOKEN_FILE"]
        if os.access(path, os.R_OK):
            return Check(_NAME, "ok", f"web identity token in {path}")
        return Check(_NAME, "failed", f"the web identity token {path} cannot be read", "mount it into the container")
    for name in ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        if environ.get(name):
            return Check(_NAME, "ok", f"the container's credential service ({name})")
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass --profile or --no-sign-request"
        return Check(_NAME, "failed", "none, and AWS_EC2_METADATA_DISABLED=true", advice)
    advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass --profile, unless this is a machine of AWS"
    return Check(_NAME, "note", "none in the environment and files: those of the machine's role, if it has one", advice)


def gcs_source(options: GCSOptions, environ: Mapping[str, str] = os.environ) -> Check:
    """Where the credentials of Google Cloud Storage come from: Application Default Credentials, in their order."""
    if options.credential_provider is not None:
        return Check(_NAME, "ok", "from a credential_provider")
    emulator = options.endpoint_url is None and environ.get("STORAGE_EMULATOR_HOST")
    if options.anonymous or emulator:
        why = "STORAGE_EMULATOR_HOST names an emulator" if emulator else "requests have no token"
        return Check(_NAME, "note", f"none are used: {why}")
    named = environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    folder = _file(environ, "CLOUDSDK_CONFIG", "~/.config/gcloud")
    path = Path(named) if named else folder / "application_default_credentials.json"
    try:
        kind = json.loads(path.read_bytes()).get("type", "unknown type")
    except OSError as error:
        if named:
            advice = "correct GOOGLE_APPLICATION_CREDENTIALS, or unset it"
            return Check(_NAME, "failed", f"GOOGLE_APPLICATION_CREDENTIALS={path}: {error.strerror}", advice)
    except (ValueError, AttributeError):
        return Check(_NAME, "failed", f"{path}: is not a JSON file of credentials")
    else:
        return Check(_NAME, "ok", f"{'GOOGLE_APPLICATION_CREDENTIALS=' if named else ''}{path}: {kind}")
    advice = "`gcloud auth application-default login`, or --no-sign-request, unless this is a machine of Google Cloud"
    where = f" at GCE_METADATA_HOST={environ['GCE_METADATA_HOST']}" if environ.get("GCE_METADATA_HOST") else ""
    return Check(_NAME, "note", f"none in files: the service account of the machine, if it has one{where}", advice)
