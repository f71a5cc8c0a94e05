"""Arguments that are URLs, local paths or globs: parses and completes them, and lists what they name."""

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import Literal

import click
from click.shell_completion import CompletionItem

from torchobj.cli.completion import KEY
from torchobj.cli.options import CommandError, Settings
from torchobj.cli.output import command, escaped
from torchobj.config import AdvancedOptions, StoreConfig
from torchobj.exceptions import ConfigError, ObjectNotFoundError
from torchobj.store import Store, list_buckets
from torchobj.store.object_info import Listing
from torchobj.urls import ALIASES, CLOUD_SCHEMES, Url, parse_url, shown_url

#: Characters that begin a wildcard.
_WILDCARD = re.compile(r"[*?\[{]")
#: A wildcard that stands for itself.
_ESCAPED = re.compile(r"\[([*?\[{}\\])\]")

#: Completion offers at most this many keys, and its listing has a time limit.
_MAX_KEYS, _LIMIT_S = 200, 2.0


@dataclasses.dataclass(frozen=True)
class Target:
    """What an argument names: an object, a prefix, a folder, or the objects that match a glob."""

    text: str
    """The argument."""
    url: Url
    """The URL before the wildcards; that of a local path has the scheme `file`."""
    glob: str | None
    """Pattern for the part of a key after `url.key`."""

    @property
    def is_local(self) -> bool:
        """Whether it is a local file or folder."""
        return self.url.scheme == "file"

    @property
    def names_folder(self) -> bool:
        """Whether it names a bucket or folder: by its slash, or because the local folder exists."""
        ends = self.url.key == "" or self.url.key.endswith("/")
        return ends or (self.is_local and self.path.is_dir())

    @property
    def names_bucket(self) -> bool:
        """Whether it names all objects of a bucket: the bucket, or wildcards without any other character."""
        return not self.is_local and self.url.key == "" and not (self.glob or "").strip("*?/")

    @property
    def is_root(self) -> bool:
        """Whether it is a bucket or the root of the file system, without wildcards."""
        return self.url.key == "" and self.glob is None

    @property
    def shown(self) -> str:
        """The URL, or the local path."""
        return str(self.path) if self.is_local else str(self.url)

    @property
    def path(self) -> Path:
        """The local path."""
        return Path("/", self.url.key)

    def folder(self) -> "Target":
        """The same with a slash at the end: keys of a folder, and not all that begin with its name."""
        key = self.url.key
        return (
            self if key == "" or key.endswith("/") else dataclasses.replace(self, url=self.url._replace(key=f"{key}/"))
        )

    def child(self, name: str) -> "Target":
        """The file or object of this name in the folder."""
        url = self.url._replace(key=f"{self.url.key}{name}")
        return Target(f"/{url.key}" if self.is_local else str(url), url, None)

    def split_glob(self) -> tuple["Target", str]:
        """The folder above the wildcards, and the pattern for keys below it."""
        start = self.url.key.rfind("/") + 1
        folder = dataclasses.replace(self, url=self.url._replace(key=self.url.key[:start]), glob=None)
        return folder, f"{self.url.key[start:]}{self.glob or ''}"

    def open(self, config: StoreConfig) -> tuple[Store, str]:
        """The store and the key or prefix in it. The store of a local path is its folder."""
        if not self.is_local:
            return Store(self.url.base, config=config), self.url.key
        target = self.folder() if self.names_folder else self
        folder, _, name = target.url.key.rpartition("/")
        if not Path("/", folder).is_dir():
            raise self.nothing()
        return Store(f"file:///{folder}", config=config), name

    def url_of(self, store: Store, key: str) -> str:
        """The URL of a key of the store; the path of a local file."""
        return f"{store.url}/{key}".removeprefix("file://") if self.is_local else f"{store.url}/{key}"

    def objects(self, store: Store, prefix: str, *, ordered: bool = True) -> Listing:
        """Lists the objects that it names, in key order or as they arrive."""
        return store.list(prefix, glob=self.glob, ordered=ordered)

    def nothing(self) -> CommandError:
        """The error if it names no object."""
        if self.glob is not None:
            hint = "* matches within a folder, ** across folders; --raw takes wildcards as they are"
            return CommandError(f"{self.text}: no key matches; {hint}")
        if self.is_local:
            if self.path.exists():
                return CommandError(f"{self.text}: no files")
            return CommandError(f"{self.text}: no such path{_meant(self.text)}")
        return CommandError(f"{self.text}: no objects; check the prefix with {command('ls', f'{self.url.base}/')}")


def parse_target(text: str, *, raw: bool = False) -> Target:
    """Parses an argument.

    Args:
        text: A URL such as `s3://bucket/key`, or a local path.
        raw: Whether wildcards are taken as they are.

    Raises:
        ConfigError: Not a URL of a known scheme.
        CommandError: An empty path, not UTF-8, a URL with a password that contains a slash, or wildcards that are no
            pattern.

    Example:
        >>> parse_target("s3://bucket/train/n01*.jpg")
        Target(text='s3://bucket/train/n01*.jpg', url=Url(scheme='s3', bucket='bucket', key='train/n01'), glob='*.jpg')
        >>> parse_target("/data/a[1].jpg", raw=True).path
        PosixPath('/data/a[1].jpg')
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        # The message escapes the bytes.
        raise CommandError(
            f"{text}: is not UTF-8, as keys and arguments must be; rename it, or name its folder"
        ) from None
    url = parse_url(text) if "://" in text else _of_path(text)
    if ":" in url.bucket and "@" in url.key and not url.bucket.startswith("arn:"):
        # A slash in a password ends the bucket.
        raise CommandError(
            f"{shown_url(text)}: must have no user and password; `torchobj doctor` shows where credentials are found"
        )
    found = _WILDCARD.search(url.key)
    if found is None or raw or (url.scheme == "file" and os.path.lexists(f"/{url.key}")):
        return Target(text, url, None)
    start = found.start()
    if url.key.startswith("**", start):
        # `**` matches across folders only if it is a whole component.
        start = url.key.rfind("/", 0, start) + 1
    glob = url.key[start:]
    try:
        # Compiles the pattern, before the command does anything.
        any(Store("memory://patterns").list(glob=glob))
    except ConfigError as error:
        raise CommandError(f"{text}: {error}; --raw takes wildcards as they are") from None
    return Target(text, url._replace(key=url.key[:start]), glob)


def _meant(text: str) -> str:
    """The question for a path that may be a URL with a typing error."""
    bare = text.rstrip(":/")
    if bare in ("s3", "gs"):
        return f"; did you mean `torchobj ls {bare}://`?"
    scheme, separator, rest = text.partition(":")
    if not (separator and scheme in ("s3", "gs")):
        if text.startswith(("/", ".", "~")) or "://" in text:
            return ""
        scheme, rest = "s3", text
    bucket, _, key = rest.lstrip("/").partition("/")
    return f"; did you mean {quote(f'{scheme}://{bucket}/{key}')}?"


def check_wildcards(text: str, literal: Target, config: StoreConfig) -> None:
    """Checks that an argument with wildcards, which names sources to delete, is not the key of an object as well.

    Raises:
        CommandError: It is.
    """
    try:
        Store(literal.url.base, config=config).head(literal.url.key)
    except ObjectNotFoundError:
        return
    raise CommandError(
        f"{text}: an object has this key, and its wildcards may match others; --raw takes them as they are, "
        "[*], [?] and [[] stand for the characters"
    )


def check_bucket(targets: Iterable[Target], action: str, *, whole_bucket: bool) -> None:
    """Checks that no target is a whole bucket, unless that is allowed.

    Raises:
        CommandError: One is, and nothing has been done.
    """
    for target in targets:
        if target.names_bucket and not whole_bucket:
            raise CommandError(
                f"{target.text}: is a whole bucket; --whole-bucket {action}, and --dry-run shows which these are"
            )


def _of_path(text: str) -> Url:
    if not text:
        raise CommandError("an empty path names nothing; . is this folder")
    path = os.path.abspath(os.path.expanduser(text)).lstrip("/")  # noqa: PTH100, PTH111  removes `..`
    ends = text.endswith("/") and path != ""
    return Url("file", "", f"{path}/" if ends else path)


class _UrlType(click.ParamType):  # type: ignore[type-arg]  # not generic at runtime before click 8.4
    """A URL or path, as a string."""

    name = "url"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,
        incomplete: str,
    ) -> list[CompletionItem]:
        """Buckets, and keys below a URL, level by level; otherwise local files."""
        if "://" not in incomplete:
            return [CompletionItem(incomplete, type="file")]
        try:
            takes_wildcards = _takes_wildcards(ctx, param)
            begun = _ESCAPED.sub(r"\1", incomplete) if takes_wildcards else incomplete
            found = _found(ctx.ensure_object(Settings), begun)
        except Exception:  # noqa: BLE001  a completion has nowhere to report an error
            return []
        # One with control characters would be several words, or commands for the terminal that shows it.
        urls = (url for url in found if escaped(url) == url)
        return [CompletionItem(_escaped(url) if takes_wildcards else url, type=KEY) for url in urls]


def _takes_wildcards(ctx: click.Context, param: click.Parameter) -> bool:
    """Whether wildcards in the argument are not taken as they are."""
    has_raw = any(each.name == "raw" for each in ctx.command.params)
    return has_raw and not ctx.params.get("raw") and param.name not in ("destination", "file")


def _escaped(key: str) -> str:
    """A URL as a pattern that matches it alone."""
    return re.sub(r"[*?\[{}\\]", r"[\g<0>]", key) if _WILDCARD.search(key) else key


def _found(chosen: Settings, incomplete: str) -> list[str]:
    """Buckets or keys that begin with a URL, in order."""
    given = chosen.config(incomplete)
    limited = StoreConfig(
        s3=given.s3,
        gcs=given.gcs,
        max_attempts=1,
        first_byte_timeout_s=_LIMIT_S,
        retry_timeout_s=_LIMIT_S,
        advanced=AdvancedOptions(connect_timeout_s=_LIMIT_S),
    )
    start, _, bucket = incomplete.partition("://")
    if "/" not in bucket and start in (*CLOUD_SCHEMES, *ALIASES):
        scheme: Literal["s3", "gs"] = "s3" if start == "s3" else "gs"
        buckets = list_buckets(scheme, config=limited, project=os.environ.get("GOOGLE_CLOUD_PROJECT"))
        return sorted(f"{start}://{name}/" for name, _ in buckets if name.startswith(bucket))[:_MAX_KEYS]
    url = parse_url(incomplete)
    # As it was typed: with another name of the scheme, or the slashes of an ARN.
    base = incomplete.removesuffix(url.key).removesuffix("/")
    for page in Store(url.base, config=limited).list(url.key, "/").pages():
        return sorted(f"{base}/{key}" for key in [info.key for info in page.objects] + page.prefixes)[:_MAX_KEYS]
    return []


#: Type of arguments that are URLs or local paths.
URL = _UrlType()

#: Option of commands whose arguments may have wildcards.
raw_option = click.option("--raw", is_flag=True, help="Take wildcards as they are.")
