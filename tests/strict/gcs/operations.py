"""Maps each operation's name to the function that performs it.

Each function takes an authorised Request, and returns a Response or raises GcsError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..response import Response
from . import buckets, changing, composing, inserting, listing, metadata_server, reading, resumable, rewriting
from .request import Request

PERFORM: Mapping[str, Callable[[Request], Response]] = {
    "GetMedia": reading.get_media,
    "GetObject": reading.get_object,
    "DeleteObject": changing.delete_object,
    "PatchObject": changing.patch_object,
    "ComposeObject": composing.compose_object,
    "RewriteObject": rewriting.rewrite_object,
    "ListObjects": listing.list_objects,
    "InsertObject": inserting.insert_object,
    "StartResumable": resumable.start_resumable,
    "ResumableChunk": resumable.resumable_chunk,
    "ResumableStatus": resumable.resumable_status,
    "CancelResumable": resumable.cancel_resumable,
    "CreateBucket": buckets.create_bucket,
    "ListBuckets": buckets.list_buckets,
    "GetBucket": buckets.get_bucket,
    "TestPermissions": buckets.test_permissions,
    "Token": metadata_server.token,
    "GetMetadata": metadata_server.get_metadata,
}
