"""Translates options of s3fs, such as `storage_options` of pandas, and arguments of its methods. Does no I/O."""

import logging
from collections.abc import Mapping
from typing import Any

from torchobj.config import StoreConfig
from torchobj.config.explicit_fields import replace_fields
from torchobj.exceptions import ConfigError
from torchobj.fsspec.passed_credentials import PassedKeys
from torchobj.store.attributes import ObjectAttributes

__all__ = [
    "LIBRARY_OPTIONS",
    "S3FS_OPTIONS",
    "check_copied",
    "check_current",
    "s3fs_config",
    "warn_ignored",
    "written_attributes",
]

logger = logging.getLogger("torchobj")

#: Options of fsspec and s3fs about caches and blocks that torchobj does not have.
TUNING = (
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
LIBRARY_OPTIONS = ("asynchronous", "hf", "loop")

_KEYS = ("key", "secret", "token", "username", "password")

#: All options, also those without effect.
S3FS_OPTIONS = frozenset(
    {
        *TUNING,
        *LIBRARY_OPTIONS,
        *_KEYS,
        "anon",
        "client_kwargs",
        "config_kwargs",
        "profile",
        "requester_pays",
        "s3_additional_kwargs",
        "session",
        "use_ssl",
        "version_aware",
    }
)

#: Names of options that were warned about.
_warned: set[str] = set()


def warn_ignored(ignored: list[str]) -> None:
    """Warns once per process of each option that has no effect."""
    new = sorted(set(ignored) - _warned)
    if new:
        _warned.update(new)
        logger.warning(
            "fsspec file system of torchobj: ignored %s, which have no effect here; remove them, or set the fields of "
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

#: Arguments without effect here: of s3fs about parts, of gcsfs about checks of what it wrote.
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


def s3fs_config(config: StoreConfig, options: Mapping[str, Any]) -> StoreConfig:
    """The configuration with the options, which override its fields.

    Args:
        config: The configuration.
        options: Options of s3fs; those that are None are not set.

    Raises:
        ConfigError: A value is not allowed; messages contain no keys.
    """
    given = {name: value for name, value in options.items() if value is not None and name not in LIBRARY_OPTIONS}
    translated = _Translated()
    translated.ignored += [name for name in TUNING if given.get(name)]
    translated.client(_mapping(given, "client_kwargs"))
    translated.botocore(_mapping(given, "config_kwargs"))
    translated.requests(_mapping(given, "s3_additional_kwargs"))
    translated.keys |= {name: given[name] for name in _KEYS if name in given}
    for name, field in (("profile", "profile"), ("requester_pays", "requester_pays"), ("anon", "anonymous")):
        if name in given:
            translated.s3[field] = given[name]
    if given.get("use_ssl") is False:
        translated.ignored.append("use_ssl=False (the scheme of endpoint_url decides)")
    translated.ignored += [name for name in ("session", "version_aware") if given.get(name)]
    warn_ignored(translated.ignored)
    fields = translated.s3_fields()
    return replace_fields(
        config,
        s3=replace_fields(config.s3, **fields),
        advanced=replace_fields(config.advanced, **translated.advanced),
        **translated.shared,
    )


def _mapping(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = options.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} as {type(value)}: must be a dict")
    return {key: inner for key, inner in value.items() if inner is not None}


class _Translated:
    """Collects the fields of a configuration, and names of options without effect."""

    def __init__(self) -> None:
        self.s3: dict[str, Any] = {}
        self.shared: dict[str, Any] = {}
        self.advanced: dict[str, Any] = {}
        self.keys: dict[str, Any] = {}
        self.ignored: list[str] = []

    def client(self, options: dict[str, Any]) -> None:
        """Arguments of a client of botocore."""
        for name, field in (("endpoint_url", "endpoint_url"), ("region_name", "region")):
            if name in options:
                self.s3[field] = options.pop(name)
        for name, key in (
            ("aws_access_key_id", "key"),
            ("aws_secret_access_key", "secret"),
            ("aws_session_token", "token"),
        ):
            if name in options:
                self.keys[key] = options.pop(name)
        verify = options.pop("verify", None)
        if isinstance(verify, bool):
            self.shared["verify_tls"] = verify
        elif verify is not None:
            self.shared["ca_bundle"] = verify
        self.ignored += [f"client_kwargs[{name!r}]" for name in options]

    def botocore(self, options: dict[str, Any]) -> None:
        """Fields of `botocore.config.Config`."""
        if "region_name" in options:
            self.s3.setdefault("region", options.pop("region_name"))
        s3 = dict(options.pop("s3", {}))
        if "addressing_style" in s3:
            self.s3["addressing_style"] = s3.pop("addressing_style")
        # botocore's UNSIGNED is an object of its own class.
        version = options.pop("signature_version", None)
        if version is not None and (version == "unsigned" or type(version).__name__.strip("_") == "UNSIGNED"):
            self.s3["anonymous"] = True
        elif version not in (None, "s3v4"):
            self.ignored.append("config_kwargs['signature_version']")
        retries = dict(options.pop("retries", {}))
        if "total_max_attempts" in retries:
            self.shared["max_attempts"] = retries["total_max_attempts"]
        elif "max_attempts" in retries:
            self.shared["max_attempts"] = retries["max_attempts"] + 1
        if "connect_timeout" in options:
            self.advanced["connect_timeout_s"] = options.pop("connect_timeout")
        if "read_timeout" in options:
            self.shared["first_byte_timeout_s"] = self.shared["idle_timeout_s"] = options.pop("read_timeout")
        self.ignored += [f"config_kwargs[{name!r}]" for name in options]
        self.ignored += [f"config_kwargs['s3'][{name!r}]" for name in s3]

    def requests(self, options: dict[str, Any]) -> None:
        """Parameters of requests."""
        for name, field in (
            ("ServerSideEncryption", "encryption"),
            ("SSEKMSKeyId", "kms_key_id"),
            ("StorageClass", "storage_class"),
        ):
            if name in options:
                self.s3[field] = options.pop(name)
        if options.get("RequestPayer") == "requester":
            self.s3["requester_pays"] = bool(options.pop("RequestPayer"))
        self.ignored += [f"s3_additional_kwargs[{name!r}]" for name in options]

    def s3_fields(self) -> dict[str, Any]:
        """The fields of `S3Options`. Only one source of credentials remains, that of the options."""
        key = self.keys.get("key", self.keys.get("username"))
        secret = self.keys.get("secret", self.keys.get("password"))
        token = self.keys.get("token")
        if self.s3.get("anonymous") is True:
            return {"credential_provider": None, **self.s3}
        if key is not None or secret is not None or token is not None:
            # Only types and names are shown, because the values are secrets.
            for name, value in (("key", key), ("secret", secret)):
                if not isinstance(value, str) or not value:
                    raise ConfigError(f"{name} as {type(value)}: key and secret must both be strings")
            if not isinstance(token, str | None):
                raise ConfigError(f"token as {type(token)}: must be a string, the session token of key and secret")
            provider = PassedKeys((str(key), str(secret), token))
            return {"anonymous": False, **self.s3, "profile": None, "credential_provider": provider}
        if self.s3.get("profile") is not None:
            return {"anonymous": False, "credential_provider": None, **self.s3}
        return self.s3
