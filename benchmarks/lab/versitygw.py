"""Runs versitygw, a real S3 server over a folder, with the objects of a benchmark in it. Leaves starting it to the
launcher of the tests.
"""

import contextlib
from collections.abc import Iterator, Sequence

from benchmarks.lab.boto import boto_client
from benchmarks.lab.nginx import BUCKET
from benchmarks.lab.objects import Family
from benchmarks.lab.place import Place
from benchmarks.lab.prepare import upload
from tests.servers.launch import start


@contextlib.contextmanager
def running(families: Sequence[Family]) -> Iterator[Place]:
    """versitygw with the objects of `families`, until the block ends."""
    with start("versitygw") as server:
        place = Place(
            bucket=BUCKET,
            endpoint_url=server.endpoint,
            region=server.region,
            access_key=server.access_key,
            secret_key=server.secret_key,
        )
        boto_client(place).create_bucket(Bucket=BUCKET)
        upload(place, families)
        yield place
