"""Reads the configuration file, which contains settings of stores by URL prefix in TOML, without secrets."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torchobj.config.config_base import ConfigBase, fields_of, nearest
from torchobj.config.store import OPTIONS, StoreConfig
from torchobj.exceptions import ConfigError
from torchobj.urls import SCHEMES, canonical_url, shown_url

#: Environment variable with the path of the file. Child processes inherit it.
VARIABLE = "TORCHOBJ_CONFIG"

_SECRET = re.compile(r"secret|token|passw|access_key|credential|private_key", re.IGNORECASE)

_Options = TypeVar("_Options", bound=ConfigBase)


class Prefix(NamedTuple):
    """A URL as a scheme and the segments of its path, the bucket first."""

    scheme: str
    segments: tuple[str, ...]

    @classmethod
    def of(cls, url: str) -> "Prefix":
        """Parses a URL. Trailing slashes are ignored, and `gcs` is `gs`."""
        scheme, _, path = canonical_url(url).partition("://")
        path = path.rstrip("/")
        return cls(scheme, tuple(path.split("/")) if path else ())

    def matches(self, url: "Prefix") -> bool:
        """Whether the URL is this prefix, or below it."""
        return self.scheme == url.scheme and self.segments == url.segments[: len(self.segments)]

    @property
    def is_below_bucket(self) -> bool:
        """Whether the prefix is a part of a bucket, or a folder."""
        return len(self.segments) > 1

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(self.segments)}"


class ConfigFile(NamedTuple):
    """The contents of a configuration file; of none, if the path is empty."""

    path: str
    settings: dict[Prefix, StoreConfig]

    @property
    def prefixes(self) -> list[Prefix]:
        """The prefixes of its tables, the longest first."""
        return sorted(self.settings, key=lambda prefix: len(prefix.segments), reverse=True)

    def longest(self, url: str) -> Prefix | None:
        """The longest prefix that matches a URL."""
        if not self.settings:
            return None
        parsed = Prefix.of(url)
        found = [prefix for prefix in self.settings if prefix.matches(parsed)]
        return max(found, key=lambda prefix: len(prefix.segments), default=None)


#: Files that this process has read, by path.
_read: dict[str, ConfigFile] = {}


def load_config(path: str | os.PathLike[str]) -> None:
    """Reads a configuration file with settings of stores by URL prefix.

    It applies to this process and to processes that it starts afterwards, because the environment variable
    `TORCHOBJ_CONFIG` is set to its path. If the variable is set already, no call is needed. Each process reads the file
    once; another call reads it again. Existing stores and datasets do not change.

    Each table of the file is named by a prefix: a scheme, a bucket, or a folder. It applies to this URL and to URLs
    below it: `s3://bucket/a` applies to `s3://bucket/a/b`, but not to `s3://bucket/ab`. If several prefixes match, only
    the longest applies. It is compared with the bucket of a `Store` or fsspec path, the prefix of a dataset, the URL
    of each object in `get_many`, `from_objects` and `ObjectDataset`, and the URL that is passed to `open`, `save`,
    `load` and checkpoints. In `from_objects` one prefix must apply to all objects of a bucket.

    The keys of a table are the fields of `StoreConfig`; those of `S3Options`, `GCSOptions`, `FileOptions`,
    `CacheOptions`, `PriceOptions` and `AdvancedOptions` are in its tables `s3`, `gcs`, `file`, `cache`, `prices` and
    `advanced`. Arguments of a call override single fields: each field that was passed to the constructor of its
    `config=`, also with its default value, and `region=` and `endpoint_url=` of a `Store`.

    Args:
        path: A TOML file, such as:

            ```toml
            ["s3://"]
            max_in_flight = 128

            ["s3://on-premises"]
            s3 = { endpoint_url = "https://minio.internal:9000", profile = "minio" }
            ```

    Raises:
        ConfigError: The file cannot be read or is not TOML; a field is unknown, has a value that is not allowed,
            or is meant for a secret. Store credentials where the provider's SDK looks, or pass a `credential_provider`.

    Example:
        ```python
        torchobj.load_config("/etc/torchobj.toml")
        dataset = torchobj.ObjectMapDataset("s3://on-premises/train/")
        ```
    """
    path = str(Path(path).absolute())
    _read[path] = _parsed(path, str(path))
    os.environ[VARIABLE] = path


def file_for(config: StoreConfig) -> ConfigFile:
    """The file whose settings `resolve` applies to a configuration: that of `TORCHOBJ_CONFIG`, read at the first use.

    It is empty if the variable is not set, or if the configuration is resolved already.

    Raises:
        ConfigError: As `load_config`.
    """
    path = os.environ.get(VARIABLE)
    if not path or config.is_resolved:
        return ConfigFile("", {})
    if path not in _read:
        _read[path] = _parsed(path, f"{VARIABLE}={path}")
    return _read[path]


def _parsed(path: str, named: str) -> ConfigFile:
    tables, problem = _tables(path)
    if problem is not None:
        # Not chained to the exception: that of the parser contains the whole text.
        raise ConfigError(f"{named}: {problem}")
    settings: dict[Prefix, StoreConfig] = {}
    for name, table in tables.items():
        shown = shown_url(name)
        scheme, separator, rest = canonical_url(name).partition("://")
        if "@" in rest.partition("/")[0]:
            raise ConfigError(f"{named}: a URL prefix must have no user and password")
        if not separator or scheme not in SCHEMES:
            _refuse_secret(named, shown)
            raise ConfigError(f"{named}: {shown!r}: must be a URL prefix such as s3://bucket or s3://bucket/folder")
        if scheme == "file" and rest.strip("/") and not rest.startswith("/"):
            raise ConfigError(f"{named}: {shown!r}: a file URL has three slashes, as file:///folder")
        if scheme != "file" and rest.startswith("/"):
            raise ConfigError(f"{named}: {shown!r}: has no bucket, expected {scheme}://bucket/folder")
        if rest.endswith("//"):
            raise ConfigError(f"{named}: {shown!r}: must not end in two slashes")
        if not isinstance(table, dict):
            raise ConfigError(f"{named}: {shown!r}: must be a table of fields")
        prefix = Prefix.of(name)
        if prefix in settings:
            raise ConfigError(f"{named}: {shown!r}: has the same prefix as another table")
        settings[prefix] = _config(f"{named}: {shown!r}", table)
    return ConfigFile(path, settings)


def _tables(path: str) -> tuple[dict[str, Any], str | None]:
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file), None
    except OSError as error:
        return {}, f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return {}, f"is not TOML: {error}"


def _config(where: str, table: dict[str, Any]) -> StoreConfig:
    options: dict[str, Any] = {}
    for name, kind in OPTIONS.items():
        if name in table:
            if not isinstance(table[name], dict):
                raise ConfigError(f"{where}: {name}: must be a table of the fields of {kind.__name__}")
            options[name] = _build(kind, f"{where}: {name}", table[name])
    return _build(StoreConfig, where, {**table, **options})


def _build(kind: type[_Options], where: str, fields: dict[str, Any]) -> _Options:
    known = _names(kind)
    for name in fields:
        _refuse_secret(where, name)
        if name not in known:
            tables = [table for table, options in OPTIONS.items() if kind is StoreConfig and name in _names(options)]
            unknown = f"{kind.__name__} has no such field{nearest(name, known)}"
            problem = f"it is in the table {' or '.join(tables)}" if tables else unknown
            raise ConfigError(f"{where}: {name}: {problem}")
    try:
        return kind(**fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _names(kind: type[ConfigBase]) -> set[str]:
    """The fields of a configuration that a file may contain."""
    return {name for name in fields_of(kind) if not _SECRET.search(name)}


def _refuse_secret(where: str, name: str) -> None:
    if _SECRET.search(name):
        raise ConfigError(
            f"{where}: {name}: a configuration file must not contain credentials; name a profile of AWS, or pass a "
            "credential_provider in the code"
        )
