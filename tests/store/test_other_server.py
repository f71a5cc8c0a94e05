"""A page of a proxy or a login page with status 200 is an error at once, and never the bytes of an object."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import torchobj
from torchobj import GCSOptions, S3Options, StoreConfig, exceptions, files

PAGE = b"<html>log in</html>"


class Answers(ThreadingHTTPServer):
    """A server that gives every request the same answer; `answer` returns its headers and body."""

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.requests = answer, []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.requests.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers, body = self.server.answer(self.path)
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815  the names of the base class

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(answer):
        server = Answers(answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        url = f"http://127.0.0.1:{server.server_port}"
        return server, url

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def config_of(url, *, force_sdk=False):
    return StoreConfig(
        s3=S3Options(endpoint_url=url, anonymous=True, region="us-east-1", force_sdk=force_sdk),
        gcs=GCSOptions(endpoint_url=url, anonymous=True, force_sdk=force_sdk),
    )


def read(url, config):
    torchobj.Store(url, config=config).get("k")


def read_range(url, config):
    torchobj.Store(url, config=config).get_range("k", 0, 5)


def head(url, config):
    torchobj.Store(url, config=config).head("k")


def download(url, config):
    files.download_file(f"{url}/k", "unused", config=config)


def stream(url, config):
    torchobj.open(f"{url}/k", "rb", config=config).read()


def list_all(url, config):
    list(torchobj.Store(url, config=config).list())


def put(url, config):
    torchobj.Store(url, config=config).put("k", b"bytes")


@pytest.mark.parametrize("force_sdk", [False, pytest.param(True, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("operation", [read, read_range, head, download, stream, list_all, put])
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_page_is_an_error_that_is_not_retried(serve, tmp_path, monkeypatch, scheme, operation, force_sdk):
    if force_sdk and operation is list_all and scheme == "s3":
        pytest.skip("the SDK does not tell a page from a damaged listing")
    monkeypatch.chdir(tmp_path)
    server, url = serve(lambda _: ({"Content-Type": "text/html; charset=utf-8"}, PAGE))
    with pytest.raises(exceptions.StoreError, match="another server has answered"):
        operation(f"{scheme}://bucket", config_of(url, force_sdk=force_sdk))
    # After a write, one read shows whether the object was written nevertheless.
    assert len(server.requests) <= 2
    assert list(tmp_path.iterdir()) == []


def test_an_html_object_with_an_etag_is_read(serve):
    _, url = serve(lambda _: ({"Content-Type": "text/html", "ETag": '"e"'}, PAGE))
    assert bytes(torchobj.Store("s3://bucket", config=config_of(url)).get("k")) == PAGE


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/html", "ETag": '"e"'}])
def test_an_emulator_that_omits_the_generation_is_read_with_that_of_the_metadata(serve, headers):
    metadata = json.dumps({"name": "k", "size": "5", "generation": "7"}).encode()

    def answer(path):
        return (headers, b"bytes") if "alt=media" in path else ({"Content-Type": "application/json"}, metadata)

    server, url = serve(answer)
    assert bytes(torchobj.Store("gs://bucket", config=config_of(url)).get("k")) == b"bytes"
    assert any("ifGenerationMatch=7" in path for path in server.requests)
