"""Translates options of s3fs and gcsfs, such as `storage_options` of pandas, and arguments of their methods.

Sends no request.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchobj.config import StoreConfig
from torchobj.exceptions import ConfigError
from torchobj.fsspec.passed_credentials import GoogleCredentials, GoogleFile, GoogleToken, PassedKeys
from torchobj.store.attributes import ObjectAttributes
from torchobj.warn_once import PROCESS

__all__ = [
    "GCSFS_OPTIONS",
    "S3FS_OPTIONS",
    "check_copied",
    "check_current",
    "gcsfs_config",
    "s3fs_config",
    "written_attributes",
]

logger = logging.getLogger("torchobj")

#: Options of fsspec and s3fs about caches and blocks that torchobj does not have.
_TUNING = (
    "batch_size",
    "block_size",
    "cache_regions",
    "default_block_size",
    "default_cache_type",
    "default_fill_cache",
    "fixed_upload_size",
    "listings_expiry_time",
    "local_expiry_check",
    "max_concurrency",
    "max_paths",
    "use_listings_cache",
)

#: Options that libraries pass to every file system, without a warning: event loops of zarr, which wraps this one, and
#: the settings of Hugging Face's own file system from `datasets`.
_LIBRARY_OPTIONS = ("asynchronous", "hf", "loop")

#: All options of each, also those without effect.
S3FS_OPTIONS = frozenset(
    {
        *_TUNING,
        *_LIBRARY_OPTIONS,
        *("key", "secret", "token", "username", "password", "anon", "profile", "requester_pays"),
        *("client_kwargs", "config_kwargs", "s3_additional_kwargs", "session", "use_ssl", "version_aware"),
    }
)

#: Options of gcsfs without effect.
_IGNORED_OF_GCSFS = (
    "access",
    "cache_timeout",
    "check_connection",
    "consistency",
    "default_location",
    "secure_serialize",
    "session_kwargs",
    "timeout",
    "version_aware",
)

GCSFS_OPTIONS = frozenset(
    {*_TUNING, *_LIBRARY_OPTIONS, *_IGNORED_OF_GCSFS, "project", "requester_pays", "requests_timeout", "token"}
)


def _warn_ignored(ignored: list[str]) -> None:
    """Warns once of each option that has no effect."""
    new = [name for name in sorted(set(ignored)) if PROCESS.is_first(f"fsspec option {name}")]
    if new:
        logger.warning(
            "fsspec file system of torchobj: ignored %s, which have no effect; remove them, or set the fields of "
            "StoreConfig",
            ", ".join(new),
        )


#: Arguments of writes by their names in S3 and s3fs, and ours.
_ATTRIBUTES = {
    "CacheControl": "cache_control",
    "ContentDisposition": "content_disposition",
    "ContentEncoding": "content_encoding",
    "ContentLanguage": "content_language",
    "ContentType": "content_type",
    "Metadata": "metadata",
    "StorageClass": "storage_class",
}

_NO_ACLS = "torchobj sets no ACLs; grant access by policies of the bucket, which newer buckets require"
_PER_FILE_SYSTEM = "is an option of the file system: pass s3_additional_kwargs={...}, or S3Options("

#: What to do instead of arguments of writes that no attribute replaces.
_OTHERS = {
    "ACL": _NO_ACLS,
    "RequestPayer": f"{_PER_FILE_SYSTEM}requester_pays=True)",
    "SSECustomerKey": "pass S3Options(customer_key_file=...) as config of the file system",
    "SSEKMSKeyId": f"{_PER_FILE_SYSTEM}kms_key_id=...)",
    "ServerSideEncryption": f"{_PER_FILE_SYSTEM}encryption=...)",
    "acl": _NO_ACLS,
    "requester_pays": "is an option of the file system: pass requester_pays=True when it is created",
}

#: Arguments without effect: of s3fs about parts, of gcsfs about checks of what it wrote.
_TRANSFER_HINTS = ("chunksize", "consistency", "max_concurrency")


#: Arguments of writes by our names.
_OWN = (*ObjectAttributes.__annotations__, "overwrite", "if_version", "skip_unchanged")


def written_attributes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a write by our names, given those of s3fs, gcsfs or torchobj.

    Raises:
        ConfigError: An argument has no counterpart; the message says what to do instead.
    """
    arguments: dict[str, Any] = {}
    for name, value in {**given, **(given.get("fixed_key_metadata") or {})}.items():
        if name in _OTHERS:
            # These values are the defaults.
            if value not in (None, False, "", "private"):
                raise ConfigError(f"{name}: {_OTHERS[name]}")
        elif name not in (*_TRANSFER_HINTS, "fixed_key_metadata"):
            own = _ATTRIBUTES.get(name, name)
            if own not in _OWN:
                raise ConfigError(f"{name}: no such argument; those of a write are {', '.join(_OWN)}")
            if own in arguments:
                raise ConfigError(f"{name} and {own}: are the same attribute; pass only {own}")
            arguments[own] = value
    return arguments


def check_copied(given: Mapping[str, Any]) -> None:
    """Refuses attributes of a copy.

    Raises:
        ConfigError: One is given.
    """
    known = {*_ATTRIBUTES, *ObjectAttributes.__annotations__, *_OTHERS}
    if attributes := written_attributes({name: value for name, value in given.items() if name in known}):
        raise ConfigError(f"{min(attributes)}: a copy has the attributes of its source")


def check_current(given: Mapping[str, Any]) -> None:
    """Refuses arguments of s3fs and gcsfs that select another version than the current one.

    Raises:
        ConfigError: One is given.
    """
    for name in ("version_id", "generation"):
        if given.get(name) is not None:
            raise ConfigError(f"{name}={given[name]!r}: file systems of torchobj read the current version only")


#: Options of s3fs, of clients and configurations of botocore, and of requests, with the field that each sets: of
#: `StoreConfig`, of its options, or of the passed keys. Of two options for a field, the last one counts.
_FIELDS = {
    "config_kwargs.region_name": "s3.region",
    "config_kwargs.s3.addressing_style": "s3.addressing_style",
    "config_kwargs.connect_timeout": "advanced.connect_timeout_s",
    "config_kwargs.read_timeout": "first_byte_timeout_s",
    "config_kwargs.retries.total_max_attempts": "max_attempts",
    "client_kwargs.endpoint_url": "s3.endpoint_url",
    "client_kwargs.region_name": "s3.region",
    "s3_additional_kwargs.ServerSideEncryption": "s3.encryption",
    "s3_additional_kwargs.SSEKMSKeyId": "s3.kms_key_id",
    "s3_additional_kwargs.StorageClass": "s3.storage_class",
    "username": "keys.key",
    "password": "keys.secret",
    "client_kwargs.aws_access_key_id": "keys.key",
    "client_kwargs.aws_secret_access_key": "keys.secret",
    "client_kwargs.aws_session_token": "keys.token",
    "key": "keys.key",
    "secret": "keys.secret",
    "token": "keys.token",
    "profile": "s3.profile",
    "requester_pays": "s3.requester_pays",
    "anon": "s3.anonymous",
}

#: Options that are dicts of options.
_DICTS = ("client_kwargs", "config_kwargs", "config_kwargs.retries", "config_kwargs.s3", "s3_additional_kwargs")


def s3fs_config(config: StoreConfig, options: Mapping[str, Any]) -> StoreConfig:
    """The configuration with the options, which override its fields.

    Args:
        config: The configuration.
        options: Options of s3fs; those that are None are not set.

    Raises:
        ConfigError: A value is not allowed; messages contain no keys.
    """
    given = _by_place({name: value for name, value in options.items() if name not in _LIBRARY_OPTIONS})
    fields, ignored = _special_fields(given)
    fields |= {field: given.pop(place) for place, field in _FIELDS.items() if place in given}
    if "first_byte_timeout_s" in fields:
        fields["idle_timeout_s"] = fields["first_byte_timeout_s"]
    for place, value in given.items():
        name, *inner = place.split(".")
        if inner or value:
            ignored.append(name + "".join(f"[{part!r}]" for part in inner))
    _warn_ignored(ignored)
    of: dict[str, dict[str, Any]] = {"": {}, "s3": {}, "advanced": {}, "keys": {}}
    for field, value in fields.items():
        holder, _, name = field.rpartition(".")
        of[holder][name] = value
    s3 = config.s3.replaced(**_with_one_source(of["s3"], of["keys"]))
    return config.replaced(s3=s3, advanced=config.advanced.replaced(**of["advanced"]), **of[""])


def _by_place(options: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The options that are not None, also those in dicts, by their names and those of the dicts."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        place = f"{above}{name}"
        if place in _DICTS:
            if not isinstance(value, Mapping | None):
                raise ConfigError(f"{name} as {type(value)}: must be a dict")
            found |= _by_place(value or {}, f"{place}.")
        elif value is not None:
            found[place] = value
    return found


def _special_fields(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Takes options whose values are converted. Returns fields, and names of those without effect."""
    fields: dict[str, Any] = {}
    ignored = []
    verify = given.pop("client_kwargs.verify", None)
    if verify is not None:
        fields["verify_tls" if isinstance(verify, bool) else "ca_bundle"] = verify
    # botocore's UNSIGNED is an object of its own class.
    version = given.pop("config_kwargs.signature_version", None)
    if version == "unsigned" or type(version).__name__.strip("_") == "UNSIGNED":
        fields["s3.anonymous"] = True
    elif version not in (None, "s3v4"):
        ignored.append("config_kwargs['signature_version']")
    if given.get("s3_additional_kwargs.RequestPayer") == "requester":
        fields["s3.requester_pays"] = bool(given.pop("s3_additional_kwargs.RequestPayer"))
    if (retries := given.pop("config_kwargs.retries.max_attempts", None)) is not None:
        fields["max_attempts"] = retries + 1
    given.pop("config_kwargs.retries.mode", None)
    if given.pop("use_ssl", None) is False:
        ignored.append("use_ssl=False (the scheme of endpoint_url decides)")
    return fields, ignored


def _with_one_source(s3: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """The fields of `S3Options` with one source of credentials, that of the options."""
    if s3.get("anonymous") is True:
        return {"credential_provider": None, **s3}
    if keys:
        # Only types and names are shown, because the values are secrets.
        for name in ("key", "secret"):
            if not isinstance(keys.get(name), str) or not keys[name]:
                raise ConfigError(f"{name} as {type(keys.get(name))}: key and secret must both be strings")
        key, secret, token = keys["key"], keys["secret"], keys.get("token")
        if not isinstance(token, str | None):
            raise ConfigError(f"token as {type(token)}: must be a string, the session token of key and secret")
        provider = PassedKeys((key, secret, token))
        return {"anonymous": False, **s3, "profile": None, "credential_provider": provider}
    if s3.get("profile") is not None:
        return {"anonymous": False, "credential_provider": None, **s3}
    return s3


def gcsfs_config(config: StoreConfig, options: Mapping[str, Any]) -> StoreConfig:
    """The configuration with the options, which override its fields.

    Args:
        config: The configuration.
        options: Options of gcsfs; those that are None are not set.

    Raises:
        ConfigError: A value is not allowed; messages contain no tokens.
    """
    given = {name: value for name, value in options.items() if value is not None and name not in _LIBRARY_OPTIONS}
    _warn_ignored([name for name in (*_TUNING, *_IGNORED_OF_GCSFS) if given.get(name)])
    fields: dict[str, Any] = _token_fields(given["token"]) if "token" in given else {}
    payer = given.get("requester_pays")
    if payer is True:
        payer = given.get("project") or os.environ.get("GOOGLE_CLOUD_PROJECT")
        if not payer:
            raise ConfigError("requester_pays=True: requires project=..., the project that is billed")
    if payer is not None:
        fields["user_project"] = payer or None
    shared = {"first_byte_timeout_s": given["requests_timeout"]} if "requests_timeout" in given else {}
    return config.replaced(gcs=config.gcs.replaced(**fields), **shared)


def _token_fields(token: Any) -> dict[str, Any]:
    """The fields of `GCSOptions` for what gcsfs accepts as `token`."""
    if token == "anon":  # noqa: S105  a name
        return {"anonymous": True, "credential_provider": None}
    if token in ("google_default", "cloud"):
        return {"anonymous": False, "credential_provider": None}
    if token in ("cache", "browser"):
        raise ConfigError(
            f"token={token!r}: torchobj has no such login; run `gcloud auth application-default login` and omit it"
        )
    provider: Any
    if isinstance(token, str | Path):
        is_file = Path(token).exists()
        if not is_file and (isinstance(token, Path) or token.endswith(".json")):
            raise ConfigError("token: is the path of a file that does not exist")
        provider = GoogleFile(str(token)) if is_file else GoogleToken(token)
    elif isinstance(token, Mapping):
        provider = GoogleCredentials(json.dumps(dict(token), sort_keys=True))
    elif hasattr(token, "refresh") and hasattr(token, "valid"):
        provider = GoogleCredentials(token)
    else:
        raise ConfigError(
            f"token as {type(token)}: must be 'anon', 'google_default', a token, the path or content of a JSON file, "
            "or credentials of google-auth"
        )
    return {"anonymous": False, "credential_provider": provider}
