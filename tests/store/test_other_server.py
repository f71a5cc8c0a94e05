"""A page of a proxy or a login page with status 200 is an error at once, and never the bytes of an object."""

import json

import pytest

import torchobj
from tests.support.answers import answering
from torchobj import exceptions, files

PAGE = b"<html>log in</html>"


def read(store):
    store.get("k")


def read_range(store):
    store.get_range("k", 0, 5)


def head(store):
    store.head("k")


def download(store):
    files.download_file(f"{store.url}/k", "unused", config=store.config)


def stream(store):
    torchobj.open(f"{store.url}/k", "rb", config=store.config).read()


def list_all(store):
    list(store.list())


def put(store):
    store.put("k", b"bytes")


@pytest.mark.parametrize("force_sdk", [False, pytest.param(True, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("operation", [read, read_range, head, download, stream, list_all, put])
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_page_is_an_error_that_is_not_retried(tmp_path, monkeypatch, scheme, operation, force_sdk):
    monkeypatch.chdir(tmp_path)
    with answering(lambda _: (200, {"Content-Type": "text/html; charset=utf-8"}, PAGE)) as server:
        with pytest.raises(exceptions.StoreError, match="another server has answered"):
            operation(server.store(scheme, force_sdk=force_sdk))
        # After a write, one read shows whether the object was written nevertheless.
        assert len(server.requests) <= 2
    assert list(tmp_path.iterdir()) == []


def test_an_html_object_with_an_etag_is_read():
    with answering(lambda _: (200, {"Content-Type": "text/html", "ETag": '"e"'}, PAGE)) as server:
        assert bytes(server.store("s3").get("k")) == PAGE


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/html", "ETag": '"e"'}])
def test_an_emulator_that_omits_the_generation_is_read_with_that_of_the_metadata(headers):
    metadata = json.dumps({"name": "k", "size": "5", "generation": "7"}).encode()

    def answer(sent):
        if "alt=media" in sent.path:
            return 200, headers, b"bytes"
        return 200, {"Content-Type": "application/json"}, metadata

    with answering(answer) as server:
        assert bytes(server.store("gs").get("k")) == b"bytes"
        assert any("ifGenerationMatch=7" in sent.path for sent in server.requests)
