"""The control requests of S3 servers: buckets and accounts. `control_api` has the others."""

from __future__ import annotations

from .accounts import Account
from .control_fields import ControlError, Handlers, fields_of
from .state import State
from .store import Bucket, Elsewhere
from .target import is_bucket_name


def _post_accounts(state: State, given: object) -> object:
    none = type(None)
    account = fields_of(given, access_key=(str,), secret_key=(str,), token=(str, none), expires_in_s=(int, float, none))
    access_key, secret_key, token = account.get("access_key"), account.get("secret_key"), account.get("token")
    expires_in_s = account.get("expires_in_s")
    if not isinstance(access_key, str) or not isinstance(secret_key, str):
        raise ControlError("access_key and secret_key are needed")
    expires_s = state.clock.now_s() + expires_in_s if isinstance(expires_in_s, (int, float)) else None
    state.accounts.add(Account(access_key, secret_key, token if isinstance(token, str) else None, expires_s))
    return {"expires_s": expires_s}


def _delete_accounts(state: State, given: object) -> object:
    del given
    state.accounts.reset()
    return {}


def _post_buckets(state: State, given: object) -> object:
    flags = fields_of(
        given,
        name=(str,),
        region=(str,),
        public=(bool,),
        requester_pays=(bool,),
        requires_sse_kms=(bool,),
        ignores_conditions=(bool,),
        refuses_if_match=(bool,),
        no_bulk_delete=(bool,),
        needs_content_md5=(bool,),
        lists_uploads_of_keys=(bool,),
        elsewhere=(dict, type(None)),
    )
    name = flags.pop("name", None)
    if not isinstance(name, str) or not is_bucket_name(name):
        raise ControlError(f"name={name!r}: must be a bucket's name")
    if isinstance(flags.get("elsewhere"), dict):
        location = fields_of(flags["elsewhere"], region=(str,), endpoint=(str,))
        if len(location) != 2:
            raise ControlError("elsewhere needs region and endpoint")
        flags["elsewhere"] = Elsewhere(str(location["region"]), str(location["endpoint"]))
    bucket = state.buckets.setdefault(name, Bucket(name, state.clock.now_s()))
    for flag, value in flags.items():
        setattr(bucket, flag, value)
    return _report_bucket(bucket)


def _report_bucket(bucket: Bucket) -> dict[str, object]:
    elsewhere = bucket.elsewhere
    return {
        "name": bucket.name,
        "region": bucket.region,
        "public": bucket.public,
        "requester_pays": bucket.requester_pays,
        "requires_sse_kms": bucket.requires_sse_kms,
        "ignores_conditions": bucket.ignores_conditions,
        "refuses_if_match": bucket.refuses_if_match,
        "no_bulk_delete": bucket.no_bulk_delete,
        "needs_content_md5": bucket.needs_content_md5,
        "lists_uploads_of_keys": bucket.lists_uploads_of_keys,
        "elsewhere": {"region": elsewhere.region, "endpoint": elsewhere.endpoint} if elsewhere else None,
        "objects": len(bucket.objects),
        "uploads": len(bucket.uploads),
    }


def _get_buckets(state: State, given: object) -> object:
    del given
    return [_report_bucket(bucket) for bucket in state.buckets_by_name()]


HANDLERS: Handlers = {
    ("POST", "accounts"): _post_accounts,
    ("DELETE", "accounts"): _delete_accounts,
    ("POST", "buckets"): _post_buckets,
    ("GET", "buckets"): _get_buckets,
}
