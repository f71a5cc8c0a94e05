"""Answers that differ from those of S3 and Google Cloud Storage, as of emulators: what is unambiguous is accepted, and an answer
that would be the same again is requested once."""

import json
import re

import pytest

from tests.support.answers import answering
from torchobj import exceptions

ETAG = {"ETag": '"0123"'}
BODY = bytes(range(100))


def ranged(sent, size):
    """The range of a request as start and end; None without one."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", sent.headers.get("range", ""))
    if match is None:
        return None
    first, last = match.groups()
    return (size - int(last), size) if not first else (int(first), min(int(last) + 1, size) if last else size)


def read(store):
    return bytes(store.get("k"))


def read_tail(store):
    return bytes(store.get_range("k", -8))


def stream(store):
    with store.open("k") as file:
        return file.read()


@pytest.mark.parametrize(("content_range", "length"), [("bytes 0--1/0", "0"), ("bytes */0", "0"), ("bytes 0-0/0", "1")])
@pytest.mark.parametrize("operation", [read, read_tail, stream])
def test_a_range_of_an_empty_object_is_empty(operation, content_range, length):
    def answer(sent):
        if "range" not in sent.headers:
            return 200, ETAG, b""
        close = {"Connection": "close"} if length == "1" else {}
        return 206, {**ETAG, "Content-Range": content_range, "Content-Length": length, **close}, b""

    with answering(answer) as server:
        assert operation(server.store("s3")) == b""
        assert len([sent for sent in server.requests if sent.method == "GET"]) <= 2


def test_no_bytes_of_a_range_beyond_an_empty_object_are_not_requested_again():
    with answering(lambda _: (206, {**ETAG, "Content-Range": "bytes 1--1/0", "Content-Length": "0"}, b"")) as server:
        with pytest.raises(exceptions.RangeError):
            server.store("s3").get_range("k", 1, 2)
        assert len(server.requests) == 1


def refused(_):
    return 416, {}, b"<Error><Code>InvalidRange</Code></Error>"


def first_bytes(_):
    return 206, {**ETAG, "Content-Range": "bytes 0-8/100"}, BODY[:9]


def whole(_):
    return 200, ETAG, BODY


@pytest.mark.parametrize("suffix", [refused, first_bytes, whole])
@pytest.mark.parametrize("length", [1, 99, 100, 101, 1000])
def test_a_suffix_is_read_from_servers_without_suffixes(suffix, length):
    def answer(sent):
        if sent.headers.get("range", "").startswith("bytes=-"):
            return suffix(sent)
        wanted = ranged(sent, 100)
        if wanted is None:
            return 200, ETAG, BODY
        return 206, {**ETAG, "Content-Range": f"bytes {wanted[0]}-{wanted[1] - 1}/100"}, BODY[slice(*wanted)]

    with answering(answer) as server:
        assert bytes(server.store("s3").get_range("k", -length)) == BODY[-length:]
        assert len(server.requests) <= 3


@pytest.mark.parametrize("status", [200, 206])
@pytest.mark.parametrize("form", ["bytes {}-{}/100", "bytes={}-{}/100", "Bytes {}-{}/100"])
def test_a_part_is_the_bytes_that_its_content_range_says(form, status):
    def answer(sent):
        start, end = ranged(sent, 100)
        return status, {**ETAG, "Content-Range": form.format(start, end - 1)}, BODY[start:end]

    with answering(answer) as server:
        assert bytes(server.store("s3").get_range("k", 20, 30)) == BODY[20:30]
        assert bytes(server.store("s3").get_range("k", 0, 10)) == BODY[:10]


def test_the_size_of_a_part_without_one_is_that_of_the_head():
    def answer(sent):
        if sent.method == "HEAD":
            return 200, {**ETAG, "Content-Length": "100"}, b""
        start, end = ranged(sent, 100)
        return 206, {**ETAG, "Content-Range": f"bytes {start}-{end - 1}/*"}, BODY[start:end]

    with answering(answer) as server:
        assert bytes(server.store("s3").get_range("k", 20, 30)) == BODY[20:30]


def test_a_range_after_the_end_without_bytes_is_a_range_error():
    with answering(lambda _: (206, {**ETAG, "Content-Range": "bytes 100-99/100"}, b"")) as server:
        with pytest.raises(exceptions.RangeError):
            server.store("s3").get_range("k", 100, 102)
        assert len(server.requests) == 1


def test_etags_without_quotes_are_those_of_the_listing():
    listing = b"<ListBucketResult><Contents><Key>k</Key><Size>100</Size><ETag>0123</ETag></Contents></ListBucketResult>"

    def answer(sent):
        return (200, {}, listing) if "list-type" in sent.path else (200, {"ETag": "0123"}, BODY)

    with answering(answer) as server:
        store = server.store("s3")
        assert bytes(store.get("k", version=next(iter(store.list())).version)) == BODY


@pytest.mark.parametrize("force_sdk", [False, True])
def test_a_folder_of_a_server_of_s3_has_no_version(force_sdk):
    with answering(
        lambda _: (200, {"x-amz-request-id": "R", "Content-Type": "application/x-directory"}, b"")
    ) as server:
        store = server.store("s3", force_sdk=force_sdk)
        info = store.head("folder/")
        assert (info.size, info.version) == (0, None)
        with pytest.raises(exceptions.StoreError, match="no ETag"):
            store.head("k")


RESOURCE = {
    "name": "k",
    "size": 4,
    "generation": 7,
    "timeCreated": "2026-01-02T03:04:05+00:00",
    "storageClass": None,
    "metadata": None,
    # That of b"four".
    "crc32c": "6PM6bg==",
}


@pytest.mark.parametrize("omits_generation", [False, True])
def test_numbers_in_place_of_digits_and_null_are_accepted_of_an_emulator(omits_generation):
    def answer(sent):
        if "alt=media" in sent.path:
            return 200, {} if omits_generation else {"x-goog-generation": "7"}, b"four"
        document = {"items": [RESOURCE], "prefixes": None} if "/o?" in sent.path and sent.method == "GET" else RESOURCE
        return 200, {"Content-Type": "application/json"}, json.dumps(document).encode()

    with answering(answer) as server:
        store = server.store("gs")
        assert [(info.key, info.size, info.version) for info in store.list()] == [("k", 4, "7")]
        assert (store.head("k").size, store.head("k").version) == (4, "7")
        assert bytes(store.get("k")) == b"four"
        assert store.put("k", b"four") == "7"
        assert len(server.requests) <= 7


@pytest.mark.parametrize("version", [None, "7"])
def test_errors_with_status_200_are_no_bytes_of_an_object(version):
    refusal = json.dumps({"error": {"code": 500, "message": "try again"}}).encode()
    bodies = [refusal, refusal, refusal, b"four"]

    def answer(sent):
        if "alt=media" not in sent.path:
            return of_json(RESOURCE)(sent)
        body = bodies.pop(0) if len(bodies) > 1 else bodies[0]
        return 200, {"x-goog-generation": "7"} if body == b"four" else {"Content-Type": "application/json"}, body

    with answering(answer) as server:
        assert bytes(server.store("gs").get("k", version=version)) == b"four"


def xml(text):
    return lambda _: (200, {"Content-Type": "application/xml"}, text.encode())


def of_json(value):
    return lambda _: (200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def list_all(store):
    list(store.list())


def put(store):
    store.put("k", b"four")


def put_parts(store):
    with store.open("k", "wb") as file:
        file.write(bytes(9 << 20))


def head(store):
    store.head("k")


def delete(store):
    store.delete(["a", "b"])


SAME = {
    "a HEAD without a length": ("s3", head, lambda _: (200, {**ETAG, "Content-Length": ""}, b"")),
    "a HEAD with an empty ETag": ("s3", head, lambda _: (200, {"ETag": " "}, b"")),
    "a listing in JSON": ("s3", list_all, of_json({"keys": []})),
    "a listing that is text": ("s3", list_all, lambda _: (200, {"Content-Type": "text/plain"}, b"ok")),
    "a page without a content type": ("s3", list_all, lambda _: (200, {}, b"<!DOCTYPE html><html><br>")),
    "another document": ("s3", list_all, xml("<ListAllMyBucketsResult/>")),
    "no continuation": ("s3", list_all, xml("<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>")),
    "no key": ("s3", list_all, xml("<ListBucketResult><Contents><Size>1</Size></Contents></ListBucketResult>")),
    "no upload id": ("s3", put_parts, xml("<InitiateMultipartUploadResult></InitiateMultipartUploadResult>")),
    "a result of another delete": ("s3", delete, xml("<DeleteResult><Error><Key>z</Key></Error></DeleteResult>")),
    "another result of a delete": ("s3", delete, xml("<ListBucketResult/>")),
    "a denial with status 200": ("s3", delete, xml("<Error><Code>AccessDenied</Code></Error>")),
    "no generation": ("gs", read, lambda s: (200, {}, b"x") if "alt=media" in s.path else of_json({"size": "1"})(s)),
    "no session of an upload": ("gs", put_parts, of_json({})),
    "no size": ("gs", head, of_json({"generation": "7"})),
    "a size that is no number": ("gs", head, of_json({"generation": "7", "size": True})),
    "an array": ("gs", list_all, of_json([])),
    "items of another type": ("gs", list_all, of_json({"items": [1]})),
    "an object without a name": ("gs", list_all, of_json({"items": [{"size": "1"}]})),
    "text in place of JSON": ("gs", list_all, lambda _: (200, {"Content-Type": "text/plain"}, b"ok")),
    "a written object without a generation": ("gs", put, of_json({**RESOURCE, "generation": None})),
    "a written object without a checksum": ("gs", put, of_json({**RESOURCE, "crc32c": None})),
}
_OFTEN = ("a listing in JSON", "no upload id", "no generation", "a written object without a checksum")


@pytest.mark.parametrize(
    "case", [each if each in _OFTEN else pytest.param(each, marks=pytest.mark.matrix) for each in SAME]
)
def test_an_answer_that_will_be_the_same_again_is_not_requested_again(case):
    scheme, operation, answer = SAME[case]
    with answering(answer) as server:
        with pytest.raises(exceptions.StoreError):
            operation(server.store(scheme))
        # A write is followed by a read that shows whether the object was written, or by an abort.
        assert len(server.requests) <= 4, [sent[:2] for sent in server.requests]


@pytest.mark.parametrize("content_range", ["bytes 5-1/100", "", "items 0-4/100"])
def test_the_same_invalid_answer_is_requested_five_times(content_range):
    with answering(lambda _: (206, {**ETAG, "Content-Range": content_range}, b"12345")) as server:
        with pytest.raises(exceptions.StoreError, match="after 5 attempts"):
            server.store("s3").get_range("k", 0, 5)
        assert len(server.requests) == 5


def test_damaged_documents_are_requested_again():
    listing = b"<ListBucketResult><Contents><Key>k</Key></Contents></ListBucketResult>"
    answers = [b"<ListBucketResult><Contents>", listing[:-9], listing]
    with answering(lambda _: (200, {"Content-Type": "application/xml"}, answers.pop(0))) as server:
        assert [info.key for info in server.store("s3").list()] == ["k"]
        assert len(server.requests) == 3
    # Whatever content type the server sends.
    answers = [b'<?xml version="1.0"?><ListBucketRe', b"", b"<?xml version='1.0'?>" + listing]
    with answering(lambda _: (200, {"Content-Type": "text/plain"}, answers.pop(0))) as server:
        assert [info.key for info in server.store("s3").list()] == ["k"]
        assert len(server.requests) == 3
    answers = [b'{"items": [{"na', b'{"items": [{"name": "k"}]}']
    with answering(lambda _: (200, {"Content-Type": "text/plain"}, answers.pop(0))) as server:
        assert [info.key for info in server.store("gs").list()] == ["k"]
        assert len(server.requests) == 2
    answers = [b'{"items": [{"na', b'{"error": {"code": 500, "message": "try again"}}', b'{"items": [{"name": "k"}]}']
    with answering(lambda _: (200, {"Content-Type": "application/json"}, answers.pop(0))) as server:
        assert [info.key for info in server.store("gs").list()] == ["k"]
        assert len(server.requests) == 3


def test_a_listing_of_the_sdk_that_is_a_page_is_an_error_at_once():
    with answering(lambda _: (200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>log in</html>")) as server:
        with pytest.raises(exceptions.StoreError, match="text/html; charset=utf-8: another server has answered"):
            list_all(server.store("s3", force_sdk=True))
        assert len(server.requests) == 1


def test_a_commit_without_an_etag_is_one_if_the_object_is_there():
    nonce = ""

    def answer(sent):
        nonlocal nonce
        if "uploads" in sent.path:
            nonce = sent.headers["x-amz-meta-torchobj-upload"]
            return xml("<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")(sent)
        if sent.method == "HEAD":
            return 200, {**ETAG, "x-amz-meta-torchobj-upload": nonce}, b""
        return xml("<CompleteMultipartUploadResult/>")(sent) if sent.method == "POST" else (200, ETAG, b"")

    with answering(answer) as server:
        put_parts(server.store("s3"))
        assert [sent.method for sent in server.requests].count("HEAD") == 1


def test_a_listing_of_uploads_that_has_no_such_upload_is_empty():
    with answering(lambda _: (404, {}, b"<Error><Code>NoSuchUpload</Code></Error>")) as server:
        assert list(server.store("s3").unfinished_uploads()) == []


def test_a_listing_in_another_order_is_a_fault_of_the_server():
    keys = "".join(f"<Contents><Key>{key}</Key></Contents>" for key in ("b", "a"))
    with answering(xml(f"<ListBucketResult>{keys}</ListBucketResult>")) as server:
        with pytest.raises(exceptions.StoreError, match='has "a" after "b".*this is a fault of the server') as caught:
            list_all(server.store("s3"))
        assert "proxy" not in str(caught.value) and len(server.requests) == 1
