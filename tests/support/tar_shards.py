"""Tar shards for tests, and how tarfile and webdataset read them."""

import io
import os
import tarfile

from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

from torchobj._torchobj import Buffer, TarIndexer, TarReader
from torchobj.exceptions import TarError

URL = "s3://bucket/shard.tar"
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
TYPES = [
    tarfile.REGTYPE,
    tarfile.AREGTYPE,
    tarfile.CONTTYPE,
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.CHRTYPE,
    tarfile.FIFOTYPE,
    b"V",
]


def _is_compressed(name):
    """Returns whether tarfile, which decides by the first bytes of a shard, would decompress one that begins with this name."""
    name = name.encode("utf-8", "surrogateescape")
    return name.startswith((b"\x1f\x8b\x08", b"BZh", b"\x5d\x00\x00\x80", b"\xfd7zXZ"))


_letters = st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])
_stems = st.one_of(
    st.sampled_from(["a", "b", "./a", "d/a", "v1.0/a", "__meta__/a", "d/", "", "__a__", "a\n"]),
    st.text(_letters, min_size=1, max_size=60),
    st.integers(50, 290).map(lambda length: ("folder/" * 50)[: length - 8] + "/file"),
)
_extensions = st.sampled_from(["jpg", "JPG", "cls", "seg.png", "", "Äß", "__key__", "json"])
names = st.one_of(
    st.builds("{}.{}".format, _stems, _extensions),
    st.binary(min_size=1, max_size=80).map(lambda name: name.replace(b"\0", b"").decode("utf-8", "surrogateescape")),
).filter(lambda name: 1 <= len(name.encode("utf-8", "surrogateescape")) <= 300 and not _is_compressed(name))
bodies = st.one_of(
    st.just(b""), st.binary(max_size=40), st.integers(1, 3000).map(lambda size: bytes([size % 251]) * size)
)
members = st.lists(st.tuples(names, st.sampled_from(TYPES[:3] * 5 + TYPES), bodies), max_size=8)


def make(members, form="pax", **options):
    """Returns a shard of members that the format can hold."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=FORMATS[form], **options) as tar:
        for name, kind, body in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind not in TYPES[:3] and kind != b"V":
                body, info.linkname = b"", "target"
            if kind == tarfile.AREGTYPE and (name.endswith("/") or len(os.fsencode(name)) > 99):
                info.type = tarfile.REGTYPE  # Where a header ends with a slash, it would be a folder, but with a body.
            info.size = len(body)
            try:
                tar.addfile(info, io.BytesIO(body))
            except ValueError:
                continue  # The name is too long for this format.
    return file.getvalue()


def expected(shard):
    """Returns the samples that webdataset reads through tarfile, and whether it failed."""
    found = []
    try:
        found.extend(group_by_keys(tar_file_expander([{"url": URL, "stream": io.BytesIO(shard)}])))
    except (tarfile.TarError, ValueError, EOFError, OSError):
        return found, True
    return found, False


def pieces(shard, cuts):
    """Returns the shard cut at these positions."""
    cuts = sorted(cut % (len(shard) + 1) for cut in cuts)
    return [shard[start:end] for start, end in zip([0, *cuts], [*cuts, len(shard)], strict=True)]


def read(shard, cuts=(), compression=None, position=0):
    """Returns what a reader returns for pieces of a shard, and its error."""
    reader = TarReader(URL, compression, position)
    found = []
    try:
        for piece in pieces(shard, cuts):
            found += reader.push(Buffer(piece))
            while reader.pending:
                found += reader.push(Buffer(b""))
        found += reader.finish()
    except TarError as error:
        return found, error
    return found, None


def plain(sample):
    """Returns a sample with bytes in place of buffers."""
    return {name: value if isinstance(value, str) else bytes(value) for name, value in sample.items()}


def walk(shard):
    """Returns the samples of an indexer, with the bytes at the positions of the members, and the number of bytes read."""
    indexer = TarIndexer(URL, len(shard))
    found, read_bytes = [], 0
    while part := indexer.next():
        indexer.feed(Buffer(shard[slice(*part)]))
        read_bytes += part[1] - part[0]
        found += indexer.samples()
    found += indexer.samples()
    rows = []
    for key, begin, end, fields in found:
        sample = {"__key__": key, "__url__": URL}
        sample.update((field, shard[offset : offset + size]) for field, offset, size in fields)
        rows.append((begin, end, key, sample))
    return rows, read_bytes
