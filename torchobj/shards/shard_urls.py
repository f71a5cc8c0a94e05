"""Finds the shards of a dataset by braces, globs, prefixes and names. Lists; reads no shard. Does not import torch."""

import contextlib
import logging
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torchobj import _torchobj
from torchobj.config import StoreConfig, resolve
from torchobj.config.checks import check
from torchobj.exceptions import ConfigError, ObjectNotFoundError, StoreError
from torchobj.manifest import Manifest
from torchobj.manifest.manifest import KeyFilter, key_filter
from torchobj.store.nearest_keys import nearest_keys
from torchobj.urls import parse_url

__all__ = [
    "TAR_SUFFIXES",
    "FoundShards",
    "checked_urls",
    "compression",
    "expand_braces",
    "find_shards",
    "is_data",
    "note_prefix",
    "shard_manifest",
]

logger = logging.getLogger("torchobj")

#: Names of tar files, plain and compressed.
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst")

#: How shards with these suffixes are compressed.
_COMPRESSIONS = {
    ".gz": "gzip",
    ".tgz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".tzst": "zstd",
    ".bz2": "bzip2",
    ".tbz2": "bzip2",
    ".xz": "xz",
    ".txz": "xz",
    ".lz4": "lz4",
}

#: Maximum number of names of one pattern, so that `{0..9999999999}` is refused.
_MAX_NAMES = 10_000_000

#: Suffix of the metadata of tables of Delta Lake and Iceberg, which consist of Parquet files.
_METADATA = ".json"

#: How the files of one snapshot are listed, by the kind of table.
_SNAPSHOTS = {
    "Delta Lake": "deltalake.DeltaTable(url).file_uris()",
    "Iceberg": "[task.file.file_path for task in table.scan().plan_files()] of pyiceberg",
}

#: Maximum number of objects that are counted below a name that is not an object: one page of a listing.
_MAX_COUNTED = 1000

_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?")


def compression(url: str) -> str | None:
    """How a shard is compressed, according to its name; None if it is plain."""
    return _COMPRESSIONS.get(f".{url.lower().rpartition('.')[2]}")


def expand_braces(pattern: str) -> Iterator[str]:
    """The names of a pattern with braces, as a shell expands them: `{000..127}`, `{0..9..3}`, `{train,test}`.

    Braces without `..` and without a comma stand for themselves.

    Raises:
        ConfigError: The pattern has more than ten million names.

    Example:
        >>> list(expand_braces("{train,test}-{09..10}.tar"))
        ['train-09.tar', 'train-10.tar', 'test-09.tar', 'test-10.tar']
    """
    for start, character in enumerate(pattern):
        if character != "{" or (found := _choices(pattern, start)) is None:
            continue
        choices, rest = found
        for choice in choices:
            for end in expand_braces(rest):
                yield f"{pattern[:start]}{choice}{end}"
        return
    yield pattern


def _choices(pattern: str, start: int) -> tuple[Iterable[str], str] | None:
    """The choices in the braces at `start`, and what follows these; None if they stand for themselves."""
    depth, parts = 0, [""]
    for position in range(start, len(pattern)):
        character = pattern[position]
        depth += (character == "{") - (character == "}")
        if depth == 0:
            break
        if character == "," and depth == 1:
            parts.append("")
        elif position > start:
            parts[-1] += character
    else:
        return None
    rest = pattern[position + 1 :]
    if (numbers := _RANGE.fullmatch(pattern, start + 1, position)) is not None:
        return _numbers(numbers, pattern), rest
    return ((name for part in parts for name in expand_braces(part)), rest) if len(parts) > 1 else None


def _numbers(numbers: re.Match[str], pattern: str) -> Iterable[str]:
    first, last, step = numbers.groups()
    start, stop, size = int(first), int(last), abs(int(step or 1)) or 1
    if abs(stop - start) // size >= _MAX_NAMES:
        raise ConfigError(f"urls={pattern!r}: more than {_MAX_NAMES:,} names; use a glob or a prefix")
    is_padded = any(number.lstrip("-").startswith("0") and len(number.lstrip("-")) > 1 for number in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    ascending = stop >= start
    sequence = range(start, stop + (1 if ascending else -1), size if ascending else -size)
    return (f"{number:0{width}d}" for number in sequence)


def checked_urls(urls: object) -> list[str]:
    """The `urls` argument of a dataset as a list.

    Raises:
        ConfigError: It is not a string or a list of strings, or is empty.
    """
    given = [urls] if isinstance(urls, str) else list(urls) if isinstance(urls, Iterable) else []
    ok = bool(given) and all(isinstance(url, str) and url for url in given)
    check("urls", urls, "a URL or a list of URLs: names, braces, globs, or prefixes that end with a slash", ok=ok)
    for url in given:
        if "://" not in url and not url.startswith("pipe:"):
            raise ConfigError(f"urls={url!r}: must be a URL; that of a local file is file:///folder/file")
        parse_url(url)
    return given


class FoundShards(NamedTuple):
    """Shards, and the names below prefixes that are not data."""

    manifest: Manifest
    skipped: int = 0
    """Number of names that were skipped."""
    example: str = ""
    """URL of one of them."""

    def __str__(self) -> str:
        return (
            f"{self.skipped} names that begin with '_' or '.' skipped, such as {self.example}" if self.skipped else ""
        )


def shard_manifest(
    urls: str | Sequence[str],
    config: StoreConfig | None = None,
    suffixes: Sequence[str] = TAR_SUFFIXES,
) -> Manifest:
    """The manifest of `find_shards`."""
    return find_shards(urls, config, suffixes).manifest


def find_shards(
    urls: str | Sequence[str],
    config: StoreConfig | None = None,
    suffixes: Sequence[str] = TAR_SUFFIXES,
) -> FoundShards:
    """The shards that `urls` selects, in that order, with sizes and versions.

    Below a prefix, names with a part that begins with `_` or `.` are not data, as for Spark and pyarrow: `_temporary/`,
    `._train.tar`. Partitions such as `_date=2020/` are. Globs match all names.

    Args:
        urls: One or several of: the URL of a shard; a pattern with braces, `s3://b/train-{000..127}.tar`, each of whose
            names must exist; a pattern with `*`, `?` or `[`, whose matches are listed in key order, `**` across path
            components; a prefix that ends with a slash, below which the shards are found by their suffixes.
        config: A `StoreConfig`.
        suffixes: Suffixes of shards below a prefix.

    Raises:
        ConfigError: A pattern or a prefix selects nothing, or a URL is not valid.
        ObjectNotFoundError: A named shard does not exist.
        StoreError: A request failed.
    """
    builder = _torchobj.ManifestBuilder()
    named: list[str] = []
    skipped: list[str] = []
    for count, url in enumerate(name for pattern in checked_urls(urls) for name in expand_braces(pattern)):
        if count == _MAX_NAMES:
            raise ConfigError(f"urls={urls!r}: more than {_MAX_NAMES:,} names; use a glob or a prefix")
        literal = re.split(r"[*?\[]", url, maxsplit=1)[0]
        if literal == url and not url.endswith("/"):
            named.append(url)
            continue
        _add(builder, _of_names(named, config))
        named = []
        found = _below(url, config, suffixes, skipped) if literal == url else _matching(url, literal, config)
        _add(builder, found)
    _add(builder, _of_names(named, config))
    shards = FoundShards(Manifest(builder.finish()), len(skipped), *skipped[:1])
    if shards.skipped:
        logger.warning("urls=%r: %s; to read them pass their URLs, or a glob", urls, shards)
    return shards


def _add(builder: "_torchobj.ManifestBuilder", found: "_torchobj.NativeManifest") -> None:
    if len(found):
        builder.add(found.bases(), found.columns(0, len(found)))


def _matching(url: str, literal: str, config: StoreConfig | None) -> "_torchobj.NativeManifest":
    """The objects that match a glob."""
    found = _listed(url, literal, config, key_filter(url[len(literal) :], None, None))
    if not len(found):
        raise ConfigError(
            f"urls={url!r}: it matches no object; check the bucket and the pattern{_near(literal, config)}"
        )
    return found


def _below(
    url: str, config: StoreConfig | None, suffixes: Sequence[str], skipped: list[str]
) -> "_torchobj.NativeManifest":
    """The shards below a prefix. URLs of those that are not data are added to `skipped`."""
    # Tables consist of Parquet files.
    extra = [_METADATA] if ".parquet" in suffixes else []
    listed = _listed(url, url, config, key_filter(None, [*suffixes, *extra], None))
    begin = len(parse_url(url).key)
    data: list[tuple[str, str, int, str | None]] = []
    formats: set[str] = set()
    for index in range(len(listed)):
        base, key, size, version = listed.entry(index)
        folders = key[begin:].split("/")
        if "_delta_log" in folders[:-1]:
            formats.add("Delta Lake")
        elif "metadata" in folders[:-1] and key.endswith(".metadata.json"):
            formats.add("Iceberg")
        if not key.endswith(tuple(suffixes)):
            continue
        if not is_data(key[begin:]):
            skipped.append(f"{base}/{key}")
        else:
            data.append((base, key, size or 0, version))
    for kind in sorted(formats):
        logger.warning(
            "urls=%r: a table of %s, whose files may belong to other snapshots and have rows that were deleted; pass "
            "the list of the files of one snapshot: %s",
            url,
            kind,
            _SNAPSHOTS[kind],
        )
    if not data:
        more = f", other than {len(skipped)} whose names begin with '_' or '.'" if skipped else ""
        raise ConfigError(
            f"urls={url!r}: no object below it ends with {', '.join(suffixes)}{more}; check the bucket and the pattern"
            f"{_near(url, config)}"
        )
    return listed if len(data) == len(listed) else _manifest(data)


def is_data(name: str) -> bool:
    """Whether a name below a prefix is that of data, as for Spark and pyarrow.

    Example:
        >>> is_data("train/0.tar"), is_data("_temporary/0.tar"), is_data("_date=2020/0.tar")
        (True, False, True)
    """
    return not any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in name.split("/"))


def _listed(url: str, literal: str, config: StoreConfig | None, chosen: KeyFilter) -> "_torchobj.NativeManifest":
    parsed = parse_url(literal)
    store = _torchobj.NativeStore(parsed.scheme, parsed.bucket, resolve(url, config))
    return _torchobj.NativeManifest.from_listing(store, parsed.base, parsed.key, *chosen)


def _near(url: str, config: StoreConfig | None) -> str:
    parsed = parse_url(url)
    return nearest_keys(_torchobj.NativeStore(parsed.scheme, parsed.bucket, resolve(url, config)), parsed)


def _of_names(urls: list[str], config: StoreConfig | None) -> "_torchobj.NativeManifest":
    """Named objects, with the sizes and versions of concurrent HEAD requests."""
    found: dict[str, tuple[int, str | None]] = {}
    by_bucket: dict[tuple[str, str], list[str]] = {}
    for url in urls:
        parsed = parse_url(url)
        if not parsed.key:
            raise ConfigError(f"urls={url!r}: names no object; end a prefix with a slash")
        by_bucket.setdefault((parsed.scheme, parsed.bucket), []).append(url)
    for (scheme, bucket), members in by_bucket.items():
        store = _torchobj.NativeStore(scheme, bucket, resolve(members[0], config))
        try:
            heads = _torchobj.heads(store, [parse_url(url).key for url in members])
        except ObjectNotFoundError as error:
            error.add_note("each name of a pattern with braces must exist; a prefix of shards ends with a slash")
            if (missing := members[0] if len(members) == 1 else error.url) is not None:
                note_prefix(error, missing, config, "end the prefix with a slash")
            raise
        for url, head in zip(members, heads, strict=True):
            if isinstance(head, Exception):
                raise head
            found[url] = head[1:3]
    parsed_urls = [parse_url(url) for url in urls]
    return _manifest([(parsed.base, parsed.key, *found[url]) for parsed, url in zip(parsed_urls, urls, strict=True)])


def note_prefix(error: StoreError, url: str, config: StoreConfig | None, advice: str) -> None:
    """Adds a note to the error of an object that does not exist if its name is that of a prefix with objects."""
    prefix = f"{url.removesuffix('/')}/"
    # The first error is the one to report.
    with contextlib.suppress(StoreError):
        if count := len(_listed(url, prefix, config, key_filter(None, None, _MAX_COUNTED))):
            more = " or more" if count == _MAX_COUNTED else ""
            objects = "1 object" if count == 1 else f"{count}{more} objects"
            error.add_note(f"{prefix} has {objects}: {advice}")


def _manifest(objects: list[tuple[str, str, int, str | None]]) -> "_torchobj.NativeManifest":
    """A manifest of objects in this order, from their base, key, size and version."""
    builder = _torchobj.ManifestBuilder()
    bases: dict[str, int] = {}
    indices: list[int] = []
    keys: list[bytes] = []
    versions: list[bytes] = []
    for base, key, _, version in objects:
        indices.append(bases.setdefault(base, len(bases)))
        keys.append(key.encode())
        versions.append((version or "").encode())
    sizes = [size for _, _, size, _ in objects]
    columns = [_int32(indices), *_texts(keys), array("q", sizes).tobytes(), *_texts(versions)]
    if objects:
        builder.add(list(bases), columns)
    return builder.finish()


def _int32(numbers: Iterable[int]) -> bytes:
    return array("i", numbers).tobytes()


def _texts(texts: list[bytes]) -> tuple[bytes, bytes]:
    """Offsets and bytes of texts, in Arrow's layout."""
    return _int32(accumulate(map(len, texts), initial=0)), b"".join(texts)
