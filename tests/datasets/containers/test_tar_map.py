"""Samples of tar shards in any order: they equal webdataset's, are announced, and are resumed and divided."""

import gc
import io
import json
import tarfile
import warnings

import pytest
import torch
import webdataset

import torchobj
from torchobj.exceptions import ConfigError, TarIndexError
from torchobj.shards.index import TarIndex

SAMPLES, SHARDS = 40, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards without an index, with members of several sizes, names in folders and one without an extension."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
            for number in range(shard * 10, shard * 10 + 10):
                members = {
                    f"images/{number:04d}.SEG.PNG": bytes([number]) * number * 50,
                    f"images/{number:04d}.json": json.dumps({"n": number}).encode(),
                    "README": b"no sample",
                    f"images/{number:04d}.txt": b"",
                }
                for name, data in members.items():
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return folder


@pytest.fixture
def pattern(folder):
    return f"file://{folder}/{{000..003}}.tar"


def test_another_object_than_a_configuration_is_an_error(pattern):
    with pytest.raises(ConfigError, match="^config=<class 'str'>: must be a StoreConfig, or None$"):
        torchobj.TarMapDataset(pattern, config="http://localhost:9000")


def as_bytes(sample):
    """A sample as webdataset yields it."""
    return {field: value if field.startswith("__") else bytes(value) for field, value in sample.items()}


@pytest.fixture(scope="module")
def expected(folder):
    """webdataset's samples of the local files, in order."""
    with warnings.catch_warnings():
        # webdataset leaves its files to the garbage collection.
        warnings.simplefilter("ignore", ResourceWarning)
        dataset = webdataset.WebDataset(f"{folder}/{{000..003}}.tar", shardshuffle=False)
        samples = [dict(sample) for sample in dataset]
        del dataset
        gc.collect()
    for sample in samples:
        del sample["__local_path__"]
        sample["__url__"] = f"file://{sample['__url__']}"
    return samples


def number_of(sample):
    return int(sample["__key__"].removeprefix("images/"))


def test_samples_are_those_of_webdataset(pattern, expected):
    dataset = torchobj.TarMapDataset(pattern)
    assert [as_bytes(dataset[number]) for number in range(len(dataset))] == expected
    assert list(dataset[3]) == list(expected[3])
    assert as_bytes(dataset[-1]) == expected[-1]


@pytest.mark.parametrize(
    ("workers", "context"),
    [(0, None), (2, "fork"), (1, "forkserver"), pytest.param(2, "spawn", marks=pytest.mark.matrix)],
)
def test_shuffled_samples_are_those_of_webdataset_and_all_are_announced(pattern, expected, workers, context):
    dataset = torchobj.TarMapDataset(pattern)
    loader = torchobj.DataLoader(
        dataset,
        batch_size=4,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=context,
        generator=torch.Generator().manual_seed(3),
        collate_fn=list,
    )
    samples = [sample for batch in loader for sample in batch]
    order = [number_of(sample) for sample in samples]
    assert sorted(order) == list(range(SAMPLES))
    assert order != sorted(order)
    assert all(as_bytes(sample) == expected[number] for sample, number in zip(samples, order, strict=True))
    stats = loader.stats()
    assert (stats.misses, stats.samples) == (0, SAMPLES)


@pytest.mark.providers("s3")
def test_shuffled_samples_of_a_shard_take_few_requests(bucket, control):
    count = 1000
    with torchobj.ShardWriter(f"{bucket.url}/shard-%d.tar", maxcount=count, config=bucket.config) as writer:
        for number in range(count):
            writer.write({"__key__": f"{number:04d}", "bin": number.to_bytes(2, "big") * 500})
    dataset = torchobj.TarMapDataset(f"{bucket.url}/shard-0.tar", config=bucket.config)
    assert len(dataset) == count
    control.clear_requests()
    loader = torchobj.DataLoader(dataset, batch_size=10, shuffle=True, collate_fn=list)
    read = [bytes(sample["bin"]) for batch in loader for sample in batch]
    assert sorted(read) == [number.to_bytes(2, "big") * 500 for number in range(count)]
    # Reads start while later samples are still drawn.
    assert len(control.requests("GetObject")) <= count // 2


def test_fields_are_decoded_and_the_sample_is_transformed(pattern):
    dataset = torchobj.TarMapDataset(
        pattern, decode={"json": torchobj.decode.json, "absent": int}, transform=lambda sample: sample["json"]["n"]
    )
    assert [dataset[number] for number in (0, 39, 17)] == [0, 39, 17]


def test_an_index_that_is_given_is_used(pattern, expected, tmp_path, monkeypatch):
    index = TarIndex.build(pattern)
    index.save(tmp_path / "index.parquet")
    monkeypatch.setattr("torchobj.shards.index._members_of", None)
    for given in (index, tmp_path / "index.parquet", f"file://{tmp_path}/index.parquet"):
        dataset = torchobj.TarMapDataset(pattern, given)
        assert as_bytes(dataset[25]) == expected[25]
    assert dataset.index.counts() == [10] * SHARDS


def test_no_request_is_sent_before_the_first_use_and_the_repr_shows_the_state(pattern):
    dataset = torchobj.TarMapDataset(["s3://absent-bucket/{000..100}.tar", "s3://absent-bucket/x.tar"])
    assert "s3://absent-bucket/{000..100}.tar and 1 more, not indexed yet" in repr(dataset)
    dataset = torchobj.TarMapDataset(pattern)
    len(dataset)
    assert f"{SAMPLES} samples, on_error='raise'" in repr(dataset)


def test_invalid_arguments_are_refused():
    for arguments in ({"index": 3}, {"decode": {".jpg": int}}, {"transform": 3}, {"on_error": "skip"}, {"urls": []}):
        with pytest.raises(ConfigError):
            torchobj.TarMapDataset(**{"urls": "memory://tar-map/a.tar", **arguments})


def failing(data):
    raise ValueError(f"cannot decode {len(data)} bytes")


def test_a_decoder_that_fails_is_an_error_that_names_url_key_and_field(pattern, folder):
    dataset = torchobj.TarMapDataset(pattern, decode={"json": failing})
    with pytest.raises(ValueError, match="cannot decode") as caught:
        dataset[12]
    notes = "\n".join(caught.value.__notes__)
    assert all(part in notes for part in ("'json'", "'images/0012'", f"file://{folder}/001.tar"))


def fails_for_five(data):
    value = json.loads(bytes(data))
    if value["n"] == 5:
        raise ValueError("five")
    return value


def test_on_error_applies_to_a_sample_that_cannot_be_decoded(pattern, folder):
    decode = {"json": fails_for_five}
    dataset = torchobj.TarMapDataset(pattern, decode=decode, on_error="replace")
    assert dataset[5]["json"] == {"n": 6}
    assert dataset.failed_samples == 1
    dataset = torchobj.TarMapDataset(
        pattern, decode=decode, on_error=lambda index, url, error: (index, url, str(error))
    )
    assert dataset[5] == (5, f"file://{folder}/000.tar", "five")


def test_a_shard_that_is_replaced_later_is_an_error_of_its_samples():
    store = torchobj.Store("memory://tar-map-replaced")
    with torchobj.ShardWriter("memory://tar-map-replaced/%03d.tar", maxcount=2) as writer:
        for number in range(4):
            writer.write({"__key__": str(number), "txt": "text"})
    dataset = torchobj.TarMapDataset("memory://tar-map-replaced/*.tar", decode={"txt": torchobj.decode.text})
    assert dataset[0]["txt"] == "text"
    store.put("001.tar", bytes(store.get("001.tar")))
    with pytest.raises(torchobj.StoreError, match=r"001\.tar"):
        dataset[2]
    assert dataset[1]["txt"] == "text"


def test_an_index_older_than_its_shard_is_built_again_or_refused():
    base = "memory://tar-map-stale"
    for keys in (("a", "b"), ("c", "d", "e")):
        with torchobj.shards.TarWriter(f"{base}/0.tar", index=keys == ("a", "b")) as writer:
            for key in keys:
                writer.write({"__key__": key, "txt": key})
        if keys == ("a", "b"):
            TarIndex.build(f"{base}/0.tar").save(f"{base}/named.parquet")
    assert [sample["__key__"] for sample in map(torchobj.TarMapDataset(f"{base}/0.tar").__getitem__, range(3))] == [
        "c",
        "d",
        "e",
    ]
    with pytest.raises(TarIndexError, match="but the shard has"):
        len(torchobj.TarMapDataset(f"{base}/0.tar", f"{base}/named.parquet"))


def test_an_interrupted_epoch_is_resumed_at_its_next_batch(pattern):
    def loader():
        return torchobj.DataLoader(
            torchobj.TarMapDataset(pattern),
            batch_size=4,
            shuffle=True,
            num_workers=2,
            generator=torch.Generator().manual_seed(5),
            collate_fn=list,
        )

    whole = [number_of(sample) for batch in loader() for sample in batch]
    first = loader()
    batches = iter(first)
    seen = [number_of(sample) for _ in range(3) for sample in next(batches)]
    state = first.state_dict()
    del batches
    second = loader()
    second.load_state_dict(state)
    assert seen + [number_of(sample) for batch in second for sample in batch] == whole


def test_an_epoch_continues_on_another_number_of_ranks(pattern):
    dataset = torchobj.TarMapDataset(pattern)

    def loaders(ranks):
        for rank in range(ranks):
            sampler = torchobj.ElasticDistributedSampler(dataset, num_replicas=ranks, rank=rank, seed=1)
            yield torchobj.DataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=list)

    seen, state = [], None
    for loader in loaders(2):
        batches = iter(loader)
        seen += [number_of(sample) for _ in range(4) for sample in next(batches)]
        state = loader.state_dict()
    for loader in loaders(4):
        loader.load_state_dict(state)
        seen += [number_of(sample) for batch in loader for sample in batch]
    assert sorted(seen) == list(range(SAMPLES))
