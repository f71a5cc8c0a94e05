"""Writes a benchmark's objects to a bucket, those that are not there yet. Leaves their content to `objects`."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import boto3
from botocore.config import Config

from benchmarks.lab.objects import Family, pieces
from benchmarks.lab.place import Place

_THREADS = 8


def upload(place: Place, families: Sequence[Family]) -> int:
    """Writes what is missing, by boto3, and says how many objects that was."""
    style = {"addressing_style": "auto" if place.endpoint_url is None else "path"}
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=place.endpoint_url,
        region_name=place.region,
        aws_access_key_id=place.access_key,
        aws_secret_access_key=place.secret_key,
        config=Config(max_pool_connections=_THREADS, s3=style),
    )
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
