"""Maps each operation's name to the function that performs it.

Each function takes a verified and authorised Request, and returns a Response or raises S3Error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..exchange import Request
from ..response import Response
from . import buckets, copying, deleting, listing, multipart, multipart_completion, reading, writing

PERFORM: Mapping[str, Callable[[Request], Response]] = {
    "ListBuckets": buckets.list_buckets,
    "CreateBucket": buckets.create_bucket,
    "DeleteBucket": buckets.delete_bucket,
    "HeadBucket": buckets.head_bucket,
    "GetBucketLocation": buckets.get_bucket_location,
    "ListObjectsV2": listing.list_objects_v2,
    "ListMultipartUploads": listing.list_multipart_uploads,
    "ListParts": listing.list_parts,
    "GetObject": reading.get_object,
    "GetObjectTagging": reading.get_object_tagging,
    "HeadObject": reading.head_object,
    "PutObject": writing.put_object,
    "CopyObject": copying.copy_object,
    "DeleteObject": deleting.delete_object,
    "DeleteObjects": deleting.delete_objects,
    "CreateMultipartUpload": multipart.create_multipart_upload,
    "UploadPart": multipart.upload_part,
    "UploadPartCopy": copying.upload_part_copy,
    "CompleteMultipartUpload": multipart_completion.complete_multipart_upload,
    "AbortMultipartUpload": multipart.abort_multipart_upload,
}
