"""The control requests of GCS servers: buckets and tokens. `..control_api` has the others."""

from __future__ import annotations

from ..control_fields import ControlError, Handlers, fields_of
from ..state import State
from .attributes import STORAGE_CLASSES
from .names import is_bucket_name
from .store import Bucket

_NONE = type(None)


def _post_buckets(state: State, given: object) -> object:
    flags = fields_of(
        given,
        name=(str,),
        public=(bool,),
        requester_pays=(bool,),
        versioning=(bool,),
        soft_delete=(bool,),
        storage_class=(str,),
        retention_s=(int, float, _NONE),
        default_event_based_hold=(bool,),
        denied=(list,),
        kms=(str, _NONE),
    )
    name = flags.pop("name", None)
    if not isinstance(name, str) or not is_bucket_name(name):
        raise ControlError(f"name={name!r}: must be a bucket's name")
    if flags.get("storage_class", "STANDARD") not in STORAGE_CLASSES:
        raise ControlError(f"storage_class={flags['storage_class']!r}: must be one of {', '.join(STORAGE_CLASSES)}")
    denied = flags.get("denied", [])
    if not isinstance(denied, list) or not all(isinstance(entry, str) and "." in entry for entry in denied):
        raise ControlError(f"denied={denied!r}: must be a list of permissions")
    bucket = state.gcs.buckets.setdefault(name, Bucket(name, state.clock.now_s()))
    for flag, value in flags.items():
        setattr(bucket, flag, value)
    return _report_bucket(state, bucket)


def _report_bucket(state: State, bucket: Bucket) -> dict[str, object]:
    uploads = [session for session in state.gcs.sessions.values() if session.bucket == bucket.name]
    return {
        "name": bucket.name,
        "public": bucket.public,
        "requester_pays": bucket.requester_pays,
        "versioning": bucket.versioning,
        "soft_delete": bucket.soft_delete,
        "storage_class": bucket.storage_class,
        "retention_s": bucket.retention_s,
        "default_event_based_hold": bucket.default_event_based_hold,
        "denied": bucket.denied,
        "kms": bucket.kms,
        "objects": len(bucket.objects),
        "noncurrent": len(bucket.noncurrent),
        "soft_deleted": len(bucket.soft_deleted),
        "uploads": sum(session.finished is None and not session.cancelled for session in uploads),
    }


def _get_buckets(state: State, given: object) -> object:
    del given
    return [_report_bucket(state, bucket) for bucket in state.gcs.buckets_by_name()]


def _post_tokens(state: State, given: object) -> object:
    fields = fields_of(given, token=(str,), expires_in_s=(int, float, _NONE))
    token, expires_in_s = fields.get("token"), fields.get("expires_in_s")
    if not isinstance(token, str):
        raise ControlError("token is missing")
    expires_s = state.clock.now_s() + expires_in_s if isinstance(expires_in_s, (int, float)) else None
    state.gcs.tokens.add(token, expires_s)
    return {"expires_s": expires_s}


def _delete_tokens(state: State, given: object) -> object:
    token = fields_of(given, token=(str,)).get("token")
    if token is None:
        state.gcs.tokens.reset()
    elif not state.gcs.tokens.revoke(str(token)):
        raise ControlError(f"token={token!r}: no such token")
    return {}


HANDLERS: Handlers = {
    ("POST", "tokens"): _post_tokens,
    ("DELETE", "tokens"): _delete_tokens,
    ("POST", "buckets"): _post_buckets,
    ("GET", "buckets"): _get_buckets,
}
