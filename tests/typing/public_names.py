# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""Uses the public names as type checkers see them: `make lint` runs mypy and pyright on this file, both strict."""

from collections.abc import Sequence
from typing import Any, assert_type

import torch

from torchobj import (
    AdvancedOptions,
    Buffer,
    CacheOptions,
    CheckpointManager,
    DataLoader,
    ElasticDistributedSampler,
    FileOptions,
    GCSOptions,
    GroupDataset,
    ImageFolder,
    LookaheadBatchSampler,
    Manifest,
    ObjectDataset,
    ObjectInfo,
    ObjectIterableDataset,
    ObjectMapDataset,
    ObjectReader,
    ObjectRef,
    ObjectWriter,
    ParquetIterableDataset,
    PriceOptions,
    S3Checkpoint,
    S3ClientConfig,
    S3Exception,
    S3IterableDataset,
    S3MapDataset,
    S3Options,
    S3Reader,
    S3ReaderConstructor,
    S3Writer,
    ShardWriter,
    Store,
    StoreConfig,
    StoreError,
    TableDataset,
    TarIterableDataset,
    TarMapDataset,
    TorchobjError,
    __version__,
    attach,
    decode,
    files,
    get,
    get_many,
    interleave,
    load,
    load_config,
    metrics,
    open,  # noqa: A004  the builtin's name, as in io and gzip
    save,
    set_memory_budget,
    stream_tensors,
)
from torchobj.collate import RaggedBatch, default_collate, empty
from torchobj.config import GCSCredentials, S3Credentials
from torchobj.datasets.mixing.interleave import IterableInterleaveDataset, MapInterleaveDataset
from torchobj.shards import TarIndex, TarWriter
from torchobj.store import ListPage, UnfinishedUpload
from torchobj.urls import Url, parse_url


def length(reader: ObjectReader) -> int:
    return len(reader.read())


def keys() -> S3Credentials:
    return {"access_key_id": "id", "secret_access_key": "key", "expires_at": None}


def token() -> GCSCredentials:
    return {"token": "token", "expires_at": None}


def datasets() -> None:
    """`transform` determines the type of the samples."""
    mapped = ObjectMapDataset("s3://bucket/", transform=length)
    assert_type(mapped, ObjectMapDataset[int])
    assert_type(mapped[0], int)
    assert_type(ObjectMapDataset[int].from_objects(["file:///a"], transform=length), ObjectMapDataset[int])
    assert_type(ObjectIterableDataset[int].from_prefix("file:///a/", transform=length), ObjectIterableDataset[int])
    assert_type(S3MapDataset("s3://bucket/", transform=length), S3MapDataset[int])
    assert_type(S3MapDataset[int].from_prefix("s3://bucket/", transform=length)[0], int)
    assert_type(S3MapDataset[int].from_objects(["s3://bucket/key"], transform=length)[0], int)
    reader_constructor = S3ReaderConstructor.range_based()
    S3MapDataset[str].from_prefix("s3://bucket/", reader_constructor=reader_constructor)
    for sample in ObjectIterableDataset("s3://bucket/", transform=length, shuffle=True):
        assert_type(sample, int)
    assert_type(S3IterableDataset("s3://bucket/", transform=length), S3IterableDataset[int])
    assert_type(S3IterableDataset[int].from_prefix("s3://bucket/", transform=length), S3IterableDataset[int])
    assert_type(ObjectMapDataset[int].from_prefix("file:///a/", transform=length, limit=3)[0], int)
    assert_type(mapped.manifest, Manifest)
    assert_type(Manifest.from_prefix("s3://bucket/train/", suffixes=".jpg"), Manifest)
    assert_type(Manifest.load("train.parquet"), Manifest)
    assert_type(Manifest.from_urls(["s3://bucket/key"]).save("s3://bucket/train.parquet"), None)
    assert_type(ObjectMapDataset[int].from_manifest("train.parquet", transform=length), ObjectMapDataset[int])
    assert_type(S3MapDataset[int].from_manifest(mapped.manifest, on_change="accept")[0], int)
    ObjectIterableDataset[int].from_manifest("train.parquet", transform=length, shuffle=True, on_error="skip")
    assert_type(mapped.failed_samples, int)


class Pairs(ObjectDataset[tuple[bytes, int]]):
    """A picture and its label."""

    def __len__(self) -> int:
        return 3

    def objects_at(self, index: int) -> Sequence[ObjectRef]:
        """The two objects of a sample."""
        return [ObjectRef(f"s3://bucket/{index}.jpg"), ObjectRef(f"s3://bucket/{index}.txt", start=0, end=4)]

    def build(self, index: int, readers: Sequence[ObjectReader]) -> tuple[bytes, int]:
        """Decodes both objects."""
        picture, label = readers
        return picture.read(), int(label.read())


def loaders() -> None:
    """A loader has torch's arguments, and no others."""
    dataset = Pairs()
    assert_type(dataset[0], tuple[bytes, int])
    sampler = ElasticDistributedSampler(dataset, seed=1)
    loader = DataLoader[RaggedBatch](dataset, 4, sampler=sampler, num_workers=2, pin_memory=True, lookahead=8)
    loader.load_state_dict(loader.state_dict())
    assert_type(loader.report(), str)
    assert_type(loader.log(3, ranks=True), dict[str, float])
    assert_type(loader.stats().as_dict(), dict[str, float])
    assert_type(metrics(), dict[str, float])
    attached = attach(loader, lookahead=4)
    assert_type(attached, DataLoader[RaggedBatch])
    LookaheadBatchSampler(sampler, batch_size=4, dataset=dataset)
    DataLoader[Any](dataset, num_worker=2)  # type: ignore[call-arg]


def stores() -> None:
    """The methods of a store and their return types."""
    config = StoreConfig(
        max_in_flight=32,
        s3=S3Options(region="us-east-1"),
        file=FileOptions(sync=False),
        cache=CacheOptions(folder="/nvme/torchobj", max_bytes=500 << 30),
        prices=PriceOptions(get_per_1000=0.0004),
        advanced=AdvancedOptions(keep_alive_s=5),
    )
    load_config("/etc/torchobj.toml")
    S3Options(credential_provider=keys)
    StoreConfig(gcs=GCSOptions(credential_provider=token, parallel_upload=False))
    store = Store("s3://bucket", config=config)
    buffer = store.get("key")
    assert_type(buffer, Buffer)
    # Also under Python 3.11, which has no __buffer__ protocol for types.
    assert_type(bytes(buffer), bytes)
    memoryview(buffer)
    assert_type(store.get_many(["a", "b"]), list[Buffer])
    assert_type(store.get_many(["a"], into=[bytearray(4)]), list[int])
    ref = ObjectRef("s3://bucket/key", start=0, end=4)
    assert_type(store.get_many([ref, "a"]), list[Buffer])
    assert_type(get_many([ref]), list[Buffer])
    assert_type(get("s3://bucket/key").decode(), str)
    assert_type(store.open("a"), ObjectReader)
    assert_type(store.open("a", "wb"), ObjectWriter)
    assert_type(store.open("a", "r", encoding="latin-1").read(), str)
    assert_type(open("s3://bucket/key", "w").write("text"), int)
    assert_type(get_many([ref], into=[bytearray(4)], return_errors=True), list[Buffer | int | Exception])
    assert_type(store.head("key"), ObjectInfo)
    for page in store.list("prefix/").pages():
        assert_type(page, ListPage)
    for upload in store.unfinished_uploads():
        assert_type(upload, UnfinishedUpload)
    version = store.put("key", buffer, overwrite=False)
    assert_type(version, str)
    store.delete("key", if_version=version)
    get_many(["s3://bucket/key"], config=S3ClientConfig().to_store_config())
    assert_type(parse_url("s3://bucket/key"), Url)


def transfers() -> None:
    """Files and folders, with their attributes."""

    def show(now: files.Progress) -> None:
        assert_type(now.bytes_total, int | None)

    sent = files.upload_file("file", "s3://bucket/key", content_type="text/plain", if_version="1", progress=show)
    assert_type(sent, files.Transfer)
    assert_type(files.download_file(sent.url, "file", version=sent.version, skip_unchanged=True), files.Transfer)
    assert_type(files.upload("folder", "s3://bucket/prefix", glob="*.jpg", metadata={"a": "b"}), files.TreeTransfer)
    assert_type(files.upload_stream([b"bytes"], "s3://bucket/key"), files.Transfer)
    try:
        files.download("s3://bucket/prefix", "folder", progress=show)
    except files.TransferError as error:
        assert_type(error.failures, list[tuple[str, Exception]])
    Store("s3://bucket").upload_file("key", "file", kind="x")  # type: ignore[call-arg]


def decoded(reader: ObjectReader, buffer: Buffer) -> None:
    """Readers, buffers and bytes as images and arrays."""
    assert_type(decode.image(buffer, "L").shape, torch.Size)
    assert_type(decode.text(reader, errors="replace"), str)
    decode.npz(memoryview(b""))
    decode.safetensors(b"")


def collated(samples: list[torch.Tensor]) -> torch.Tensor:
    """A collate function that fills the memory of the batch."""
    default_collate(samples)
    return torch.stack(samples, out=empty((len(samples), 3), dtype=torch.uint8))


def datasets_of_labels(url: str) -> None:
    """Datasets whose samples have labels."""
    assert_type(ImageFolder(url, loader=decode.image).class_to_idx, dict[str, int])
    assert_type(ImageFolder(url).samples[0], tuple[str, int])
    assert_type(GroupDataset(url, {"image": ".jpg"}, transform=len)[0], int)
    assert_type(TableDataset(url, "url", transform=len)[0], int)


def objects_as_files() -> None:
    """Objects as files, and checkpoints."""
    with open("s3://bucket/key") as reader:
        assert_type(reader, S3Reader)
        memoryview(reader)
    with open("s3://bucket/key", "wb", overwrite=False) as writer:
        assert_type(writer, S3Writer)
        assert_type(writer, ObjectWriter)
    checkpoint = S3Checkpoint(region="us-east-1")
    assert_type(checkpoint.reader("s3://bucket/key"), ObjectReader)
    try:
        save({"step": 1}, "s3://bucket/checkpoint.pt")
        load("s3://bucket/checkpoint.pt")
    except S3Exception as error:
        assert_type(error, StoreError)
    except TorchobjError as error:
        assert_type(error.request_id, str | None)


def weights() -> None:
    """Files and folders of safetensors."""
    tensors = {"weight": torch.ones(2)}
    save(tensors, "s3://bucket/model.safetensors", metadata={"format": "pt"})
    save(tensors, "s3://bucket/model/", format="safetensors", max_shard_bytes=5 << 30)
    load("s3://bucket/weights.bin", "cpu", format="safetensors")
    load("s3://bucket/weights.bin", format="gguf")  # type: ignore[arg-type]
    for name, tensor in stream_tensors(["s3://bucket/model/"], device="cuda", keys=["model.layers.0"]):
        assert_type(name, str)
        assert_type(tensor, torch.Tensor)


def steps(model: torch.nn.Module) -> None:
    """Checkpoints by step."""
    manager = CheckpointManager("s3://bucket/run", keep_last=3)
    manager.save(1, {"model": model})
    assert_type(manager.latest(), int | None)


def tables() -> None:
    """Rows of Parquet files."""
    for row in ParquetIterableDataset(
        "s3://bucket/part-{0..9}.parquet", columns=["id"], transform=row_id, shuffle=True
    ):
        assert_type(row, int)


def streams() -> None:
    """Samples of tar shards as streams."""
    urls = ["s3://bucket/train-{000..127}.tar", "s3://bucket/more/"]
    for label in TarIterableDataset(urls, decode={"cls": int}, transform=label_of, shuffle_buffer=1000):
        assert_type(label, int)


def row_id(row: dict[str, int]) -> int:
    """Converts a row."""
    return row["id"]


def mixtures(rows: ParquetIterableDataset[int], images: ObjectMapDataset[int], other: TarMapDataset[int]) -> None:
    """Samples of several datasets."""
    mapped = interleave([images, other], [0.5, 0.5], stopping_strategy="all_exhausted")
    assert_type(mapped, MapInterleaveDataset[int])
    assert_type(mapped[0], int)
    mixed = interleave([rows, images], seed=1, rank=0, world_size=2)
    assert_type(mixed, MapInterleaveDataset[Any] | IterableInterleaveDataset[Any])
    own = IterableInterleaveDataset[int]([rows, images], rank=0, world_size=2)
    own.set_epoch(1)
    for sample in own:
        assert_type(sample, int)
    interleave([images], mode="x")  # type: ignore[call-overload]


def shards() -> None:
    """Tar shards are written sample by sample."""
    config = StoreConfig(s3=S3Options(region="us-east-1"))
    with ShardWriter("s3://bucket/train-%06d.tar", maxcount=1000, config=config) as shard_writer:
        shard_writer.write({"__key__": "0001", "jpg": b"bytes", "cls": 1})
    assert_type(shard_writer.total, int)
    with TarWriter("s3://bucket/one.tar", index=False) as tar_writer:
        assert_type(tar_writer.write({"__key__": "0001", "txt": "text"}), int)


def samples_of_shards() -> None:
    """Samples of tar shards in any order."""
    index = TarIndex.build("s3://bucket/train-{000..127}.tar")
    index.save("s3://bucket/train.index.parquet")
    dataset = TarMapDataset("s3://bucket/train-{000..127}.tar", index, decode={"cls": int}, transform=label_of)
    assert_type(dataset[0], int)
    assert_type(index.sample(0).key, str)
    assert_type(dataset.index.counts(), list[int])


def label_of(sample: dict[str, Any]) -> int:
    """Converts a sample."""
    return int(sample["cls"])


def process() -> None:
    """Settings of the whole process."""
    set_memory_budget(1 << 30)
    assert_type(__version__, str)
