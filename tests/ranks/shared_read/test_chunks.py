"""Chunks: the ranges of a read, divided."""

from hypothesis import given
from hypothesis import strategies as st

from torchobj.ranks.shared_read.chunks import Chunks, digest_of, urls_of


class Named:
    """A store without objects."""

    def url(self, key):
        return f"s3://b/{key}"


RANGES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=6)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), RANGES, max_size=3)


def jobs_of(objects, version="1"):
    return [
        (Named(), key, version, [(offset, bytearray(length)) for offset, length in ranges])
        for key, ranges in objects.items()
    ]


@given(OBJECTS, st.integers(1, 40))
def test_chunks_cover_each_byte_once(objects, chunk_bytes):
    jobs = jobs_of(objects)
    chunks = Chunks(jobs, chunk_bytes)
    targets = [(job, offset, len(memory)) for job, (*_, ranges) in enumerate(jobs) for offset, memory in ranges]
    covered = [bytearray(length) for _, _, length in targets]
    numbers = []
    for number, pieces in enumerate(chunks.pieces):
        assert sum(piece.length for piece in pieces) == chunks.size(number) > 0
        for piece in pieces:
            job, offset, _ = targets[piece.target]
            assert (piece.job, piece.offset) == (job, offset + piece.start)
            for at in range(piece.start, piece.start + piece.length):
                covered[piece.target][at] += 1
            numbers.append(piece.number)
    assert all(set(each) <= {1} for each in covered)
    assert numbers == list(range(chunks.count))
    assert chunks.nbytes == sum(length for *_, length in targets)


@given(OBJECTS, st.integers(1, 40))
def test_the_order_in_which_ranges_are_named_makes_no_difference(objects, chunk_bytes):
    jobs, turned = jobs_of(objects), jobs_of(dict(reversed([(key, each[::-1]) for key, each in objects.items()])))
    assert digest_of(jobs) == digest_of(turned)

    def read(jobs):
        urls = urls_of(jobs)
        return [
            [(urls[piece.job], piece.offset, piece.length) for piece in pieces]
            for pieces in Chunks(jobs, chunk_bytes).pieces
        ]

    assert read(jobs) == read(turned)


def test_objects_versions_and_ranges_are_in_the_digest():
    objects = {"a": [(0, 10), (20, 5)]}
    different = [
        jobs_of(objects),
        jobs_of(objects, "2"),
        jobs_of({"b": objects["a"]}),
        jobs_of({"a": [(0, 10), (20, 6)]}),
        jobs_of({"a": [(0, 10)]}),
        [],
    ]
    assert len({digest_of(jobs) for jobs in different}) == len(different)
