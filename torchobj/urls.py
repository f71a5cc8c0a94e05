"""Parses URLs of objects. Keys are not decoded."""

import os
import re
from typing import NamedTuple

from torchobj.exceptions import ConfigError

SCHEMES = ("s3", "gs", "file", "memory")

#: Other names of schemes. Parsed URLs have the name in `SCHEMES`.
ALIASES = {"gcs": "gs"}

#: Schemes of stores whose buckets are created elsewhere: a missing bucket is an error, and not an empty folder.
CLOUD_SCHEMES = ("s3", "gs")

#: ARNs of access points, also multi-region, and of object lambdas and outposts: slashes may separate their parts.
_ARN = re.compile(
    r"s3://(?P<start>arn:[^:/]*:s3[^:/]*:[^:/]*:[^:/]*:)"
    r"(?P<resource>(outpost[:/][^:/]+[:/])?accesspoint[:/][^:/]+)(?=/|\Z)"
)

#: The URL of an object in a command, as webdataset reads it: `pipe:aws s3 cp s3://bucket/key -`.
_IN_COMMAND = re.compile(r"\b(?:s3|gs|gcs)://[^\s'\"|;]+")

#: Control characters of ASCII and Latin-1.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Url(NamedTuple):
    """A parsed URL `scheme://bucket/key`.

    A `file` URL has no bucket; its key is the path without the leading slash.

    Example:
        >>> url = parse_url("s3://bucket/folder/name")
        >>> url.base, url.key, str(url._replace(key="other"))
        ('s3://bucket', 'folder/name', 's3://bucket/other')
    """

    scheme: str
    bucket: str
    key: str

    @property
    def base(self) -> str:
        """The URL without the key: `s3://bucket`."""
        return f"{self.scheme}://{self.bucket}"

    def __str__(self) -> str:
        return f"{self.base}/{self.key}"


def canonical_url(url: str) -> str:
    """A URL with its scheme in `SCHEMES`, and without slashes in the ARN of a bucket; any other value as it is.

    Example:
        >>> canonical_url("gcs://bucket/key")
        'gs://bucket/key'
        >>> canonical_url("s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/name/key")
        's3://arn:aws:s3:eu-west-1:123456789012:accesspoint:name/key'
    """
    if isinstance(url, str) and (arn := _ARN.match(url)):
        return f"s3://{arn['start']}{arn['resource'].replace('/', ':')}{url[arn.end() :]}"
    for alias, scheme in ALIASES.items():
        if isinstance(url, str) and url.startswith(f"{alias}://"):
            return scheme + url.removeprefix(alias)
    return url


def shown_url(url: str) -> str:
    """A URL for messages, without user information, query and fragment, which may contain secrets.

    The user information of a URL without a scheme, or with a slash in the password, ends at the last `@`.
    """
    masked = re.sub(r"^(\w+://)?.*@", r"\1...@", url, flags=re.DOTALL)
    return re.sub(r"[?#].*", "?...", masked, flags=re.DOTALL)


def parse_url(url: str, schemes: tuple[str, ...] = SCHEMES) -> Url:
    """Parses a URL.

    Args:
        url: `s3://bucket/key`, `gs://bucket/key`, `file:///folder/file` or `memory://name/key`; the key may be empty.
            `gcs://` is another name of `gs://`.
        schemes: Schemes that are accepted.

    Raises:
        ConfigError: Not a URL, another scheme, or no valid bucket; the message names the expected form.

    Example:
        >>> parse_url("s3://bucket/some key//é")
        Url(scheme='s3', bucket='bucket', key='some key//é')
    """
    if isinstance(url, os.PathLike):
        raise ConfigError(
            f"url={url!r}: must be a str such as s3://bucket/key; converting a URL to a path removes slashes"
        )
    if not isinstance(url, str):
        raise ConfigError(f"url={url!r}: must be a str such as s3://bucket/key")
    if url.startswith("pipe:"):
        # The command is not shown: it may contain a token.
        read = _IN_COMMAND.search(url)
        expected = shown_url(read[0]) if read else "s3://bucket/train-{000..127}.tar"
        raise ConfigError(
            "url='pipe:...': a command, as in webdataset, which torchobj does not run; pass the URL of the object: "
            f"{expected}"
        )
    scheme, separator, rest = canonical_url(url).partition("://")
    if not separator:
        local = ", or file:///folder/name for a local one" if "file" in schemes else ""
        raise ConfigError(f"url={shown_url(url)!r}: not a URL, expected one such as s3://bucket/key{local}")
    if scheme not in schemes:
        expected = " or ".join(f"{name}://" for name in schemes)
        hint = "; the address of an S3-compatible server belongs in endpoint_url" if scheme in ("http", "https") else ""
        raise ConfigError(f"url={shown_url(url)!r}: scheme {shown_url(scheme)!r}, expected {expected}{hint}")
    bucket, _, key = rest.partition("/")
    if "@" in bucket:
        raise ConfigError(
            f"url={shown_url(url)!r}: must have no user and password; "
            "store credentials where the SDK of the provider looks for them"
        )
    if _CONTROL.search(bucket):
        raise ConfigError(
            f"url={shown_url(url)!r}: the bucket name must contain no control characters such as a newline"
        )
    if scheme == "file" and bucket:
        raise ConfigError(f"url={shown_url(url)!r}: a file URL has three slashes, as file:///folder/file")
    if scheme != "file" and not bucket:
        raise ConfigError(f"url={shown_url(url)!r}: no bucket, expected {scheme}://bucket/key")
    return Url(scheme, bucket, key)


def parse_object_url(url: str, schemes: tuple[str, ...] = SCHEMES) -> Url:
    """Parses the URL of an object that is to be written.

    Raises:
        ConfigError: As `parse_url`; or the URL names a whole bucket, or ends with a slash like a folder.

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
