"""Writes a benchmark's objects to a bucket, those that are not there yet. Leaves their content to `objects`."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.lab.boto import boto_client
from benchmarks.lab.objects import Family, pieces
from benchmarks.lab.place import Place

_THREADS = 8


def upload(place: Place, families: Sequence[Family]) -> int:
    """Writes what is missing, by boto3, and says how many objects that was."""
    client = boto_client(place, max_pool_connections=_THREADS)
    found = {
        entry["Key"]: entry["Size"]
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=place.prefix)
        for entry in page.get("Contents", ())
    }
    missing = [
        (place.key(name), index, family.size)
        for family in families
        for index, name in enumerate(family.names())
        if found.get(place.key(name)) != family.size
    ]

    def write(item: tuple[str, int, int]) -> None:
        key, index, size = item
        content = io.BytesIO()
        for piece in pieces(index, size):
            content.write(piece)
        content.seek(0)
        client.upload_fileobj(content, place.bucket, key)

    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in threads.map(write, missing):
            pass
    return len(missing)
