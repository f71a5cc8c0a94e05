"""An epoch in which no sample fails has no failures: what a dataset counts for itself is not among them."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import torchobj


def tar_stream(url):
    return torchobj.TarIterableDataset(f"{url}/shards/", decode={"txt": torchobj.decode.text})


def tar_map(url):
    return torchobj.TarMapDataset(f"{url}/shards/", decode={"txt": torchobj.decode.text})


def parquet(url):
    return torchobj.ParquetIterableDataset(f"{url}/tables/")


def mixture(url):
    return torchobj.interleave([tar_stream(url), parquet(url)])


def undecoded(url):
    return torchobj.TarIterableDataset(f"{url}/shards/", decode={"jpg": bytes}, uneven="drop")


@pytest.mark.parametrize("make", [tar_stream, tar_map, parquet, mixture, undecoded])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_clean_epoch_reports_no_failed_samples(tmp_path, make, workers):
    url = tmp_path.as_uri()
    with torchobj.ShardWriter(f"{url}/shards/train-%06d.tar", maxcount=2) as writer:
        for number in range(6):
            writer.write({"__key__": str(number), "txt": f"sample {number}"})
    (tmp_path / "tables").mkdir()
    pq.write_table(pa.table({"txt": [str(number) for number in range(6)]}), tmp_path / "tables" / "a.parquet")
    loader = torchobj.DataLoader(make(url), batch_size=2, collate_fn=len, num_workers=workers)
    for _ in range(2):
        assert sum(loader) > 0
    assert loader.stats().failed_samples == 0
    assert "failed" not in loader.report()
    assert getattr(loader.dataset, "failed_samples", 0) == 0
