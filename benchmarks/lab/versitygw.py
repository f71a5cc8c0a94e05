"""Runs versitygw, a real S3 server over a folder, with the objects of a benchmark in it. Leaves starting it to the
launcher of the tests.
"""

import contextlib
from collections.abc import Iterator, Sequence

import boto3
from botocore.config import Config

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
        client = boto3.client(
            "s3",
            endpoint_url=place.endpoint_url,
            region_name=place.region,
            aws_access_key_id=place.access_key,
            aws_secret_access_key=place.secret_key,
            config=Config(s3={"addressing_style": "path"}),
        )
        client.create_bucket(Bucket=BUCKET)
        upload(place, families)
        yield place
