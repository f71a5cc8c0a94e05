"""Tests how the GCS mode composes, rewrites and deletes objects."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import google_crc32c
import pytest

from tests.servers import launch
from tests.servers.gcs_client import refusal
from tests.servers.raw_client import RawResponse
from tests.strict.control import Control
from tests.strict.tests.answers import gcs_exchange, gcs_put, reason_of

pytestmark = [pytest.mark.timeout(60), pytest.mark.matrix]

OBJECTS = "/storage/v1/b/bucket/o"
MEBIBYTE = 1024**2


def compose(server: launch.Server, *sources: object, query: str = "", **fields: object) -> RawResponse:
    body = {"sourceObjects": sources, **fields}
    return gcs_exchange(server, "POST", f"{OBJECTS}/composed/compose{query}", resource=body)


def test_composed_objects_have_a_crc32c_and_a_count_but_no_md5(gcs: Any, gcs_server: launch.Server) -> None:
    bucket = gcs.bucket("bucket")
    parts = [bucket.blob(f"part-{index}") for index in range(3)]
    for part in parts:
        part.upload_from_string(os.urandom(1000))
    content = b"".join(part.download_as_bytes() for part in parts)
    composed = bucket.blob("composed")
    composed.content_type, composed.metadata = "text/x", {"k": "v"}
    composed.compose(parts, if_generation_match=0)
    composed = bucket.get_blob("composed")
    crc32c = base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode()
    assert (composed.component_count, composed.md5_hash, composed.crc32c) == (3, None, crc32c)
    assert (composed.content_type, composed.metadata) == ("text/x", {"k": "v"})
    # Verified by the client against the checksum of the response.
    assert composed.download_as_bytes(checksum="crc32c") == content
    answer = gcs_exchange(gcs_server, "GET", f"{OBJECTS}/composed?alt=media")
    assert answer.headers["x-goog-hash"] == f"crc32c={crc32c}"
    again = bucket.blob("again")
    again.compose([composed, parts[0]])
    assert again.component_count == 4
    copy = bucket.blob("copy")
    copy.rewrite(again)
    assert (copy.component_count, copy.crc32c, copy.md5_hash) == (4, again.crc32c, None)


def test_a_compose_is_refused_for_its_number_of_sources_or_a_condition(
    gcs_server: launch.Server, gcs_control: Control
) -> None:
    generation = gcs_put(gcs_server, "a", b"content")["generation"]
    source = {"name": "a"}
    for answer, expected in [
        (compose(gcs_server), (400, "required")),
        (compose(gcs_server, *[source] * 33), (400, "invalid")),
        (compose(gcs_server, source, {"name": "missing"}), (404, "notFound")),
        (compose(gcs_server, {"name": "a", "generation": "1"}), (404, "notFound")),
        (compose(gcs_server, {**source, "objectPreconditions": {"ifGenerationMatch": "1"}}), (412, "conditionNotMet")),
        (compose(gcs_server, source, query="?ifGenerationMatch=1"), (412, "conditionNotMet")),
        (compose(gcs_server, source, destination={"crc32c": "AAAAAA=="}), (400, "invalid")),
        (compose(gcs_server, source, destination={"colour": "red"}), (400, "parseError")),
        (compose(gcs_server, {"name": "a", "size": 1}), (400, "parseError")),
        (compose(gcs_server, source, sources=[]), (400, "parseError")),
    ]:
        assert reason_of(answer) == expected
    assert gcs_control.buckets()[0]["objects"] == 1
    pinned = {"name": "a", "generation": generation, "objectPreconditions": {"ifGenerationMatch": generation}}
    assert compose(gcs_server, *[pinned] * 32, query="?ifGenerationMatch=0").status == 200
    gcs_control.bucket("bucket", {"storage_class": "COLDLINE"})
    gcs_put(gcs_server, "cold")
    assert reason_of(compose(gcs_server, source, {"name": "cold"})) == (400, "invalid")


def test_a_compose_may_delete_its_sources(gcs_server: launch.Server, gcs_control: Control) -> None:
    gcs_put(gcs_server, "a", b"a")
    gcs_put(gcs_server, "composed", b"b")
    gcs_control.bucket("bucket", {"denied": ["storage.objects.delete"]})
    sources = ({"name": "composed"}, {"name": "a"}, {"name": "a"})
    assert reason_of(compose(gcs_server, *sources, deleteSourceObjects=True)) == (403, "forbidden")
    gcs_control.bucket("bucket", {"denied": []})
    assert compose(gcs_server, *sources, deleteSourceObjects=True).status == 200
    assert gcs_exchange(gcs_server, "GET", f"{OBJECTS}/composed?alt=media").body == b"baa"
    assert gcs_control.buckets()[0]["objects"] == 1


def test_a_rewrite_may_take_several_calls(gcs: Any, gcs_control: Control) -> None:
    gcs_control.limits(rewrite_bytes=MEBIBYTE)
    gcs_control.bucket("other", {"storage_class": "NEARLINE"})
    content = os.urandom(2 * MEBIBYTE + 1)
    source = gcs.bucket("bucket").blob("a/b")
    source.metadata = {"k": "v"}
    source.upload_from_string(content, content_type="text/x")
    target = gcs.bucket("other").blob("c/d")
    token, rewritten, total = target.rewrite(source, if_generation_match=0)
    assert (rewritten, total) == (MEBIBYTE, len(content))
    other = gcs.bucket("other").blob("another")
    assert refusal(other.rewrite, source, token=token) == (400, "invalid")
    token, rewritten, _ = target.rewrite(source, token=token, if_generation_match=0)
    assert rewritten == 2 * MEBIBYTE
    assert target.rewrite(source, token=token, if_generation_match=0) == (None, len(content), len(content))
    assert (target.metadata, target.content_type, target.storage_class) == ({"k": "v"}, "text/x", "NEARLINE")
    assert target.md5_hash == source.md5_hash
    assert target.download_as_bytes() == content
    requests = gcs_control.requests("RewriteObject")
    assert [(request.bucket, request.key) for request in requests[:1]] == [("bucket", "c/d")]


def test_a_rewrite_checks_the_conditions_of_both_objects(gcs_server: launch.Server, gcs_control: Control) -> None:
    del gcs_control
    generation = gcs_put(gcs_server, "a")["generation"]
    target = f"{OBJECTS}/a/rewriteTo/b/bucket/o/b"
    for query, status in [
        ("?ifSourceGenerationMatch=1", 412),
        ("?ifGenerationMatch=1", 412),
        ("?sourceGeneration=1", 404),
        ("?rewriteToken=unknown", 400),
        ("?maxBytesRewrittenPerCall=1", 400),
        (f"?ifSourceGenerationMatch={generation}&ifGenerationMatch=0", 200),
    ]:
        assert gcs_exchange(gcs_server, "POST", target + query).status == status
    changed = gcs_exchange(gcs_server, "POST", target, resource={"metadata": {"k": "v"}, "storageClass": "ARCHIVE"})
    resource = json.loads(changed.body)["resource"]
    assert (resource["metadata"], resource["storageClass"]) == ({"k": "v"}, "ARCHIVE")
