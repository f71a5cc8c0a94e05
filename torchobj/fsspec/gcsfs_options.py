"""Translates the options of gcsfs, such as `storage_options` of pandas, to a `StoreConfig`. Sends no request."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchobj.config import StoreConfig
from torchobj.config.explicit_fields import replace_fields
from torchobj.exceptions import ConfigError
from torchobj.fsspec.passed_credentials import GoogleCredentials, GoogleFile, GoogleToken
from torchobj.fsspec.s3fs_options import LIBRARY_OPTIONS, TUNING, warn_ignored

__all__ = ["GCSFS_OPTIONS", "gcsfs_config"]

_IGNORED = (
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

#: All options, also those without effect.
GCSFS_OPTIONS = frozenset(
    {*TUNING, *LIBRARY_OPTIONS, *_IGNORED, "project", "requester_pays", "requests_timeout", "token"}
)


def gcsfs_config(config: StoreConfig, options: Mapping[str, Any]) -> StoreConfig:
    """The configuration with the options, which override its fields.

    Args:
        config: The configuration.
        options: Options of gcsfs; those that are None are not set.

    Raises:
        ConfigError: A value is not allowed; messages contain no tokens.
    """
    given = {name: value for name, value in options.items() if value is not None and name not in LIBRARY_OPTIONS}
    warn_ignored([name for name in (*TUNING, *_IGNORED) if given.get(name)])
    fields: dict[str, Any] = _token_fields(given["token"]) if "token" in given else {}
    payer = given.get("requester_pays")
    if payer is True:
        payer = given.get("project") or os.environ.get("GOOGLE_CLOUD_PROJECT")
        if not payer:
            raise ConfigError("requester_pays=True: requires project=..., the project that is billed")
    if payer is not None:
        fields["user_project"] = payer or None
    shared = {"first_byte_timeout_s": given["requests_timeout"]} if "requests_timeout" in given else {}
    return replace_fields(config, gcs=replace_fields(config.gcs, **fields), **shared)


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
