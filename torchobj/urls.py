"""URLs of objects, taken apart. Keys are raw: nothing is decoded. Knows no store."""

import os
import re
from typing import NamedTuple

from torchobj.exceptions import ConfigError

SCHEMES = ("s3", "file", "memory")


class Url(NamedTuple):
    """`scheme://bucket/key`; a `file` URL has no bucket, its key is the path without the leading slash."""

    scheme: str
    bucket: str
    key: str

    @property
    def base(self) -> str:
        """What stands before the key: `s3://bucket`."""
        return f"{self.scheme}://{self.bucket}"

    def __str__(self) -> str:
        return f"{self.base}/{self.key}"


def _shown(url: str) -> str:
    """A URL as a message may show it: what signs or opens another kind of URL is left out."""
    return re.sub(r"//[^/?#]*@", "//...@", re.sub(r"[?#].*", "?...", url, flags=re.DOTALL))


def parse_url(url: str, schemes: tuple[str, ...] = SCHEMES) -> Url:
    """Takes a URL apart.

    Raises:
        ConfigError: no URL, another scheme, or no bucket; the message says what was expected.

    Example:
        >>> parse_url("s3://bucket/some key//é")
        Url(scheme='s3', bucket='bucket', key='some key//é')
    """
    if isinstance(url, os.PathLike):
        raise ConfigError(f"url={url!r}: must be a str such as s3://bucket/key; a path has lost slashes of a URL")
    if not isinstance(url, str):
        raise ConfigError(f"url={url!r}: must be a str such as s3://bucket/key")
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ConfigError(f"url={_shown(url)!r}: not a URL, expected one such as s3://bucket/key")
    if scheme not in schemes:
        expected = " or ".join(f"{name}://" for name in schemes)
        raise ConfigError(f"url={_shown(url)!r}: scheme {_shown(scheme)!r}, expected {expected}")
    bucket, _, key = rest.partition("/")
    if "@" in bucket:
        raise ConfigError(
            f"url={_shown(url)!r}: must have no user and password; the AWS SDKs' places are for credentials"
        )
    if scheme == "file" and bucket:
        raise ConfigError(f"url={url!r}: a file URL has three slashes, as file:///folder/file")
    if scheme != "file" and not bucket:
        raise ConfigError(f"url={url!r}: no bucket, expected {scheme}://bucket/key")
    return Url(scheme, bucket, key)


def parse_object_url(url: str, schemes: tuple[str, ...] = SCHEMES) -> Url:
    """Takes the URL of an object to be written apart.

    Raises:
        ConfigError: As `parse_url`; or it is a whole bucket, or ends with a slash, as a folder does.

    Example:
        >>> parse_object_url("s3://bucket/folder/name").key
        'folder/name'
    """
    parsed = parse_url(url, schemes)
    if not parsed.key.strip("/"):
        raise ConfigError(f"url={url!r}: names no object, expected {parsed.base}/key")
    if parsed.key.endswith("/"):
        raise ConfigError(f"url={url!r}: ends with a slash and names no object, expected {url}name")
    return parsed
