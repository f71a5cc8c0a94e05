"""Refusals that are no permission problem: their exception, and the next step."""

import json

import pytest

from tests.support.answers import answering
from torchobj import S3Options, Store, StoreConfig, exceptions

ARCHIVED = (
    "<Error><Code>InvalidObjectState</Code><Message>The operation is not valid for the object's storage class</Message>"
    "<StorageClass>{}</StorageClass>{}<RequestId>R</RequestId></Error>"
)


def document(code, message="text of the server"):
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"


def refusing(status, body, headers=None):
    return answering(lambda _: (status, headers or {}, body.encode()))


@pytest.mark.parametrize("force_sdk", [False, True])
def test_an_archived_object_is_named_so_with_its_class_and_how_to_restore_it(force_sdk):
    with refusing(403, ARCHIVED.format("DEEP_ARCHIVE", "")) as server:
        with pytest.raises(exceptions.StoreError) as caught:
            server.store("s3", force_sdk=force_sdk).get("k")
        assert len(server.requests) == 1
    words = str(caught.value)
    assert not isinstance(caught.value, PermissionError)
    assert (caught.value.status, caught.value.code) == (403, "InvalidObjectState")
    assert "the object is archived in DEEP_ARCHIVE" in words and "aws s3api restore-object" in words
    assert "Days=7" in words and "ListBucket" not in words and "the endpoint is" not in words


def test_an_archived_object_of_the_strict_server_is_not_denied(bucket):
    store = Store(bucket.url, config=bucket.config)
    store.put("k", b"cold", storage_class="GLACIER")
    with pytest.raises(exceptions.StoreError, match="the object is archived in GLACIER: restore it") as caught:
        store.get("k")
    assert not isinstance(caught.value, PermissionError)


def test_the_tier_of_an_intelligently_archived_object_is_named():
    with refusing(403, ARCHIVED.format("INTELLIGENT_TIERING", "<AccessTier>ARCHIVE_ACCESS</AccessTier>")) as server:
        with pytest.raises(exceptions.StoreError, match="INTELLIGENT_TIERING, ARCHIVE_ACCESS: restore it.*'{}'"):
            server.store("s3").get("k")


ACCOUNT = "the account of the bucket or of the requests"
KEY = "the KMS key .* cannot be used: check .* that it exists, is enabled"
#: Status, code, exception, words, and whether it is a permission problem.
REFUSALS = [
    (403, "AccountProblem", exceptions.StoreError, ACCOUNT, False),
    (403, "AllAccessDisabled", exceptions.StoreError, ACCOUNT, False),
    (403, "InvalidPayer", exceptions.StoreError, ACCOUNT, False),
    (403, "NotSignedUp", exceptions.StoreError, ACCOUNT, False),
    (400, "KMS.DisabledException", exceptions.StoreError, KEY, False),
    (400, "KMS.NotFoundException", exceptions.StoreError, KEY, False),
    (400, "KMS.KMSInvalidStateException", exceptions.StoreError, KEY, False),
    (400, "KMS.AccessDeniedException", exceptions.AccessDeniedError, "kms:Decrypt", True),
    (400, "InvalidToken", exceptions.CredentialsError, "AWS_SESSION_TOKEN.*issued with this access key", True),
    (403, "InvalidToken", exceptions.CredentialsError, "AWS_SESSION_TOKEN.*issued with this access key", True),
    (403, "SignatureDoesNotMatch", exceptions.CredentialsError, "check the secret access key", True),
    (403, "AccessDenied", exceptions.AccessDeniedError, r"s3:ListBucket.*requester_pays=True", True),
    (405, "MethodNotAllowed", exceptions.UnsupportedError, "MethodNotAllowed", False),
]


@pytest.mark.parametrize(
    ("status", "code", "exception", "words", "is_permission"),
    [
        each if each[1] in ("AccountProblem", "InvalidToken") else pytest.param(*each, marks=pytest.mark.matrix)
        for each in REFUSALS
    ],
)
def test_a_refusal_has_its_exception_and_the_next_step(status, code, exception, words, is_permission):
    with refusing(status, document(code)) as server:
        with pytest.raises(exception, match=words) as caught:
            server.store("s3").get("k")
        assert (caught.value.code, isinstance(caught.value, PermissionError)) == (code, is_permission)
        assert len(server.requests) == 1


def test_a_denial_that_names_the_permission_has_no_other_advice():
    message = "User: arn:aws:iam::1:user/u is not authorized to perform: kms:Decrypt on resource: arn:aws:kms:key"
    with refusing(403, document("AccessDenied", message)) as server:
        with pytest.raises(exceptions.AccessDeniedError, match="kms:Decrypt") as caught:
            server.store("s3").get("k")
    assert "ListBucket" not in str(caught.value) and "requester_pays" not in str(caught.value)


def test_the_advice_does_not_name_settings_that_are_set():
    with refusing(403, document("AccessDenied")) as server:
        keys = {"access_key_id": "id", "secret_access_key": "secret"}
        s3 = S3Options(endpoint_url=server.url, region="us-east-1", requester_pays=True, **keys)
        with pytest.raises(exceptions.AccessDeniedError) as caught:
            Store("s3://bucket", config=StoreConfig(s3=s3)).get("k")
    assert "requester_pays" not in str(caught.value)
    with refusing(501, document("NotImplemented")) as server:
        s3 = S3Options(endpoint_url=server.url, anonymous=True, region="us-east-1", checksum="none")
        with pytest.raises(exceptions.UnsupportedError) as caught:
            Store("s3://bucket", config=StoreConfig(s3=s3)).put("k", b"")
    assert "checksum" not in str(caught.value)


@pytest.mark.parametrize("body", ["", document("NotImplemented")])
@pytest.mark.parametrize("force_sdk", [False, True])
def test_a_read_that_is_answered_by_501_suggests_to_send_no_checksum_headers(force_sdk, body):
    with refusing(501, body) as server:
        store = server.store("s3", force_sdk=force_sdk)
        for read in (store.head, store.get):
            with pytest.raises(exceptions.UnsupportedError, match='checksum="none"'):
                read("k")
        assert len(server.requests) == 2


def test_a_head_that_is_refused_without_a_reason_names_what_to_check():
    with refusing(400, "") as server:
        with pytest.raises(exceptions.StoreError, match="check the session token.*torchobj doctor"):
            server.store("s3").head("k")


@pytest.mark.parametrize("status", [404, 405])
def test_a_delete_marker_is_an_object_that_does_not_exist(status):
    with refusing(status, "", {"x-amz-delete-marker": "true"}) as server:
        for read in (server.store("s3").get, server.store("s3").head):
            with pytest.raises(exceptions.ObjectNotFoundError, match="by a delete marker: earlier versions"):
                read("k")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("retentionPolicyNotMet", "when its retention period or hold ends"),
        pytest.param("objectUnderActiveHold", "when its retention period or hold ends", marks=pytest.mark.matrix),
        ("accountDisabled", "the billing account"),
        pytest.param("UserProjectAccountProblem", "the billing account", marks=pytest.mark.matrix),
        pytest.param("quotaExceeded", "a quota of the project", marks=pytest.mark.matrix),
    ],
)
def test_a_refusal_of_cloud_storage_that_is_no_permission_problem(reason, words):
    body = json.dumps({"error": {"code": 403, "message": "text", "errors": [{"reason": reason}]}})
    with refusing(403, body) as server:
        with pytest.raises(exceptions.StoreError, match=words) as caught:
            server.store("gs").delete("k")
        assert not isinstance(caught.value, PermissionError) and "the endpoint is" not in str(caught.value)


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidRequest", "KMS.DisabledException"])
def test_an_error_with_status_200_is_retried_only_if_it_may_pass(code):
    with refusing(200, document(code), {"Content-Type": "application/xml"}) as server:
        with pytest.raises(exceptions.StoreError, match=code):
            list(server.store("s3").list())
        assert len(server.requests) == 1
