"""Shards that are written are read by tarfile and webdataset as the samples that were passed, and equal ones are equal."""

import gzip
import io
import json
import os
import tarfile

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset import ShardWriter as WebdatasetShardWriter
from webdataset.tariterators import group_by_keys, tar_file_expander

import torchobj
from torchobj import ShardWriter, exceptions
from torchobj._torchobj import TarIndexer, TarReader
from torchobj.shards import TarWriter, index_file
from torchobj.shards.members import split_name

MIB = 1 << 20


def members(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {info.name: archive.extractfile(info).read() for info in archive.getmembers()}


def written(sample):
    with TarWriter("memory://shard-writer/one.tar") as writer:
        writer.write(sample)
    return {name.partition(".")[2]: data for name, data in members(body("one.tar")).items()}


def body(key):
    return bytes(torchobj.Store("memory://shard-writer").get(key))


def index_of(url):
    return index_file.read(torchobj.get_many([f"{url}.index.parquet"])[0], url)


@pytest.fixture
def folder(request):
    """A folder in memory for this test."""
    return f"memory://shard-writer/{request.node.name}"


@pytest.fixture
def read(folder):
    """Reads the keys of the folder."""
    store = torchobj.Store(folder)
    return lambda: {info.key: bytes(store.get(info.key)) for info in store.list()}


@pytest.mark.providers("s3", "gs")
def test_shards_in_a_bucket_are_read_by_webdataset_and_tarfile(bucket):
    samples = [
        {"__key__": f"train/{number:04d}", "jpg": os.urandom(number * 10_000), "cls": number, "json": {"n": number}}
        for number in range(25)
    ]
    with ShardWriter(f"{bucket.url}/s-%02d.tar", maxcount=10, config=bucket.config) as writer:
        for sample in samples:
            writer.write(sample)
    assert [(shard.name, shard.version) for shard in writer.shards] == [
        (f"{bucket.url}/s-{number:02d}.tar", bucket.version(f"s-{number:02d}.tar")) for number in range(3)
    ]
    assert sorted(bucket.keys()) == [
        f"s-{number:02d}.tar{end}" for number in range(3) for end in ("", ".index.parquet")
    ]
    streams = [{"url": key, "stream": io.BytesIO(bucket.body(key))} for key in bucket.keys() if key.endswith(".tar")]
    read = list(group_by_keys(tar_file_expander(streams)))
    assert [{name: value for name, value in sample.items() if name[:2] != "__"} for sample in read] == [
        {
            "jpg": sample["jpg"],
            "cls": str(sample["cls"]).encode(),
            "json": json.dumps(sample["json"]).encode(),
        }
        for sample in samples
    ]
    assert [sample["__key__"] for sample in read] == [sample["__key__"] for sample in samples]


@pytest.mark.providers("s3", "gs")
def test_a_shard_of_several_parts_is_whole(bucket):
    data = os.urandom(21 * MIB)
    with TarWriter(f"{bucket.url}/large.tar", config=bucket.config) as writer:
        writer.write({"__key__": "a", "bin": memoryview(data), "txt": "end"})
    assert members(bucket.body("large.tar")) == {"a.bin": data, "a.txt": b"end"}
    index = index_file.read(bucket.body("large.tar.index.parquet"), "index")
    assert index.shards == (("large.tar", len(bucket.body("large.tar")), bucket.version("large.tar")),)


@pytest.mark.providers("s3", "gs")
def test_an_exception_in_the_block_leaves_no_shard_no_index_and_no_parts(bucket):
    def fail():
        with ShardWriter(f"{bucket.url}/s-%d.tar", maxcount=2, config=bucket.config) as writer:
            for number in range(2):
                writer.write({"__key__": f"{number}", "bin": b"x"})
            writer.write({"__key__": "2", "bin": os.urandom(20 * MIB)})
            raise LookupError("producer")

    with pytest.raises(LookupError, match="producer"):
        fail()
    assert sorted(bucket.keys()) == ["s-0.tar", "s-0.tar.index.parquet"]
    assert not bucket.uploads()


def test_an_exception_keeps_the_previous_shard(folder, read):
    for count in (1, 2):
        try:
            with TarWriter(f"{folder}/a.tar") as writer:
                for number in range(count):
                    writer.write({"__key__": f"{number}", "txt": "x"})
                assert count == 1, "fail"
        except AssertionError:
            assert members(read()["a.tar"]) == {"0.txt": b"x"}
    assert sorted(read()) == ["a.tar", "a.tar.index.parquet"]


def test_the_bytes_are_those_of_tarfile_with_time_and_owner_0(folder, read):
    names = ["a.txt", "é/ü.txt", f"{'long/' * 30}k.txt", "b.txt"]
    with TarWriter(f"{folder}/a.tar") as writer:
        for number, name in enumerate(names):
            writer.write({"__key__": name.removesuffix(".txt"), "txt": "x" * 511 * number})
    expected = io.BytesIO()
    with tarfile.open(fileobj=expected, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mode = 511 * number, 0o444
            archive.addfile(info, io.BytesIO(b"x" * info.size))
    assert read()["a.tar"] == expected.getvalue()


def test_the_index_has_the_ranges_of_members_and_samples(folder, read):
    with TarWriter(f"{folder}/a.tar") as writer:
        writer.write({"__key__": "a", "txt": "abc", "JSON": [1]})
        writer.write({"__key__": "long/" * 30 + "b", "bin": bytes(1000)})
    data, index = read()["a.tar"], index_of(f"{folder}/a.tar")
    rows = index.members.to_pylist()
    assert [(row["shard"], row["key"], row["field"]) for row in rows] == [
        ("a.tar", "a", "json"),
        ("a.tar", "a", "txt"),
        ("a.tar", "long/" * 30 + "b", "bin"),
    ]
    assert [data[row["offset"] : row["offset"] + row["size"]] for row in rows] == [b"[1]", b"abc", bytes(1000)]
    # The second sample begins with its pax header.
    assert [(row["begin"], row["end"]) for row in rows] == [(0, 2048), (0, 2048), (2048, 2048 + 1536 + 1024)]
    for begin, end in {(row["begin"], row["end"]) for row in rows}:
        assert members(data[begin:end] + bytes(1024))
    assert index.shards[0].size == len(data)


def test_the_index_is_that_of_the_indexer_and_the_reader(folder, read):
    with TarWriter(f"{folder}/a.tar") as writer:
        for number, name in enumerate(["a", "é" * 60, "x/" * 80 + "b", "c"]):
            writer.write({"__key__": name, "bin": bytes(number * 700), "Seg.PNG": b"1" * number})
    data = torchobj.Buffer(read()["a.tar"])
    indexer = TarIndexer("a.tar", len(data))
    while (part := indexer.next()) is not None:
        indexer.feed(torchobj.Buffer(data[slice(*part)]))
    table = index_of(f"{folder}/a.tar").members.to_pylist()
    expected = [(row["key"], row["begin"], row["end"], row["field"], row["offset"], row["size"]) for row in table]
    assert [(key, begin, end, *m) for key, begin, end, found in indexer.samples() for m in found] == expected
    reader = TarReader("a.tar")
    samples = reader.push(data) + reader.finish()
    assert [(begin, end, key) for begin, end, key, _ in samples] == list(
        dict.fromkeys((begin, end, key) for key, begin, end, *_ in expected)
    )


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=120), st.text(min_size=1, max_size=10), st.binary(max_size=2000)),
        max_size=5,
    )
)
def test_any_names_are_either_refused_or_read_back(samples):
    expected = {}
    with TarWriter("memory://shard-writer/any.tar") as writer:
        for key, field, data in samples:
            try:
                writer.write({"__key__": key, field: data})
            except (ValueError, TypeError):
                continue
            expected[f"{key}.{field}"] = data
            assert split_name(f"{key}.{field}") == (key, field.lower())
    assert members(body("any.tar")) == expected


@pytest.mark.parametrize(
    ("field", "value", "data"),
    [
        ("bin", b"bytes", b"bytes"),
        ("bin", bytearray(b"bytes"), b"bytes"),
        ("bin", memoryview(b"bytes"), b"bytes"),
        ("bin", torchobj.Buffer(b"bytes"), b"bytes"),
        ("bin", torchobj.ObjectReader("memory://a/b", "a", "b", torchobj.Buffer(b"bytes")), b"bytes"),
        ("jpg", np.frombuffer(b"bytes", np.uint8), b"bytes"),
        ("jpg", torch.frombuffer(bytearray(b"bytes"), dtype=torch.uint8), b"bytes"),
        ("bin", b"", b""),
        ("any", "tëxt", "tëxt".encode()),
        ("cls", 7, b"7"),
        ("top.CLS", np.int64(-7), b"-7"),
        ("id", torch.tensor(7), b"7"),
        ("json", {"a": [1, None]}, b'{"a": [1, null]}'),
        ("json", "text is JSON already", b"text is JSON already"),
    ],
)
def test_values_are_encoded_by_their_field(field, value, data):
    assert written({"__key__": "a", field: value}) == {field: data}


def test_arrays_tensors_and_images_are_decoded_again():
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    image = PIL.Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    sample = {"npy": array, "row.npy": array.astype(np.uint8).ravel(), "npz": {"a": array}, "pth": {"t": torch.ones(2)}}
    data = written({"__key__": "a", "png": image, "jpg": image, **sample})
    assert np.array_equal(np.load(io.BytesIO(data["npy"])), array)
    assert np.array_equal(np.load(io.BytesIO(data["row.npy"])), array.ravel())
    assert np.array_equal(np.load(io.BytesIO(data["npz"]))["a"], array)
    assert torch.equal(torch.load(io.BytesIO(data["pth"]))["t"], torch.ones(2))
    assert np.array_equal(PIL.Image.open(io.BytesIO(data["png"])), np.asarray(image))
    assert PIL.Image.open(io.BytesIO(data["jpg"])).format == "JPEG"


def test_values_of_gz_fields_are_compressed_and_bytes_are_not():
    data = written({"__key__": "a", "json.gz": [1], "txt.gz": "text", "bin.gz": b"is compressed already"})
    assert gzip.decompress(data["json.gz"]) == b"[1]"
    assert gzip.decompress(data["txt.gz"]) == b"text"
    assert data["bin.gz"] == b"is compressed already"
    assert data == written({"__key__": "a", "json.gz": [1], "txt.gz": "text", "bin.gz": b"is compressed already"})


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("jpg", 3, "builtins.int"),
        ("cls", 1.5, "builtins.float"),
        ("cls", None, "builtins.NoneType"),
        ("txt", 3, "builtins.int"),
        ("json", {1, 2}, "builtins.set"),
        ("bin", np.zeros((2, 2), np.uint8), "numpy.ndarray"),
        ("bin", np.zeros(2, np.int8), "numpy.ndarray"),
        ("bin", torch.zeros(2), "torch.Tensor"),
        ("npy", [1], "builtins.list"),
        ("npy", np.array([object()]), "numpy.ndarray"),
        ("npz", {"a": np.array([object()])}, "builtins.dict"),
        ("pickle", {"a": 1}, "builtins.dict"),
        ("unknown", {"a": 1}, "builtins.dict"),
        ("unknown", memoryview(b"abcd")[::2], "builtins.memoryview"),
    ],
)
def test_a_value_without_an_encoding_is_a_type_error_and_writes_nothing(folder, read, field, value, kind):
    with ShardWriter(f"{folder}/%d.tar") as writer:
        with pytest.raises(TypeError, match=f"field '{field}' of sample 'bad': a {kind} has no encoding"):
            writer.write({"__key__": "bad", "a": b"before", field: value})
        writer.write({"__key__": "good", "txt": "x"})
    assert members(read()["0.tar"]) == {"good.txt": b"x"}
    assert writer.total == 1


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ([], "must be a dict"),
        ({"jpg": b""}, "__key__=None: must be the name of the sample"),
        ({"__key__": "", "jpg": b""}, "__key__=''"),
        ({"__key__": 1, "jpg": b""}, "__key__=1"),
        ({"__key__": "a"}, "one field or more besides __key__, in sample 'a'"),
        ({"__key__": "a", "__url__": "x"}, "one field or more"),
        ({"__key__": "a.b", "jpg": b""}, "__key__='a.b': must be a name that readers divide from 'jpg'"),
        ({"__key__": "a", "x/jpg": b""}, "divide from 'x/jpg'"),
        ({"__key__": "a\0b", "jpg": b""}, "divide from 'jpg'"),
        ({"__key__": "__meta__/a", "jpg": b""}, "divide from 'jpg'"),
        ({"__key__": "a", "": b""}, "names such as 'jpg'"),
        ({"__key__": "a", "jpg": b"", "JPG": b""}, "different in lower case, in sample 'a'"),
        ({"__key__": "twice", "txt": b""}, "__key__='twice': must be another one: it is in memory://"),
    ],
)
def test_a_sample_that_readers_would_not_find_is_refused(folder, read, sample, reason):
    with TarWriter(f"{folder}/a.tar") as writer:
        writer.write({"__key__": "twice", "jpg": b"1"})
        writer.write({"__key__": "other", "jpg": b"2"})
        with pytest.raises(exceptions.ConfigError, match=reason):
            writer.write(sample)
    assert list(members(read()["a.tar"])) == ["twice.jpg", "other.jpg"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"pattern": "memory://a/x.tar"}, "one number, such as"),
        ({"pattern": "memory://a/%d%d.tar"}, "one number"),
        ({"pattern": "memory://a/100%/%d.tar"}, "a percent sign in it is written %%"),
        ({"pattern": "memory://a/%s.tar.gz"}, r"must end in \.tar"),
        ({"pattern": "x-%d.tar"}, "not a URL"),
        ({"pattern": 5}, "pattern=5"),
        ({"maxcount": 0}, "maxcount=0: must be a number of samples, 1 or more"),
        ({"maxcount": 1.5}, "maxcount=1.5"),
        ({"maxsize": 0}, "maxsize=0: must be a number of bytes, more than 0"),
        ({"start_shard": -1}, "start_shard=-1"),
        ({"config": {}}, "config=<class 'dict'>: must be a StoreConfig"),
    ],
)
def test_invalid_arguments_are_refused(arguments, reason):
    with pytest.raises(exceptions.ConfigError, match=reason):
        ShardWriter(**{"pattern": "memory://a/%d.tar", **arguments})


def test_shards_end_where_those_of_webdataset_end(folder, read, tmp_path):
    samples = [{"__key__": f"{number:03d}", "bin": bytes(number * 37 % 800)} for number in range(60)]
    options = {"maxcount": 7, "maxsize": 2000, "start_shard": 3}
    with WebdatasetShardWriter(str(tmp_path / "%04d.tar"), verbose=0, **options) as theirs:
        for sample in samples:
            theirs.write(sample)
    with ShardWriter(f"{folder}/%04d.tar", index=False, **options) as ours:
        for sample in samples:
            ours.write(sample)
    expected = {path.name: members(path.read_bytes()) for path in tmp_path.iterdir()}
    assert {name: members(data) for name, data in read().items()} == expected
    assert ours.total == 60


def test_patterns_with_braces_number_shards_too(folder, read):
    with ShardWriter(folder + "/100%/{shard:03d}.tar", maxcount=1, index=False) as writer:
        for key in ("a", "b"):
            writer.write({"__key__": key, "txt": key})
    assert sorted(read()) == ["100%/000.tar", "100%/001.tar"]
    assert repr(writer) == f"<torchobj.ShardWriter {folder}/100%/{{shard:03d}}.tar, 2 shards, 2 samples>"


def test_next_stream_begins_another_shard_and_no_shard_is_empty(folder, read):
    with ShardWriter(f"{folder}/%d.tar", index=False) as writer:
        writer.next_stream()
        writer.write({"__key__": "a", "txt": "x"})
        writer.next_stream()
        writer.next_stream()
        writer.write({"__key__": "a", "txt": "x"})
    assert sorted(read()) == ["0.tar", "1.tar"]
    with pytest.raises(ValueError, match="closed writer"):
        writer.write({"__key__": "b", "txt": "x"})


def test_a_shard_that_could_not_be_written_is_not_created_by_close(bucket, control):
    control.faults({"operation": "UploadPart", "action": {"status": 403, "code": "AccessDenied"}})
    writer = TarWriter(f"{bucket.url}/a.tar", config=bucket.config)
    with pytest.raises(exceptions.StoreError) as raised:
        for number in range(50):
            writer.write({"__key__": f"{number}", "bin": bytes(4 * MIB)})
    with pytest.raises(exceptions.StoreError, match=str(raised.value)[:20]):
        writer.close()
    assert bucket.keys() == []
    assert writer.closed


def test_a_generator_that_is_closed_discards_its_shard_with_a_warning(caplog):
    def shards():
        with ShardWriter("memory://shard-writer/closed-{shard:02d}.tar") as writer:
            while True:
                yield writer.write({"__key__": "a", "txt": "text"})

    generator = shards()
    next(generator)
    generator.close()
    assert "closed-00.tar: the write was aborted because of GeneratorExit; nothing was committed" in caplog.text
    assert not torchobj.Store("memory://shard-writer").exists("closed-00.tar")
