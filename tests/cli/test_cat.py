"""`torchobj cat` of many objects: their order, and the reads ahead."""

import threading

import pytest

from torchobj.cli import objects
from torchobj.store import reads


@pytest.mark.providers("s3", "gs")
def test_small_and_large_objects_and_empty_ones_are_written_in_key_order(cli, bucket):
    sizes = [100, (9 << 20) + 1, 0, 1 << 20, *range(1, 30)]
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    for number, body in enumerate(bodies):
        bucket.write(f"many/{number:02}.bin", body)
    assert cli.run("cat", f"{bucket.url}/many/*.bin").stdout_bytes == b"".join(bodies)


def test_objects_are_read_concurrently(cli, bucket, monkeypatch):
    together, read = threading.Barrier(4), reads.get_many

    def waiting(*arguments, **settings):
        together.wait(timeout=150)
        return read(*arguments, **settings)

    for number in range(8):
        bucket.write(f"many/{number}", str(number).encode())
    monkeypatch.setattr(reads, "get_many", waiting)
    assert cli.run("cat", f"{bucket.url}/many/*").stdout == "01234567"


def test_what_is_read_ahead_is_limited_in_bytes(bucket, monkeypatch):
    read, started, held = reads.get_many, [], []

    def counted(urls, **settings):
        started.append(urls)
        return read(urls, **settings)

    for number in range(12):
        bucket.write(f"many/{number:02}", bytes(100))
    monkeypatch.setattr(reads, "get_many", counted)
    monkeypatch.setattr(objects, "_AHEAD_BYTES", 300)
    monkeypatch.setattr(objects, "_AHEAD_OBJECT_BYTES", 100)

    class Out:
        def write(self, data):
            held.append(len(started) - len(held))

        def flush(self):
            pass

    store = objects.Store(bucket.url, config=bucket.config)
    assert objects._write_objects(store, store.list("many/"), Out(), bucket.config) == 12
    assert max(held) <= 3 and len(held) == 12


def test_an_object_that_cannot_be_read_ends_the_output_after_those_before_it(cli, bucket, control):
    for number in range(4):
        bucket.write(f"many/{number}", str(number).encode())
    control.faults({"operation": "GetObject", "key": "many/2", "action": {"status": 403, "code": "AccessDenied"}})
    done = cli.run("cat", f"{bucket.url}/many/*")
    assert done.exit_code == 1 and done.stdout == "01" and "many/2" in done.stderr
