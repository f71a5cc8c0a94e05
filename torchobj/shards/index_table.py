"""A sample of an index, and its columns: converted from and to the table of members of an index file.

An untrusted file is checked here: the members of a sample must follow each other, and samples their predecessors.
"""

import importlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchobj.exceptions import TarIndexError
from torchobj.shards import index_file
from torchobj.shards.index_file import ADVICE, COLUMNS, IndexTable

__all__ = ["TarMember", "TarSample", "columns_of", "expanded", "numbers", "one_chunk", "parts_of"]


class TarMember(NamedTuple):
    """A member of a tar shard."""

    field: str
    """Its extension, lower-case, without the first dot."""
    offset: int
    """Offset of its bytes in the shard."""
    size: int
    """Number of its bytes."""


class TarSample(NamedTuple):
    """A sample of a tar shard: adjacent members with the same name up to the first dot."""

    url: str
    """URL of the shard."""
    key: str
    """The common name."""
    begin: int
    """Offset of its first header in the shard."""
    end: int
    """End of its last member, with padding."""
    members: tuple[TarMember, ...]
    """Its members, in their order."""


def one_chunk(column: Any) -> Any:
    """A column as one array."""
    arrow = importlib.import_module("pyarrow")
    if isinstance(column, arrow.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    # A table without rows has no chunk to take the dictionary from.
    return arrow.concat_arrays(column.chunks) if column.num_chunks else arrow.array([], column.type)


def numbers(column: Any) -> Any:
    """The integers of a column, which share its memory; elements are of type int."""
    return memoryview(one_chunk(column).to_numpy())


def parts_of(table: IndexTable, name: str) -> list[list[Any]]:
    """The members of each shard of an index file, whose name is `name`.

    Raises:
        TarIndexError: The members are not in the order of the shards.
    """
    arrow, compute = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.compute")
    numpy = importlib.import_module("numpy")
    names = arrow.array([shard.name for shard in table.shards], arrow.string())
    shard = one_chunk(compute.index_in(table.members["shard"].cast(arrow.string()), names)).to_numpy()
    if numpy.any(shard[1:] < shard[:-1]):
        raise TarIndexError(f"{name}: damaged: its members are not in the order of the shards; {ADVICE}")
    ends = numpy.searchsorted(shard, numpy.arange(len(table.shards) + 1)).tolist()
    return [[table.members.slice(first, last - first)] for first, last in itertools.pairwise(ends)]


def columns_of(parts: Sequence[Sequence[Any]], name: str) -> tuple[Any, Any]:
    """The tables of samples and members, given the tables of the members of each shard.

    Returns:
        Samples, with the columns shard (its number), key, begin, end and first (the row of the first member), and
        members, with the columns field, offset and size.

    Raises:
        TarIndexError: The members are not in the order of their shard, or a sample has a field twice.
    """
    arrow, compute = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.compute")
    numpy = importlib.import_module("numpy")
    tables = [table for part in parts for table in part] or [index_file.members_table({key: [] for key in COLUMNS})]
    rows = [sum(table.num_rows for table in part) for part in parts]
    table = arrow.concat_tables(tables).drop_columns("shard").unify_dictionaries()
    # Offsets of 64 bits: the keys of one column may exceed 2 GiB.
    key = one_chunk(table["key"].cast(arrow.large_string()))
    shard = numpy.repeat(numpy.arange(len(parts), dtype=numpy.int32), rows)
    offset, size, begin, end = (one_chunk(table[column]).to_numpy() for column in ("offset", "size", "begin", "end"))
    is_start = numpy.ones(table.num_rows, bool)
    is_start[1:] = (shard[1:] != shard[:-1]) | (begin[1:] != begin[:-1])
    same_key = compute.equal(key[1:], key[:-1]).to_numpy(zero_copy_only=False)
    continues = same_key & (end[1:] == end[:-1]) & (offset[1:] >= (offset + size)[:-1])
    follows = (begin[1:] >= end[:-1]) | (shard[1:] != shard[:-1])
    if not numpy.all(numpy.where(is_start[1:], follows, continues)):
        raise TarIndexError(f"{name}: damaged: its members are not in the order of their shard; {ADVICE}")
    _check_fields(one_chunk(table["field"]), numpy.cumsum(is_start), name)
    first = numpy.flatnonzero(is_start)
    samples = {"shard": shard[first], "key": key.take(arrow.array(first)), "begin": begin[first], "end": end[first]}
    members = {"field": one_chunk(table["field"]), "offset": offset, "size": size}
    return arrow.table({**samples, "first": first}), arrow.table(members)


def _check_fields(fields: Any, sample: Any, name: str) -> None:
    """Checks that no sample has a field twice, given the field and the number of the sample of each member."""
    compute, numpy = importlib.import_module("pyarrow.compute"), importlib.import_module("numpy")
    # The dictionary of a damaged file may contain a name twice.
    names = compute.unique(fields.dictionary)
    codes = compute.index_in(fields.dictionary, names).take(fields.indices).to_numpy()
    # Members of a sample are neighbours, so that this sorts in about linear time.
    pairs = numpy.sort(sample * len(names) + codes, kind="stable")
    twice = pairs[1:][pairs[1:] == pairs[:-1]]
    if twice.size:
        field = names[int(twice[0]) % len(names)].as_py()
        raise TarIndexError(f"{name}: damaged: a sample has the field {field!r} twice; {ADVICE}")


def expanded(names: Sequence[str], samples: Any, members: Any) -> tuple[Any, list[tuple[int, int]]]:
    """The table of members of an index file, and the first row of each shard with the row after its last.

    Args:
        names: Names of the shards in the file.
        samples, members: Tables from `columns_of`.
    """
    arrow, numpy = importlib.import_module("pyarrow"), importlib.import_module("numpy")
    starts = numpy.append(one_chunk(samples["first"]).to_numpy(), members.num_rows)
    sample = arrow.array(numpy.repeat(numpy.arange(samples.num_rows), numpy.diff(starts)))
    shard = one_chunk(samples["shard"])
    columns = {
        "shard": arrow.DictionaryArray.from_arrays(shard.take(sample), arrow.array(names, arrow.string())),
        **{name: one_chunk(samples[name]).take(sample) for name in ("begin", "end")},
        # Texts whose offsets have 64 bits are divided into chunks, which files have anyway.
        "key": arrow.chunked_array([samples["key"].combine_chunks()]).take(sample).cast(arrow.string()),
        **{name: members[name] for name in members.column_names},
    }
    rows = starts[numpy.searchsorted(shard.to_numpy(), numpy.arange(len(names) + 1))].tolist()
    return index_file.members_table(columns), list(itertools.pairwise(rows))
