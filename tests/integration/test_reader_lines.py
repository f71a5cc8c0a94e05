"""Lines of an object that is fetched as it is read: a request for a buffer of lines, not for each line."""

import io
import random

import pytest

import torchobj


def lines_of(seed, count):
    rng = random.Random(seed)
    return [bytes([97 + rng.randrange(26)]) * rng.choice([0, 3, 40, 700, 90_000]) + b"\n" for _ in range(count)]


@pytest.fixture
def text():
    return b"".join(lines_of(1, 30)) + b"without a newline"


def lazily(place, key="text"):
    """A reader that fetches exactly what is read, so that each fetch is a request."""
    constructor = torchobj.S3ReaderConstructor.range_based(0)
    urls = [f"{place.url}/{key}"]
    return torchobj.S3MapDataset.from_objects(urls, s3client_config=place.config, reader_constructor=constructor)[0]


def test_lines_are_fetched_by_the_buffer_and_not_one_by_one(place, control):
    text = b"".join(b"%06d\n" % number for number in range(20_000))
    place.boto.put_object(Bucket=place.bucket, Key="text", Body=text)
    reader = lazily(place)
    control.forget_requests()
    assert list(reader) == text.splitlines(keepends=True)
    # Of 64 KiB each; one for the size, and one that finds the end.
    assert len(control.requests("GetObject")) <= len(text) / (64 << 10) + 3


@pytest.mark.parametrize("seed", range(5))
def test_lines_mixed_with_anything_else_are_those_of_a_file(place, text, seed):
    place.boto.put_object(Bucket=place.bucket, Key="text", Body=text)
    ours, file, rng = lazily(place), io.BytesIO(text), random.Random(seed)
    for _ in range(60):
        at, size = rng.randrange(len(text) + 10), rng.choice([-1, 0, 1, 5, 1000, 100_000])
        step = rng.choice(
            [
                lambda file: file.readline(),
                lambda file, size=size: file.readline(size),
                lambda file, at=at: file.seek(at),
                lambda file: file.seek(-10, 2),
                lambda file: file.read(11),
                lambda file: file.tell(),
                lambda file, size=size: file.readlines(size + 2),
                lambda file: next(file, None),
            ]
        )
        assert step(ours) == step(file)
    ours.close()
    with pytest.raises(ValueError, match="closed"):
        ours.readline()


def test_the_lines_of_an_empty_object_are_none(place):
    place.boto.put_object(Bucket=place.bucket, Key="text", Body=b"")
    reader = lazily(place)
    assert (reader.readline(), list(reader), reader.tell()) == (b"", [], 0)
