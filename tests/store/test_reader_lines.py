"""Reading lines of an object that is fetched as it is read: one request per buffer, not per line."""

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


def lazily(bucket, key="text"):
    """A reader that fetches exactly what is read, so that each fetch is a request."""
    constructor = torchobj.S3ReaderConstructor.range_based(0)
    urls = [f"{bucket.url}/{key}"]
    return torchobj.S3MapDataset.from_objects(urls, s3client_config=bucket.config, reader_constructor=constructor)[0]


def test_lines_are_fetched_in_buffers_and_not_one_by_one(bucket, control):
    text = b"".join(b"%06d\n" % number for number in range(20_000))
    bucket.write("text", text)
    reader = lazily(bucket)
    control.clear_requests()
    assert list(reader) == text.splitlines(keepends=True)
    # Buffers of 64 KiB, one request for the size, and one that reaches the end.
    assert len(control.requests("GetObject")) <= len(text) / (64 << 10) + 3


@pytest.mark.parametrize("seed", range(5))
def test_lines_mixed_with_other_calls_equal_those_of_a_file(bucket, text, seed):
    bucket.write("text", text)
    ours, file, rng = lazily(bucket), io.BytesIO(text), random.Random(seed)
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


def test_an_empty_object_has_no_lines(bucket):
    bucket.write("text", b"")
    reader = lazily(bucket)
    assert (reader.readline(), list(reader), reader.tell()) == (b"", [], 0)
