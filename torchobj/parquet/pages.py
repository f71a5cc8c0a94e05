"""Bounds what the columns of a Parquet file decode to. Decodes nothing but its footer and the headers of pages.

A footer does not bound it: the sizes in it are not verified, a page of zeros compresses to nothing, and a value of a
dictionary, or a prefix of many keys, counts once.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "DELTA_TEXTS",
    "DICTIONARY",
    "DICTIONARY_PAGE",
    "WHOLE_TEXTS",
    "Chunk",
    "Footer",
    "Page",
    "has_sound_statistics",
    "largest_column",
    "pages_of",
    "read_footer",
    "row_limit",
]

#: Encodings of pages whose texts are as long as the page, and those of dictionaries and their indices.
WHOLE_TEXTS, DICTIONARY = frozenset({0, 6}), frozenset({0, 2, 8})

#: Encoding of pages whose texts repeat the start of the text before.
DELTA_TEXTS = 7

#: Types of Thrift's compact protocol, in which footers and page headers are encoded.
_BOOLS, _BYTE, _I32, _I64, _DOUBLE, _BINARY, _LIST, _STRUCT = (1, 2), 3, 5, 6, 7, 8, 9, 12

#: Types of pages, with the fields of their header and of the encoding in it: data, dictionary, data of version 2.
_PAGES = {0: (5, 2), 2: (7, 2), 3: (8, 4)}
DICTIONARY_PAGE = 2

#: Physical types: texts, values of one length, and the lengths of others.
_TEXT, _FIXED, _WIDTHS = 6, 7, {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}

#: The fields of minimum and maximum in statistics, and of the numbers of values by their levels.
_BOUNDS, _HISTOGRAMS = (1, 2, 5, 6), (2, 3)

#: Lists and structs in one another: row groups, columns, metadata and their statistics need 8.
_MAX_DEPTH = 16


def row_limit(size: int) -> int:
    """The number of rows that a manifest or index of this many bytes may have. Row groups may share their pages."""
    return max(1 << 20, 64 * size)


class Chunk(NamedTuple):
    """A column of a row group."""

    begin: int
    end: int
    values: int
    """Number of its values, with those that are missing."""
    codec: int
    """Number of the compression."""
    is_encrypted: bool


class Footer(NamedTuple):
    """The parts of a footer that bound what is decoded."""

    rows: int
    leaves: list[int]
    """Number of columns with data of each column of the table: a struct has several."""
    groups: list[tuple[int, list[Chunk]]]
    """Number of rows of each row group, and its columns."""


class Page(NamedTuple):
    """The header of a page."""

    kind: int
    encoding: int
    values: int
    """Number of values. In a dictionary, those that differ."""
    sizes: tuple[int, int]
    """Bytes before and after compression."""
    begin: int
    """Where the compressed bytes begin."""


def read_footer(tail: memoryview) -> Footer:
    """Reads the footer of a file.

    pyarrow ends the process where the type of a column in the footer differs from the schema.

    Args:
        tail: The end of the file, with the whole footer.

    Raises:
        ValueError: The footer is damaged.
    """
    end = len(tail) - 8
    try:
        footer = _struct(tail[:end], end - int.from_bytes(tail[-8:-4], "little"))[0]
        groups = [(group[3, _I64], list(map(_chunk, group[1, _LIST]))) for group in footer.get((4, _LIST), [])]
        return Footer(footer[3, _I64], _leaves(footer[2, _LIST]), groups)
    except (LookupError, TypeError) as error:
        raise ValueError(f"it is truncated or lacks {error}") from None


def has_sound_statistics(tail: memoryview, levels: Mapping[int, tuple[int, int]]) -> bool:
    """Whether the statistics of columns are of their type, in all row groups.

    pyarrow ends the process, or reads other memory, where they are not.

    Args:
        tail: The end of a file that `read_footer` reads.
        levels: The maximum levels of repetition and definition of the columns, by their numbers.
    """
    end = len(tail) - 8
    footer = _struct(tail[:end], end - int.from_bytes(tail[-8:-4], "little"))[0]
    leaves = [element for element in footer[2, _LIST][1:] if (1, _I32) in element]
    chunks = [(group[1, _LIST][number], number) for group in footer.get((4, _LIST), []) for number in levels]
    return all(_is_sound(chunk[3, _STRUCT], leaves[number], levels[number]) for chunk, number in chunks)


def _is_sound(metadata: dict[tuple[int, int], Any], leaf: dict[tuple[int, int], Any], levels: tuple[int, int]) -> bool:
    kind = leaf[1, _I32]
    width = leaf.get((2, _I32)) if kind == _FIXED else _WIDTHS.get(kind)
    bounds, sizes = metadata.get((12, _STRUCT), {}), metadata.get((16, _STRUCT), {})
    lengths = [bounds.get((number, _BINARY), 0) for number in _BOUNDS]
    histograms = [sizes.get((number, _LIST)) for number in _HISTOGRAMS]
    return (
        metadata.get((1, _I32)) == kind
        and (width is None or all(length in (0, width) for length in lengths))
        and all(not counts or len(counts) == top + 1 for counts, top in zip(histograms, levels, strict=True))
        and (kind == _TEXT or (1, _I64) not in sizes)
    )


def _leaves(elements: list[dict[tuple[int, int], Any]]) -> list[int]:
    """The number of leaves of each child of the first element. Elements are in depth-first order."""
    counts, at = [], 1
    for _ in range(dict.get(elements[0], (5, _I32), 0)):
        left, leaves = 1, 0
        while left > 0:
            left += dict.get(elements[at], (5, _I32), 0) - 1
            leaves += (1, _I32) in elements[at]
            at += 1
        counts.append(leaves)
    return counts


def largest_column(data: memoryview, encodings: Sequence[frozenset[int] | None]) -> int:
    """The bytes of all pages of the largest column of a row group, before or after compression.

    Args:
        data: The file. The length of its footer is checked already.
        encodings: For each column the permitted encodings; None: any. Only `DICTIONARY` permits dictionaries.

    Raises:
        ValueError: The file is damaged, or a column has another encoding.
    """
    largest = 0
    for _, columns in read_footer(data).groups:
        for column, permitted in zip(columns, encodings, strict=True):
            total = 0
            for page in pages_of(data[: max(column.end, 0)], column.begin):
                is_refused = page.kind == DICTIONARY_PAGE and permitted is not DICTIONARY
                if permitted is not None and (page.encoding not in permitted or is_refused):
                    raise ValueError(f"a page of type {page.kind} has the encoding {page.encoding}")
                total += max(page.sizes)
            largest = max(largest, total)
    return largest


def _chunk(column: dict[tuple[int, int], Any]) -> Chunk:
    is_encrypted = (8, _STRUCT) in column
    if is_encrypted:
        return Chunk(0, 0, 0, 0, is_encrypted)
    metadata = column[3, _STRUCT]
    first, dictionary = metadata[9, _I64], metadata.get((11, _I64), 0)
    first = dictionary if 0 < dictionary < first else first
    return Chunk(first, first + metadata[7, _I64], metadata[5, _I64], metadata[4, _I32], is_encrypted)


def pages_of(data: memoryview, at: int) -> Iterator[Page]:
    """The pages from `at` to the end of the data.

    Raises:
        ValueError: A header is damaged.
    """
    while 0 <= at < len(data):
        try:
            header, at = _struct(data, at)
            kind, sizes = header[1, _I32], (header[2, _I32], header[3, _I32])
            of_kind, of_encoding = _PAGES[kind]
            values, encoding = header[of_kind, _STRUCT][1, _I32], header[of_kind, _STRUCT][of_encoding, _I32]
        except (LookupError, TypeError) as error:
            raise ValueError(f"a page header is truncated or lacks {error}") from None
        if min(*sizes, values) < 0:
            raise ValueError(f"a page of {min(sizes)} bytes and {values} values")
        yield Page(kind, encoding, values, sizes, at)
        at += sizes[1]
    if at != len(data):
        raise ValueError(f"a page ends at {at} in a column that ends at {len(data)}")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) >= 0x80 and shift < 63:
        at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
    return value | (byte & 0x7F) << shift, at + 1


def _struct(data: memoryview, at: int, depth: int = 0) -> tuple[dict[tuple[int, int], Any], int]:
    """The fields of a struct by number and type, and its end."""
    fields: dict[tuple[int, int], Any] = {}
    number = 0
    while head := data[at]:
        at, kind = at + 1, head & 15
        if head >> 4:
            number += head >> 4
        else:
            zigzag, at = _varint(data, at)
            number = zigzag >> 1 ^ -(zigzag & 1)
        if kind not in _BOOLS:
            fields[number, kind], at = _value(data, at, kind, depth + 1)
    return fields, at + 1


def _value(data: memoryview, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """A number, list or struct, the length of a text, None for others, and its end."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"a footer or page header of more than {_MAX_DEPTH} levels")
    if kind in (4, _I32, _I64):
        zigzag, at = _varint(data, at)
        return zigzag >> 1 ^ -(zigzag & 1), at
    if kind == _BINARY:
        length, at = _varint(data, at)
        return length, at + length
    if kind == _STRUCT:
        return _struct(data, at, depth)
    if kind == _LIST:
        head, at = data[at], at + 1
        count = head >> 4
        if count == 15:
            count, at = _varint(data, at)
        values = []
        for _ in range(count):
            # A list of any length ends with the data.
            _ = data[at]
            value, at = _value(data, at, head & 15, depth + 1)
            values.append(value)
        return values, at
    if kind in (*_BOOLS, _BYTE, _DOUBLE):
        return None, at + (8 if kind == _DOUBLE else 1)
    raise ValueError(f"a field of type {kind} in a footer or page header")
