"""Tests that the strict server verifies signatures, including AWS's published examples."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.servers import launch
from tests.servers.boto_client import boto_client, refusal
from tests.servers.raw_client import RawConnection, request_bytes
from tests.strict.accounts import Account, Accounts
from tests.strict.control import BucketFlags, Control
from tests.strict.errors import S3Error
from tests.strict.signature import verify_head
from tests.strict.tests.answers import code_in
from tests.strict.wire import Headers, RequestHead

pytestmark = pytest.mark.timeout(60)

# The published examples of the S3 API reference, "Signature Calculations for the Authorization Header".
EXAMPLE_KEYS = ("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
EXAMPLE_MOMENT = datetime(2013, 5, 24, tzinfo=UTC)


def test_a_wrong_secret_an_unknown_key_and_no_signature_are_refused(server: launch.Server, s3: Any) -> None:
    del s3
    named = {"Bucket": "bucket", "Key": "key"}
    wrong = boto_client(server, aws_secret_access_key="wrong")
    assert refusal(wrong.put_object, **named) == (403, "SignatureDoesNotMatch")
    unknown = boto_client(server, aws_access_key_id="AKIAUNKNOWN")
    assert refusal(unknown.put_object, **named) == (403, "InvalidAccessKeyId")
    with RawConnection(server) as connection:
        answer = connection.exchange(request_bytes(server, "GET", "/bucket/key", signed=False))
    assert (answer.status, code_in(answer.body)) == (403, "AccessDenied")
    assert f"<RequestId>{answer.headers['x-amz-request-id']}</RequestId>".encode() in answer.body


@pytest.mark.parametrize(
    ("signed", "sent", "refused"),
    [
        ("/bucket/key", "/bucket/other", "SignatureDoesNotMatch"),
        ("GET /", "HEAD /", ""),
        ("x-amz-meta-a: b", "x-amz-meta-a: c", "SignatureDoesNotMatch"),
        ("x-amz-meta-a: b", "x-amz-meta-a: b\r\nx-amz-meta-c: d", "AccessDenied"),
        ("Host: 127", "Host: x127", "SignatureDoesNotMatch"),
        ("/s3/aws4_request", "/ec2/aws4_request", "AuthorizationHeaderMalformed"),
        ("SignedHeaders=host;", "SignedHeaders=", "AccessDenied"),
        ("AWS4-HMAC-SHA256 C", "AWS2-HMAC-SHA256 C", "InvalidRequest"),
    ],
)
def test_a_modified_head_is_refused(
    server: launch.Server, control: Control, signed: str, sent: str, refused: str
) -> None:
    del control
    content = request_bytes(server, "GET", "/bucket/key", headers={"x-amz-meta-a": "b"})
    assert signed.encode() in content
    with RawConnection(server) as connection:
        answer = connection.exchange(content.replace(signed.encode(), sent.encode(), 1))
    assert answer.status in (400, 403)
    assert code_in(answer.body) == refused


def test_temporary_credentials_need_their_token_until_they_expire(server: launch.Server, control: Control) -> None:
    control.account("ASIATEMPORARY", "temporary secret", token="to/ken+=", expires_in_s=600)
    keys = {"aws_access_key_id": "ASIATEMPORARY", "aws_secret_access_key": "temporary secret"}
    temporary = boto_client(server, **keys, aws_session_token="to/ken+=")
    temporary.put_object(Bucket="bucket", Key="key")
    for token in (None, "other"):
        other = boto_client(server, **keys, aws_session_token=token)
        assert refusal(other.get_object, Bucket="bucket", Key="key") == (403, "InvalidToken")
    control.clock(offset_s=601)
    assert refusal(temporary.get_object, Bucket="bucket", Key="key") == (400, "ExpiredToken")


def test_a_clock_skew_of_more_than_15_minutes_is_refused(s3: Any, control: Control) -> None:
    for offset_s in (-890.0, 890.0):
        control.clock(offset_s)
        s3.put_object(Bucket="bucket", Key="key")
    for offset_s in (-910.0, 910.0):
        control.clock(offset_s)
        assert refusal(s3.put_object, Bucket="bucket", Key="key") == (403, "RequestTimeTooSkewed")


EMPTY_SHA256 = hashlib.sha256().hexdigest()
ON_BUCKET = "host:examplebucket.s3.amazonaws.com"
CHUNKED = (
    "PUT /examplebucket/chunkObject.txt",
    "host:s3.amazonaws.com",
    "content-encoding:aws-chunked",
    "x-amz-decoded-content-length:66560",
    "x-amz-storage-class:REDUCED_REDUNDANCY",
)
# name: (request line's first words and the headers but x-amz-date, the signature)
EXAMPLES = {
    "GetObject": (
        ["GET /test.txt", ON_BUCKET, "range:bytes=0-9", f"x-amz-content-sha256:{EMPTY_SHA256}"],
        "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    ),
    "PutObject": (
        [
            "PUT /test%24file.text",
            "date:Fri, 24 May 2013 00:00:00 GMT",
            ON_BUCKET,
            "x-amz-storage-class:REDUCED_REDUNDANCY",
            f"x-amz-content-sha256:{hashlib.sha256(b'Welcome to Amazon S3.').hexdigest()}",
        ],
        "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
    ),
    "ListObjects": (
        ["GET /?max-keys=2&prefix=J", ON_BUCKET, f"x-amz-content-sha256:{EMPTY_SHA256}"],
        "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
    ),
    "chunks": (
        [*CHUNKED, "content-length:66824", "x-amz-content-sha256:STREAMING-AWS4-HMAC-SHA256-PAYLOAD"],
        "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9",
    ),
    "chunks and trailer": (
        [
            *CHUNKED,
            "x-amz-content-sha256:STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
            "x-amz-trailer:x-amz-checksum-crc32c",
        ],
        "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e",
    ),
}
EXAMPLE_CHUNKS = {
    "chunks": [
        "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
        "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
        "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
    ],
    "chunks and trailer": [
        "b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
        "1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
        "2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
    ],
}
EXAMPLE_TRAILER = (
    "x-amz-checksum-crc32c:sOO8/Q==\r\n"
    "x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n"
)


def example_head(name: str) -> tuple[str, list[tuple[str, str]]]:
    """Returns the request line's first two words and the headers of a published example, all of them signed."""
    described, signature = EXAMPLES[name]
    line, *headers = [*described, "x-amz-date:20130524T000000Z"]
    items = [(header, value) for header, _, value in (text.partition(":") for text in headers)]
    signed = ";".join(sorted(header for header, _ in items))
    scope = f"{EXAMPLE_KEYS[0]}/20130524/us-east-1/s3/aws4_request"
    authorization = f"AWS4-HMAC-SHA256 Credential={scope},SignedHeaders={signed},Signature={signature}"
    return line, [*items, ("authorization", authorization)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_published_example_is_verified_and_a_modified_one_is_refused(name: str) -> None:
    line, items = example_head(name)
    method, target = line.split()
    accounts = Accounts()
    accounts.add(Account(*EXAMPLE_KEYS))
    identity = verify_head(RequestHead(method, target, Headers(items)), accounts, EXAMPLE_MOMENT.timestamp())
    assert identity is not None and identity.account.access_key == EXAMPLE_KEYS[0]
    with pytest.raises(S3Error, match="does not match"):
        verify_head(RequestHead(method, target + "x", Headers(items)), accounts, EXAMPLE_MOMENT.timestamp())


@pytest.mark.parametrize(
    ("name", "altered"),
    [
        *((name, altered) for name in EXAMPLE_CHUNKS for altered in ("nothing", "a byte", "a signature")),
        ("chunks and trailer", "the trailer"),
    ],
)
def test_published_chunks_are_verified_and_modified_ones_are_refused(
    server: launch.Server, control: Control, name: str, altered: str
) -> None:
    control.account(*EXAMPLE_KEYS)
    control.clock((EXAMPLE_MOMENT - datetime.now(UTC)).total_seconds())
    control.bucket("examplebucket", BucketFlags(public=True))
    line, items = example_head(name)
    chunks = [b"a" * 65536, b"a" * 1024, b""]
    framed = (
        b"%x;chunk-signature=%s\r\n%s" % (len(chunk), signature.encode(), chunk and chunk + b"\r\n")
        for chunk, signature in zip(chunks, EXAMPLE_CHUNKS[name], strict=True)
    )
    trailer = EXAMPLE_TRAILER.encode() if "trailer" in name else b""
    body = b"".join(framed) + trailer + b"\r\n"
    if altered == "a byte":
        body = body.replace(b"aaaaa", b"aabaa", 1)
    if altered == "a signature":
        body = body.replace(EXAMPLE_CHUNKS[name][2].encode(), EXAMPLE_CHUNKS[name][1].encode())
    if altered == "the trailer":
        body = body.replace(b"sOO8", b"sOO9")
    headers = dict(items) | {"content-length": str(len(body))}
    head = "\r\n".join([f"{line} HTTP/1.1", *(f"{header}: {value}" for header, value in headers.items()), "", ""])
    with RawConnection(server) as connection:
        answer = connection.exchange(head.encode() + body)
        refused = (403, "SignatureDoesNotMatch")
        assert (answer.status, code_in(answer.body)) == ((200, "") if altered == "nothing" else refused)
        if altered == "nothing":
            read = connection.exchange(request_bytes(server, "GET", "/examplebucket/chunkObject.txt", signed=False))
            assert read.body == b"a" * 66560
            assert "content-encoding" not in read.headers
