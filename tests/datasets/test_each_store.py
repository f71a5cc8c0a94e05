"""Datasets of each kind read the same samples from S3, from GCS, from a folder and from memory."""

import io

import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import torchobj
from tests.conftest import strict_bucket
from torchobj import decode, exceptions

COUNT = 12


@pytest.fixture(params=["s3", "gs", "file", "memory"])
def place(request, tmp_path):
    """The URL and the configuration of a store with objects for each kind of dataset."""
    config, url = None, f"file://{tmp_path}" if request.param == "file" else f"memory://{tmp_path.name}"
    if request.param in ("s3", "gs"):
        bucket = strict_bucket(request.param, request)
        config, url = bucket.config, bucket.url
    store = torchobj.Store(url, config=config)
    for number in range(COUNT):
        image = io.BytesIO()
        PIL.Image.new("L", (2, 2), number).save(image, "PNG")
        store.put(f"images/{number:02}/é.png", image.getvalue())
        store.put(f"objects/{number:02}", b"%d" % number)
        store.put(f"pairs/{number:02}.a", b"%d" % number)
        store.put(f"pairs/{number:02}.b", b"b")
    with torchobj.ShardWriter(f"{url}/shards/%02d.tar", maxcount=5, config=config) as writer:
        for number in range(COUNT):
            writer.write({"__key__": f"{number:02}", "cls": number})
    with torchobj.ObjectWriter(f"{url}/rows/0.parquet", config=config) as file:
        names = [f"{url}/objects/{number:02}" for number in range(COUNT)]
        pq.write_table(pa.table({"id": range(COUNT), "object": names}), file, row_group_size=5)
    return url, config


class Named(torchobj.ObjectDataset):
    """Objects that a subclass names."""

    def __init__(self, url, config):
        super().__init__(config=config)
        self.url = url

    def __len__(self):
        return COUNT

    def objects_at(self, index):
        return [torchobj.ObjectRef(f"{self.url}/objects/{index:02}")]

    def build(self, index, readers):
        return number_of(readers[0])


def number_of(reader):
    return int(reader.read())


def listed(url, config):
    return torchobj.ObjectMapDataset(f"{url}/objects/", transform=number_of, config=config)


def in_order(url, config):
    return torchobj.ObjectIterableDataset(
        f"{url}/objects/", transform=number_of, config=config, shuffle=True, enable_sharding=True
    )


def of_manifest(url, config, **settings):
    manifest = torchobj.Manifest.from_prefix(f"{url}/objects/", config=config)
    return torchobj.ObjectMapDataset.from_manifest(manifest, transform=number_of, config=config, **settings)


def samples_of_all_kinds(url, config):
    """Returns a dataset of each kind, and what makes a number of its sample."""
    rows, tars = f"{url}/rows/0.parquet", f"{url}/shards/*.tar"
    json = {"decode": {"cls": decode.json}, "config": config}
    return {
        "listed": (listed(url, config), int),
        "in order": (in_order(url, config), int),
        "manifest": (of_manifest(url, config), int),
        "named": (Named(url, config), int),
        "interleaved": (
            torchobj.interleave([listed(url, config), in_order(url, config)], stopping_strategy="all_exhausted"),
            int,
        ),
        "images": (torchobj.ImageFolder(f"{url}/images", config=config), lambda sample: sample[1]),
        "groups": (
            torchobj.GroupDataset(f"{url}/pairs/", {"a": ".a", "b": ".b"}, config=config),
            lambda sample: int(bytes(sample["a"])),
        ),
        "table": (torchobj.TableDataset(rows, "object", config=config), lambda row: int(bytes(row["object"]))),
        "rows": (torchobj.ParquetIterableDataset(f"{url}/rows/", config=config), lambda row: row["id"]),
        "tar stream": (torchobj.TarIterableDataset(tars, **json), lambda sample: sample["cls"]),
        "tar members": (torchobj.TarMapDataset(tars, **json), lambda sample: sample["cls"]),
    }


def test_datasets_of_each_kind_read_the_same_samples_from_each_store(place):
    for kind, (dataset, number) in samples_of_all_kinds(*place).items():
        loader = torchobj.DataLoader(dataset, batch_size=4, num_workers=1, collate_fn=list)
        found = [number(sample) for batch in loader for sample in batch]
        assert sorted(found) == sorted([*range(COUNT)] * (2 if kind == "interleaved" else 1)), kind


def test_an_iterable_dataset_is_resumed_on_each_store(place):
    whole, interrupted, resumed = (in_order(*place) for _ in range(3))
    iterator = iter(interrupted)
    begun = [next(iterator) for _ in range(5)]
    resumed.load_state_dict(interrupted.state_dict())
    assert begun + list(resumed) == list(whole)


def test_an_object_that_changed_since_the_listing_is_an_error_on_each_store(place):
    url, config = place
    datasets = [listed(url, config), of_manifest(url, config)]
    accepting = of_manifest(url, config, on_change="accept")
    assert [dataset[3] for dataset in datasets] == [3, 3]
    torchobj.Store(url, config=config).put("objects/03", b"333")
    for dataset in datasets:
        with pytest.raises(exceptions.ObjectChangedError, match="objects/03"):
            dataset[3]
    assert accepting[3] == 333
