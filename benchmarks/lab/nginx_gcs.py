"""What nginx needs to serve objects by the JSON API of Google Cloud Storage: metadata as files, checksums as headers.
The paths of the XML API are those of S3. Starts nothing; `nginx` does.
"""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab.objects import Family, pieces

_METADATA, _CHECKSUMS = "metadata", "checksums.map"
_TIME = "2026-01-01T00:00:00.000Z"


def _crc32c(index: int, size: int) -> str:
    """Returns the checksum of an object as the API has it."""
    # Part of google-cloud-storage, which the other benchmarks do not need.
    import google_crc32c

    checksum = google_crc32c.Checksum()
    for piece in pieces(index, size):
        checksum.update(bytes(piece))
    return base64.b64encode(checksum.digest()).decode()


def prepare(directory: Path, bucket: str, families: Sequence[Family]) -> None:
    """Writes the metadata of the objects of `families`."""
    checksums = []
    for family in families:
        (directory / _METADATA / bucket / family.name).mkdir(parents=True, exist_ok=True)
        for index, name in enumerate(family.names()):
            crc32c = _crc32c(index, family.size)
            checksums.append(f"/{bucket}/{name} crc32c={crc32c};\n")
            resource = {
                "kind": "storage#object",
                "bucket": bucket,
                "name": name,
                "generation": "1",
                "metageneration": "1",
                "storageClass": "STANDARD",
                "contentType": "application/octet-stream",
                "size": str(family.size),
                "crc32c": crc32c,
                "etag": "CAE=",
                "timeCreated": _TIME,
                "updated": _TIME,
            }
            (directory / _METADATA / bucket / name).write_text(json.dumps(resource))
    (directory / _CHECKSUMS).write_text("".join(checksums))


def maps(directory: Path) -> str:
    """Returns the directives that look up an object's checksum."""
    return f"""
    map_hash_max_size 65536;
    map_hash_bucket_size 128;
    map $uri $crc32c {{ include {directory}/{_CHECKSUMS}; }}"""


def locations(directory: Path, bucket: str, sleep: str) -> str:
    """Returns the locations of a server; `sleep` delays a response."""
    identity = json.dumps(
        {"kind": "storage#bucket", "name": bucket, "locationType": "region", "storageClass": "STANDARD"}
    )
    # Listings are empty: gcsfs asks for one beside an object's metadata.
    empty = json.dumps({"kind": "storage#objects"})
    # An empty value adds no header.
    headers = """
            add_header x-goog-generation 1;
            add_header x-goog-metageneration 1;
            add_header x-goog-storage-class STANDARD;
            add_header x-goog-stored-content-encoding identity;
            add_header x-goog-stored-content-length $sent_http_content_length;
            add_header x-goog-hash $crc32c;"""
    return f"""
        location /storage/v1/b/ {{
            if ($arg_alt != media) {{ rewrite ^/storage/v1/b/([^/]+)/o/(.+)$ /-/metadata/$1/$2 last; }}
            rewrite ^/storage/v1/b/([^/]+)/o/(.+)$ /$1/$2 break; {headers} {sleep}
        }}
        location /download/storage/v1/b/ {{
            rewrite ^/download/storage/v1/b/([^/]+)/o/(.+)$ /$1/$2 break; {headers} {sleep}
        }}
        location /-/metadata/ {{
            internal;
            alias {directory}/{_METADATA}/;
            default_type application/json; {sleep}
        }}
        location = /storage/v1/b/{bucket} {{ default_type application/json; return 200 '{identity}'; }}
        location = /storage/v1/b/{bucket}/o {{ default_type application/json; return 200 '{empty}'; }}
        location / {{ {headers} {sleep} }}"""
