"""Where the credentials of S3 come from, as requests find them: in the environment and files only, without the metadata
service of a machine. No values are shown.
"""

import os

from torchobj import _torchobj
from torchobj.cli.doctor.check import UNSIGNED, Check
from torchobj.config import StoreConfig

_NAME = "credentials"


def s3_source(config: StoreConfig) -> Check:
    """Where the credentials of S3 come from: what the core signs requests with."""
    options = config.s3
    if options.anonymous:
        return Check(_NAME, "note", f"{UNSIGNED}: requests are not signed")
    if options.access_key_id is not None:
        return Check(_NAME, "ok", "access_key_id and secret_access_key of S3Options")
    if options.credential_provider is not None:
        return Check(_NAME, "ok", "from a credential_provider")
    return _of_core(config)


def _of_core(config: StoreConfig) -> Check:
    """The source of credentials that the core finds, in the environment and in files."""
    is_known, found, advice = _torchobj.s3_credential_source(config)
    if is_known is None:
        return Check(_NAME, "failed", found, advice)
    if is_known:
        variables = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        has_id, has_secret = (bool(os.environ.get(variable)) for variable in variables)
        if has_secret and not has_id and config.s3.profile is None:
            found = f"{variables[1]} without {variables[0]} is not used; {found}"
            return Check(_NAME, "warning", found, f"set {variables[0]} too")
        return Check(_NAME, "ok", found)
    advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass --profile"
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        found = "none, and AWS_EC2_METADATA_DISABLED=true"
        return Check(_NAME, "failed", found, f"{advice} or --no-sign-request")
    found = "none in the environment and files: those of the machine's role, if it has one"
    return Check(_NAME, "note", found, f"{advice}, unless this is a machine of AWS")
