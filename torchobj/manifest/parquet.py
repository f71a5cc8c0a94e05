"""Reads and writes the Parquet table of a manifest. Storage of the file is left to `manifest`.

pyarrow is imported when it is needed. Objects go from the native side to Arrow and back as columns of bytes, without a
Python object for each. A file is untrusted: its footer and the headers of its pages are checked before a page is
decoded, pages carry checksums, and the digest of the loaded objects must be that of the footer.
"""

import importlib
from typing import Any, BinaryIO

from torchobj._torchobj import Buffer, ManifestBuilder, NativeManifest
from torchobj.exceptions import ConfigError, ManifestError
from torchobj.parquet.pages import DICTIONARY, WHOLE_TEXTS, largest_column, row_limit
from torchobj.urls import CLOUD_SCHEMES, parse_url, shown_url

__all__ = ["FORMAT", "check_installed", "read", "write"]

#: Version of the format of files.
FORMAT = 1

_FORMAT_KEY, _DIGEST_KEY = "torchobj.manifest.format", "torchobj.manifest.digest"

#: Objects per row group: with keys and versions of 1 KiB, both the limit of S3, a row group has 136 MB.
_GROUP_ROWS = 1 << 16

#: Maximum size of a column of a row group and of the footer of a file that is read, so that a damaged one allocates
#: no more.
_MAX_COLUMN_BYTES, _MAX_FOOTER_BYTES = 80 << 20, 16 << 20

#: Maximum length of a base, key or version: that of a path in Linux. Keys of S3 and Google Cloud Storage have at
#: most 1024 bytes.
_MAX_TEXT_BYTES = 4096

_COLUMNS = {"base": "string", "key": "string", "size": "int64", "version": "string"}

_ADVICE = "write it with Manifest.save of this version of torchobj"


def _imported() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"files of manifests need pyarrow ({error}): install the extra with pip install 'torchobj[manifest]'"
        ) from error


def check_installed() -> None:
    """Raises ConfigError, which names the extra, if pyarrow is not installed."""
    _imported()


def write(manifest: NativeManifest, file: BinaryIO) -> None:
    """Writes the table of `manifest` to an open file."""
    arrow, parquet = _imported()
    bases = arrow.array(manifest.bases(), arrow.string())
    schema = arrow.schema(
        [
            arrow.field("base", arrow.dictionary(arrow.int32(), arrow.string()), nullable=False),
            arrow.field("key", arrow.string(), nullable=False),
            arrow.field("size", arrow.int64()),
            arrow.field("version", arrow.string()),
        ]
    )
    with parquet.ParquetWriter(
        file,
        schema,
        compression="zstd",
        # Not DELTA_BYTE_ARRAY, the encoding of prefixes: a small page of it decodes to any size.
        column_encoding={"key": "DELTA_LENGTH_BYTE_ARRAY", "size": "DELTA_BINARY_PACKED"},
        use_dictionary=["base"],
        write_page_checksum=True,
        # Readers see plain strings instead of a dictionary.
        store_schema=False,
    ) as writer:
        for begin in range(0, len(manifest), _GROUP_ROWS):
            columns = manifest.columns(begin, min(begin + _GROUP_ROWS, len(manifest)))
            writer.write_batch(_batch(arrow, bases, columns, schema), row_group_size=_GROUP_ROWS)
        writer.add_key_value_metadata({_FORMAT_KEY: str(FORMAT), _DIGEST_KEY: manifest.digest()})


def _batch(arrow: Any, bases: Any, columns: list[bytes], schema: Any) -> Any:
    indices, key_offsets, keys, sizes, version_offsets, versions = map(arrow.py_buffer, columns)
    rows = len(columns[0]) // 4

    def array(kind: Any, *buffers: Any) -> Any:
        return arrow.Array.from_buffers(kind, rows, [None, *buffers])

    def with_nulls(values: Any, unknown: Any) -> Any:
        compute = importlib.import_module("pyarrow.compute")
        return compute.if_else(compute.equal(values, unknown), arrow.scalar(None, values.type), values)

    return arrow.record_batch(
        [
            arrow.DictionaryArray.from_arrays(array(arrow.int32(), indices), bases),
            array(arrow.string(), key_offsets, keys),
            with_nulls(array(arrow.int64(), sizes), -1),
            with_nulls(array(arrow.string(), version_offsets, versions), ""),
        ],
        schema=schema,
    )


def read(data: Buffer, name: str) -> NativeManifest:
    """The manifest in the bytes of a file; `name` is that of the file in messages.

    Raises:
        ManifestError: It is not a manifest of this format, or is damaged.
    """
    arrow, parquet = _imported()
    _check_footer_length(data, name)
    try:
        file = parquet.ParquetFile(
            arrow.BufferReader(arrow.py_buffer(data)), read_dictionary=["base"], page_checksum_verification=True
        )
        digest = _checked_digest(file, len(data), name)
        _check_pages(data, name)
        manifest = _objects(arrow, file, name)
    except ManifestError:
        raise
    # What pyarrow raises for a damaged file, which is of many types.
    except (arrow.ArrowException, OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        reason = str(error).partition("\n")[0]
        raise ManifestError(f"{name}: not a manifest, or damaged: {reason}; {_ADVICE}") from error
    if manifest.digest() != digest:
        raise ManifestError(
            f"{name}: damaged: the digest of its {len(manifest)} objects is {manifest.digest()}, that in its metadata "
            f"is {digest}; {_ADVICE}"
        )
    return manifest


def _check_footer_length(data: Buffer, name: str) -> None:
    """Checks the end of a Parquet file: the length of the footer in 4 bytes, and `PAR1`."""
    end = bytes(memoryview(data)[-8:])
    if len(end) < 8 or end[4:] != b"PAR1":
        raise ManifestError(f"{name}: not a Parquet file, or truncated: it ends with {end!r}; {_ADVICE}")
    length = int.from_bytes(end[:4], "little")
    if length > min(_MAX_FOOTER_BYTES, memoryview(data).nbytes - 12):
        raise ManifestError(f"{name}: damaged: a footer of {length} bytes in {memoryview(data).nbytes}; {_ADVICE}")


def _checked_digest(file: Any, size: int, name: str) -> str:
    """Checks the footer. Returns the digest in it."""
    metadata = {key.decode(): value.decode() for key, value in (file.metadata.metadata or {}).items()}
    if _FORMAT_KEY not in metadata:
        raise ManifestError(
            f"{name}: not a manifest: its metadata has no {_FORMAT_KEY!r}. A table that was changed or written by "
            f"another program is not one; make a manifest of its objects with Manifest.from_urls"
        )
    if metadata[_FORMAT_KEY] != str(FORMAT):
        raise ManifestError(
            f"{name}: a manifest of format {metadata[_FORMAT_KEY]!r}; this version of torchobj reads {FORMAT}; "
            f"{_ADVICE}"
        )
    found = {field.name: str(field.type) for field in file.schema_arrow}
    expected = {**_COLUMNS, "base": "dictionary<values=string, indices=int32, ordered=0>"}
    if list(found.items()) != list(expected.items()) or file.metadata.num_columns != len(_COLUMNS):
        shown = ", ".join(f"{column} {kind}" for column, kind in found.items())
        raise ManifestError(f"{name}: its columns are {shown}; must be {_COLUMNS}; {_ADVICE}")
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    for number, group in enumerate(groups):
        if not 0 <= group.num_rows <= _GROUP_ROWS:
            raise ManifestError(f"{name}: damaged: row group {number} has {group.num_rows} rows; {_ADVICE}")
    if sum(group.num_rows for group in groups) != file.metadata.num_rows:
        raise ManifestError(f"{name}: damaged: its row groups do not have {file.metadata.num_rows} rows; {_ADVICE}")
    if file.metadata.num_rows > row_limit(size):
        raise ManifestError(f"{name}: damaged: {file.metadata.num_rows} objects in {size} bytes; {_ADVICE}")
    return str(metadata.get(_DIGEST_KEY))


def _check_pages(data: Buffer, name: str) -> None:
    largest = largest_column(memoryview(data), (DICTIONARY, WHOLE_TEXTS, None, WHOLE_TEXTS))
    if largest > _MAX_COLUMN_BYTES:
        raise ManifestError(
            f"{name}: damaged: a column of a row group has {largest} bytes, at most {_MAX_COLUMN_BYTES}; {_ADVICE}"
        )


def _objects(arrow: Any, file: Any, name: str) -> NativeManifest:
    builder, known = ManifestBuilder(), set[str]()
    for number in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(number).num_rows
        table = file.read_row_group(number)
        base, key, size, version = (_one_array(arrow, table.column(column)) for column in _COLUMNS)
        if table.num_rows != rows or base.null_count or key.null_count or base.dictionary.null_count:
            raise ManifestError(f"{name}: damaged: row group {number} has other rows than its footer; {_ADVICE}")
        for column, texts in (("base", base.dictionary), ("key", key), ("version", version)):
            _check_lengths(texts, column, name)
        bases = base.dictionary.to_pylist()
        for text in set(bases) - known:
            _check_base(text, name)
            known.add(text)
        columns = (
            _fixed(base.indices, 4),
            *_texts(key),
            _fixed(size.fill_null(-1), 8),
            *_texts(version.fill_null("")),
        )
        builder.add(bases, columns)
    return builder.finish()


def _one_array(arrow: Any, column: Any) -> Any:
    """The chunks of a column as one array."""
    if column.num_chunks == 1:
        return column.chunk(0)
    return arrow.concat_arrays(column.unify_dictionaries().chunks)


def _check_lengths(texts: Any, column: str, name: str) -> None:
    compute = importlib.import_module("pyarrow.compute")
    longest = compute.max(compute.binary_length(texts)).as_py() or 0
    if longest > _MAX_TEXT_BYTES:
        raise ManifestError(
            f"{name}: a {column} of {longest} bytes; stores have none of more than {_MAX_TEXT_BYTES}; {_ADVICE}"
        )


def _check_base(base: str, name: str) -> None:
    """Checks that a store has this URL, and that a file in a bucket names no files or memory of this machine."""
    try:
        parsed = parse_url(base)
        is_base = parsed.base == base
    except ConfigError:
        is_base = False
    if not is_base:
        raise ManifestError(
            f"{name}: its base {shown_url(base)!r} is not the URL of a store, such as s3://bucket; {_ADVICE}"
        )
    if parsed.scheme not in CLOUD_SCHEMES and parse_url(name).scheme in CLOUD_SCHEMES:
        raise ManifestError(
            f"{name}: a manifest in a bucket must not name objects of this machine, but has the base {base!r}; if you "
            "trust it, download the file and load it from its local path"
        )


def _fixed(array: Any, width: int) -> bytes:
    """The values of an array of numbers."""
    return bytes(memoryview(array.buffers()[1])[array.offset * width : (array.offset + len(array)) * width])


def _texts(array: Any) -> tuple[bytes, bytes]:
    """The offsets and the bytes of an array of strings."""
    _, offsets, texts = array.buffers()
    begin, end = array.offset * 4, (array.offset + len(array) + 1) * 4
    return bytes(memoryview(offsets)[begin:end]), b"" if texts is None else bytes(memoryview(texts))
