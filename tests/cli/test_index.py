"""`torchobj index`."""

import io
import tarfile

import pytest

from tests.support.long_tables import GCS_IN_MATRIX
from torchobj.shards.index import TarIndex

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


def shard(*names):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    return file.getvalue()


@pytest.fixture
def shards(bucket):
    for number in range(3):
        bucket.write(f"shards/{number}.tar", shard(f"{number}a.txt", f"{number}b.txt"))
    return f"{bucket.url}/shards/"


def test_an_index_is_written_beside_each_shard_and_only_the_stale_are_written_again(cli, bucket, shards):
    [first] = cli.records("index", f"{shards}{{0..2}}.tar")
    assert first == {"shards": 3, "written": [f"{shards}{number}.tar.index.parquet" for number in range(3)]}
    bucket.write("shards/1.tar", shard("new.txt"))
    [second] = cli.records("index", shards)
    assert second == {"shards": 3, "written": [f"{shards}1.tar.index.parquet"]}
    assert cli.records("index", shards) == [{"shards": 3, "written": []}]


def test_one_index_of_all_shards_is_written_to_a_file(cli, shards, tmp_path):
    file = tmp_path / "all.parquet"
    [line] = cli.lines("index", f"{shards}*.tar", "-o", file)
    assert line.startswith("3 shards: wrote ")
    assert TarIndex.load(file).counts() == [2, 2, 2]


def test_what_is_not_a_plain_tar_is_an_error_with_its_url(cli, bucket, shards):
    bucket.write("shards/2.tar", b"no tar" * 1000)
    assert f"{shards}2.tar" in cli.error("index", shards)
    bucket.write("shards/2.tar.gz", b"anything")
    assert "compressed shard" in cli.error("index", f"{shards}2.tar.gz")
