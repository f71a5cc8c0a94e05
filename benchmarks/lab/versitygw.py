"""Runs versitygw, a real S3 server over a folder, with a benchmark's objects in it. The launcher of the tests
starts it.
"""

import contextlib
from collections.abc import Iterator, Sequence

from benchmarks.lab.location import Location
from benchmarks.lab.nginx import BUCKET
from benchmarks.lab.objects import Family, upload
from benchmarks.lab.progress import progress
from tests.servers.launch import start


@contextlib.contextmanager
def running(families: Sequence[Family]) -> Iterator[Location]:
    """Runs versitygw with the objects of `families`."""
    with contextlib.ExitStack() as stack:
        with progress("starting versitygw, which Go builds if it is missing"):
            server = stack.enter_context(start("versitygw"))
        location = Location(BUCKET, "", server.endpoint, server.region, server.access_key, server.secret_key)
        location.boto3().create_bucket(Bucket=BUCKET)
        with progress("writing objects to versitygw"):
            upload(location, families)
        yield location
