"""Tests that the emulator of GCS starts, stores objects and is stopped. Google's client is the caller."""

from pathlib import Path

import pytest
import requests
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from tests.servers import launch

pytestmark = [pytest.mark.timeout(60), pytest.mark.matrix]


@pytest.fixture(scope="module")
def server():
    with launch.start("fake-gcs-server") as started:
        yield started


@pytest.fixture
def client(server):
    with storage.Client(
        project="test", credentials=AnonymousCredentials(), client_options={"api_endpoint": server.endpoint}
    ) as made:
        yield made


def create_bucket(server, name):
    created = requests.post(f"{server.endpoint}/storage/v1/b?project=test", json={"name": name}, timeout=10)
    assert created.json()["name"] == name


def test_an_object_of_a_bucket_that_was_created_by_a_post_is_read_in_ranges_and_listed(server, client):
    create_bucket(server, "posted")
    bucket = client.bucket("posted")
    bucket.blob("folder/a b#?%2F").upload_from_string(b"0123456789")
    assert bucket.blob("folder/a b#?%2F").download_as_bytes(start=2, end=4) == b"234"
    assert [blob.name for blob in client.list_blobs("posted", prefix="folder/")] == ["folder/a b#?%2F"]


def test_the_location_of_a_resumable_upload_has_the_port(server, client):
    create_bucket(server, "resumable")
    blob = client.bucket("resumable").blob("large")
    location = blob.create_resumable_upload_session(size=6)
    assert location.startswith(f"{server.endpoint}/upload/")
    requests.put(location, data=b"abcdef", timeout=10).raise_for_status()
    assert blob.download_as_bytes() == b"abcdef"


def test_it_ends_with_the_process_that_serves_it(server):
    with launch.start("fake-gcs-server") as other:
        [child] = Path(f"/proc/{other.pid}/task/{other.pid}/children").read_text().split()
        assert other.endpoint != server.endpoint
    assert not Path(f"/proc/{child}").exists()
