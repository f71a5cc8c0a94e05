"""Tests what the GCS mode refuses: paths, parameters, names, tokens, permissions, retention and holds."""

from __future__ import annotations

import json

import pytest

from tests.servers import launch
from tests.servers.raw_client import RawConnection, gcs_request_bytes
from tests.strict.control import BucketFlags, Control, ControlRefused
from tests.strict.tests.answers import gcs_exchange, gcs_put, reason_of

pytestmark = [pytest.mark.timeout(60), pytest.mark.matrix]

OBJECTS = "/storage/v1/b/bucket/o"


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("GET", "/storage/v1/b/bucket/o/a/b", (404, "notFound")),
        ("GET", "/storage/v1/b/bucket/o/", (404, "notFound")),
        ("GET", "/bucket/name", (404, "notFound")),
        ("POST", "/storage/v1/b/bucket", (405, "methodNotAllowed")),
        ("GET", f"{OBJECTS}?max-keys=1", (400, "invalid")),
        ("GET", f"{OBJECTS}?prefix=a&prefix=b", (400, "invalid")),
        ("GET", f"{OBJECTS}?maxResults=many", (400, "invalid")),
        ("GET", f"{OBJECTS}?maxResults=0", (400, "invalid")),
        ("GET", f"{OBJECTS}?pageToken=bmFtZQ==", (400, "invalid")),
        ("GET", f"{OBJECTS}?versions=yes", (400, "invalid")),
        ("GET", f"{OBJECTS}?alt=media", (400, "invalid")),
        ("GET", f"{OBJECTS}?fields=items(name", (400, "invalid")),
        ("GET", f"{OBJECTS}?fields=items(nam)", (400, "invalid")),
        ("GET", f"{OBJECTS}?fields=name", (400, "invalid")),
        ("GET", f"{OBJECTS}/name?alt=xml", (400, "invalid")),
        ("GET", f"{OBJECTS}/name?ifGenerationMatch=-1", (400, "invalid")),
        ("GET", f"{OBJECTS}/name?ifGenerationMatch=9223372036854775808", (400, "invalid")),
        ("GET", f"{OBJECTS}/%FF", (400, "invalid")),
        ("GET", "/storage/v1/b/missing/o", (404, "notFound")),
        ("POST", "/upload/storage/v1/b/bucket/o?name=a", (400, "invalid")),
        ("GET", "/storage/v1/b/bucket/iam/testPermissions", (400, "required")),
    ],
)
def test_a_path_or_parameter_that_gcs_does_not_have_is_refused(
    gcs_server: launch.Server, gcs_control: Control, method: str, target: str, expected: tuple[int, str]
) -> None:
    del gcs_control
    assert reason_of(gcs_exchange(gcs_server, method, target)) == expected


@pytest.mark.parametrize(
    "name", [".", "..", "a%0Ab", "a%0Db", ".well-known%2Facme-challenge%2Fx", "n" * 1025, "%C3%A9" * 512 + "n"]
)
def test_a_name_that_no_object_may_have_is_refused(gcs_server: launch.Server, gcs_control: Control, name: str) -> None:
    del gcs_control
    target = f"/upload/storage/v1/b/bucket/o?uploadType=media&name={name}"
    assert reason_of(gcs_exchange(gcs_server, "POST", target, body=b"x")) == (400, "invalid")
    assert reason_of(gcs_exchange(gcs_server, "GET", f"{OBJECTS}/{name}")) == (400, "invalid")


def test_fields_select_nested_fields(gcs_server: launch.Server, gcs_control: Control) -> None:
    del gcs_control
    gcs_put(gcs_server, "a%2Fb")
    gcs_put(gcs_server, "c")
    for fields, expected in [
        ("items(name,size),prefixes", {"items": [{"name": "c", "size": "7"}], "prefixes": ["a/"]}),
        ("items/name", {"items": [{"name": "c"}]}),
        ("nextPageToken", {}),
    ]:
        answer = gcs_exchange(gcs_server, "GET", f"{OBJECTS}?delimiter=/&fields={fields}")
        assert json.loads(answer.body) == expected


def test_every_answer_has_an_upload_id(gcs_server: launch.Server, gcs_control: Control) -> None:
    for target in (OBJECTS, f"{OBJECTS}/missing", "/nothing"):
        answer = gcs_exchange(gcs_server, "GET", target)
        assert answer.headers["x-guploader-uploadid"] == gcs_control.requests()[-1].request_id


def test_a_token_can_be_unknown_expired_or_revoked(gcs_server: launch.Server, gcs_control: Control) -> None:
    gcs_control.token("temporary", expires_in_s=100)
    gcs_control.token("permanent")
    assert [gcs_exchange(gcs_server, "GET", OBJECTS, token=t).status for t in ("temporary", "permanent")] == [200, 200]
    gcs_control.clock(100)
    gcs_control.revoke_token("permanent")
    for token in ("temporary", "permanent", "unknown"):
        answer = gcs_exchange(gcs_server, "GET", OBJECTS, token=token)
        assert reason_of(answer) == (401, "authError")
        assert answer.headers["www-authenticate"].startswith("Bearer ")
        assert json.loads(answer.body)["error"]["message"] == "Invalid Credentials"
    assert "authorization" not in gcs_control.requests()[-1].headers
    with pytest.raises(ControlRefused):
        gcs_control.revoke_token("permanent")
    assert gcs_server.token is not None
    gcs_control.revoke_token(gcs_server.token)
    assert gcs_exchange(gcs_server, "GET", OBJECTS).status == 401
    gcs_control.clear_tokens()
    assert gcs_exchange(gcs_server, "GET", OBJECTS).status == 200


def test_only_public_buckets_are_read_without_a_token(gcs_server: launch.Server, gcs_control: Control) -> None:
    gcs_put(gcs_server, "name")
    reads = (OBJECTS, f"{OBJECTS}/name", f"{OBJECTS}/name?alt=media")
    for target in reads:
        assert reason_of(gcs_exchange(gcs_server, "GET", target, token="")) == (401, "required")
    gcs_control.bucket("bucket", {"public": True})
    assert [gcs_exchange(gcs_server, "GET", target, token="").status for target in reads] == [200, 200, 200]
    assert gcs_exchange(gcs_server, "DELETE", f"{OBJECTS}/name", token="").status == 401
    assert gcs_exchange(gcs_server, "GET", "/storage/v1/b/bucket", token="").status == 401


def test_a_requester_pays_bucket_needs_a_project(gcs_server: launch.Server, gcs_control: Control) -> None:
    gcs_control.bucket("bucket", {"requester_pays": True})
    refused = gcs_exchange(gcs_server, "GET", OBJECTS)
    assert reason_of(refused) == (400, "required")
    message = "Bucket is a requester pays bucket but no user project provided."
    assert json.loads(refused.body)["error"]["message"] == message
    assert gcs_exchange(gcs_server, "GET", f"{OBJECTS}?userProject=mine").status == 200
    assert gcs_exchange(gcs_server, "GET", OBJECTS, headers={"X-Goog-User-Project": "mine"}).status == 200


def test_denied_permissions_are_needed_for_what_they_permit(gcs_server: launch.Server, gcs_control: Control) -> None:
    gcs_put(gcs_server, "name")
    forbidden = (403, "forbidden")
    gcs_control.bucket("bucket", {"denied": ["storage.objects.delete", "storage.buckets.get", "storage.objects.list"]})
    assert reason_of(gcs_exchange(gcs_server, "DELETE", f"{OBJECTS}/name")) == forbidden
    assert reason_of(gcs_exchange(gcs_server, "GET", "/storage/v1/b/bucket")) == forbidden
    assert reason_of(gcs_exchange(gcs_server, "GET", OBJECTS)) == forbidden
    gcs_put(gcs_server, "new")
    # To overwrite is to delete.
    overwrite = "/upload/storage/v1/b/bucket/o?uploadType=media&name=name"
    assert reason_of(gcs_exchange(gcs_server, "POST", overwrite, body=b"x")) == forbidden
    assert gcs_exchange(gcs_server, "GET", f"{OBJECTS}/name?alt=media").body == b"content"


def test_retention_and_holds_protect_objects(gcs_server: launch.Server, gcs_control: Control) -> None:
    overwrite = "/upload/storage/v1/b/bucket/o?uploadType=media&name=name"
    retained: BucketFlags = {"retention_s": 60}
    gcs_control.bucket("bucket", retained)
    assert "retentionExpirationTime" in gcs_put(gcs_server, "name")
    for method, target in (("DELETE", f"{OBJECTS}/name"), ("POST", overwrite)):
        assert reason_of(gcs_exchange(gcs_server, method, target)) == (403, "retentionPolicyNotMet")
    gcs_control.clock(60)
    gcs_control.bucket("bucket", {"default_event_based_hold": True})
    assert gcs_put(gcs_server, "name")["eventBasedHold"] is True
    gcs_control.bucket("bucket", {"retention_s": None})
    assert reason_of(gcs_exchange(gcs_server, "DELETE", f"{OBJECTS}/name")) == (403, "objectUnderActiveHold")
    patch = gcs_exchange(gcs_server, "PATCH", f"{OBJECTS}/name", resource={"eventBasedHold": False})
    assert patch.status == 200
    assert gcs_exchange(gcs_server, "DELETE", f"{OBJECTS}/name").status == 204


def test_a_bucket_with_a_kms_key_encrypts_and_may_deny_the_key(gcs_server: launch.Server, gcs_control: Control) -> None:
    key = "projects/p/locations/us/keyRings/r/cryptoKeys/k"
    gcs_control.bucket("bucket", {"kms": key})
    assert gcs_put(gcs_server, "name")["kmsKeyName"] == f"{key}/cryptoKeyVersions/1"
    other = gcs_put(gcs_server, "other", query=f"&kmsKeyName={key}2")
    assert other["kmsKeyName"] == f"{key}2/cryptoKeyVersions/1"
    use = "cloudkms.cryptoKeyVersions.useTo"
    gcs_control.bucket("bucket", {"denied": [f"{use}Encrypt", f"{use}Decrypt"]})
    write = "/upload/storage/v1/b/bucket/o?uploadType=media&name=new"
    assert reason_of(gcs_exchange(gcs_server, "POST", write)) == (403, "forbidden")
    assert reason_of(gcs_exchange(gcs_server, "GET", f"{OBJECTS}/name?alt=media")) == (403, "forbidden")
    assert gcs_exchange(gcs_server, "GET", f"{OBJECTS}/name").status == 200


def test_customer_supplied_keys_and_missing_lengths_are_refused(
    gcs_server: launch.Server, gcs_control: Control
) -> None:
    del gcs_control
    headers = {"x-goog-encryption-algorithm": "AES256"}
    assert reason_of(gcs_exchange(gcs_server, "GET", OBJECTS, headers=headers)) == (501, "notImplemented")
    content = gcs_request_bytes(gcs_server, "POST", "/upload/storage/v1/b/bucket/o?uploadType=media&name=a")
    with RawConnection(gcs_server) as connection:
        answer = connection.exchange(content.replace(b"Content-Length: 0\r\n", b""))
    assert (answer.status, answer.headers["connection"]) == (411, "close")


def test_the_metadata_server_issues_tokens_that_expire(gcs_server: launch.Server, gcs_control: Control) -> None:
    gcs_control.limits(token_lifetime_s=50)
    target = "/computeMetadata/v1/instance/service-accounts/default/token"
    assert reason_of(gcs_exchange(gcs_server, "GET", target, token="")) == (403, "forbidden")
    answer = gcs_exchange(gcs_server, "GET", target, token="", headers={"Metadata-Flavor": "Google"})
    issued = json.loads(answer.body)
    assert (issued["expires_in"], issued["token_type"]) == (50, "Bearer")
    assert answer.headers["metadata-flavor"] == "Google"
    token = issued["access_token"]
    assert gcs_exchange(gcs_server, "GET", OBJECTS, token=token).status == 200
    gcs_control.clock(50)
    assert gcs_exchange(gcs_server, "GET", OBJECTS, token=token).status == 401
    gcs_control.faults({"operation": "Token", "action": {"status": 503}})
    assert gcs_exchange(gcs_server, "GET", target, headers={"Metadata-Flavor": "Google"}).status == 503


@pytest.mark.parametrize(
    "flags", [{"region": "us-east-1"}, {"denied": ["everything"]}, {"storage_class": "GLACIER"}, {"kms": 1}]
)
def test_a_flag_that_gcs_does_not_have_is_refused(gcs_control: Control, flags: BucketFlags) -> None:
    with pytest.raises(ControlRefused):
        gcs_control.bucket("bucket", flags)
