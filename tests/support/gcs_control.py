"""A control client of the strict GCS server that has S3's names of operations, so that tests serve both providers."""

import dataclasses
from collections.abc import Sequence

from tests.strict.control import Control, FaultRule, LoggedRequest
from tests.support.buckets import PARTS

_GCS_NAMES = {
    "GetObject": "GetMedia",
    "HeadObject": "GetObject",
    "PutObject": "InsertObject",
    "UploadPart": "InsertObject",
    # Parts need no upload that is created first.
    "CreateMultipartUpload": "InsertObject",
    "CompleteMultipartUpload": "ComposeObject",
    "CopyObject": "RewriteObject",
    "ListObjectsV2": "ListObjects",
    "DeleteObject": "DeleteObject",
    "DeleteObjects": "DeleteObject",
    "ListBuckets": "ListBuckets",
}
_S3_NAMES = {
    "GetMedia": "GetObject",
    "GetObject": "HeadObject",
    "ComposeObject": "CompleteMultipartUpload",
    "RewriteObject": "CopyObject",
    "ListObjects": "ListObjectsV2",
}


def _s3_name(request: LoggedRequest) -> str | None:
    if request.operation == "InsertObject":
        return "UploadPart" if (request.key or "").startswith(PARTS) else "PutObject"
    return _S3_NAMES.get(request.operation or "", request.operation)


def _gcs_rule(rule: FaultRule) -> FaultRule:
    name = rule.get("operation")
    if name is None:
        return rule
    changed = FaultRule(**rule)
    changed["operation"] = _GCS_NAMES[name]
    if "key" not in rule and changed["operation"] == "InsertObject":
        parts = PARTS.replace(".", r"\.")
        changed["key"] = f"^(?!{parts})" if name == "PutObject" else f"^{parts}"
    return changed


class S3NamedControl(Control):
    """Translates the names of operations in faults and in the log."""

    def faults(self, *rules: FaultRule) -> None:
        super().faults(*map(_gcs_rule, rules))

    def requests(self, operation: str | None = None) -> Sequence[LoggedRequest]:
        logged = [dataclasses.replace(request, operation=_s3_name(request)) for request in super().requests()]
        return [request for request in logged if operation in (None, request.operation)]
