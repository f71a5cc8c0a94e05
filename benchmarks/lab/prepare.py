"""Writes a benchmark's objects to a bucket if they are missing. `objects` defines their content."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.lab.boto import boto_client
from benchmarks.lab.location import Location
from benchmarks.lab.objects import Family, pieces

_THREADS = 8


def upload(location: Location, families: Sequence[Family]) -> int:
    """Writes missing objects by boto3 and returns their number."""
    client = boto_client(location, max_pool_connections=_THREADS)
    found = {
        entry["Key"]: entry["Size"]
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=location.bucket, Prefix=location.prefix)
        for entry in page.get("Contents", ())
    }
    missing = [
        (location.key(name), index, family.size)
        for family in families
        for index, name in enumerate(family.names())
        if found.get(location.key(name)) != family.size
    ]

    def write(item: tuple[str, int, int]) -> None:
        key, index, size = item
        content = io.BytesIO()
        for piece in pieces(index, size):
            content.write(piece)
        content.seek(0)
        client.upload_fileobj(content, location.bucket, key)

    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in threads.map(write, missing):
            pass
    return len(missing)
