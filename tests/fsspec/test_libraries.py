"""Libraries that read and write through the fsspec file systems: pandas, pyarrow, Hugging Face datasets, torch."""

import multiprocessing

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import s3fs
import torch
import torch.distributed.checkpoint as dcp
from PIL import Image

from torchobj import StoreConfig
from torchobj.fsspec import register

TABLE = pd.DataFrame({"name": ["a", "b", "c"], "value": [1.5, 2.5, 3.5]})


@pytest.fixture
def registered(fsspec_registry):
    """s3:// and gs:// of fsspec are torchobj, without a configuration."""
    register()


@pytest.fixture
def options(bucket, registered, gcs_token):
    """The `storage_options` of s3fs or gcsfs for the server of the bucket."""
    server = bucket.server
    if bucket.url.startswith("gs:"):
        return {"token": server.token, "endpoint_url": server.endpoint}
    return {
        "key": server.access_key,
        "secret": server.secret_key,
        "client_kwargs": {"endpoint_url": server.endpoint, "region_name": "us-east-1"},
    }


@pytest.fixture
def gcs_token(monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)


@pytest.mark.providers("s3", "gs")
def test_pandas_reads_and_writes_with_the_options_of_other_file_systems(bucket, options):
    TABLE.to_csv(f"{bucket.url}/t.csv", index=False, storage_options=options)
    TABLE.to_parquet(f"{bucket.url}/t.parquet", storage_options=options)
    assert bucket.body("t.csv") == b"name,value\na,1.5\nb,2.5\nc,3.5\n"
    assert pd.read_csv(f"{bucket.url}/t.csv", storage_options=options).equals(TABLE)
    assert pd.read_parquet(f"{bucket.url}/t.parquet", storage_options=options).equals(TABLE)
    assert pd.read_parquet(f"tobj+{bucket.url}/t.parquet", storage_options=options).equals(TABLE)
    with pytest.raises(FileNotFoundError):
        pd.read_csv(f"{bucket.url}/no.csv", storage_options=options)


# fsspec does not close the file in which `blockcache` keeps blocks.
@pytest.mark.filterwarnings("ignore:.*FileIO name=:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.providers("s3", "gs")
@pytest.mark.parametrize("caching", ["blockcache", "filecache", "simplecache"])
def test_a_url_is_read_through_a_caching_file_system(bucket, options, tmp_path, caching):
    bucket.write("k", b"0123456789")
    arguments = {bucket.url.partition(":")[0]: options, caching: {"cache_storage": str(tmp_path)}}
    for _ in range(2):
        with fsspec.open(f"{caching}::{bucket.url}/k", **arguments) as file:
            assert (file.seek(3), file.read()) == (3, b"3456789")


@pytest.mark.providers("s3", "gs")
def test_pyarrow_reads_and_writes_datasets(bucket):
    files = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(bucket.files))
    table = pa.table({"part": [0, 0, 1, 2], "value": [1, 2, 3, 4]})
    pq.write_to_dataset(table, f"{bucket.name}/set", partition_cols=["part"], filesystem=files)
    assert {key.split("/")[1] for key in bucket.keys()} == {"part=0", "part=1", "part=2"}
    read = pyarrow.dataset.dataset(f"{bucket.name}/set", filesystem=files, partitioning="hive").to_table()
    assert sorted(read.column("value").to_pylist()) == [1, 2, 3, 4]
    filtered = pq.read_table(f"{bucket.name}/set", filesystem=files, filters=[("part", "=", 0)])
    assert sorted(filtered.column("value").to_pylist()) == [1, 2]
    [folder] = files.get_file_info([f"{bucket.name}/set"])
    assert folder.type == pyarrow.fs.FileType.Directory
    assert len(files.get_file_info(pyarrow.fs.FileSelector(f"{bucket.name}/set", recursive=True))) == 6
    files.delete_dir(f"{bucket.name}/set")
    assert bucket.keys() == []


@pytest.mark.providers("s3", "gs")
def test_pyarrow_takes_a_file_system_and_does_not_open_urls_with_it(bucket, registered):
    register(config=bucket.config)
    files, path = fsspec.filesystem(bucket.url.partition(":")[0]), f"{bucket.name}/set/t.parquet"
    table = pa.table({"value": [1, 2, 3]})
    pq.write_table(table, path, filesystem=files)
    for source in (path, f"{bucket.name}/set"):
        assert pq.read_table(source, filesystem=files).equals(table)
        assert pyarrow.dataset.dataset(source, filesystem=files).to_table().equals(table)
    pyarrow.dataset.write_dataset(table, f"{bucket.name}/new", filesystem=files, format="parquet")
    assert pq.read_table(f"{bucket.name}/new", filesystem=files).equals(table)
    for url in (f"tobj+{bucket.url}/set/t.parquet", f"tobj+{bucket.url}/set"):
        with pytest.raises(pa.ArrowInvalid, match="Unrecognized filesystem type"):
            pq.read_table(url)


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    """Hugging Face datasets, without its server, and with its cache in the folder of the test."""
    module = pytest.importorskip("datasets")
    # HF_HUB_OFFLINE would also refuse the URLs of buckets.
    monkeypatch.setattr(module.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(module.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH", "HF_MODULES_CACHE"):
        monkeypatch.setattr(module.config, name, tmp_path / name)
    module.disable_progress_bars()
    return module


@pytest.mark.providers("s3", "gs")
def test_datasets_loads_tables_and_saves_to_a_bucket(bucket, options, datasets, tmp_path):
    for number in range(2):
        TABLE.to_parquet(f"{bucket.url}/tables/{number}.parquet", storage_options=options)
    settings = {"cache_dir": str(tmp_path / "cache"), "split": "train", "storage_options": options}
    loaded = datasets.load_dataset("parquet", data_files=f"{bucket.url}/tables/*.parquet", **settings)
    assert loaded["value"][:] == [1.5, 2.5, 3.5] * 2
    loaded.save_to_disk(f"{bucket.url}/saved", storage_options=options)
    assert "saved/dataset_info.json" in bucket.keys()
    again = datasets.load_from_disk(f"{bucket.url}/saved", storage_options=options)
    assert again.to_dict() == loaded.to_dict()
    streamed = datasets.load_dataset("parquet", data_files=f"{bucket.url}/tables/0.parquet", streaming=True, **settings)
    assert [row["name"] for row in streamed] == ["a", "b", "c"]


def test_datasets_loads_a_folder_of_images(bucket, registered, datasets, tmp_path):
    register(config=bucket.config)
    files = bucket.files
    for label in ("cat", "dog"):
        for number in range(2):
            with files.open(f"{bucket.url}/images/{label}/{number}.png", "wb") as file:
                Image.new("RGB", (4, 4), (number, 0, 0)).save(file, "png")
    loaded = datasets.load_dataset(
        "imagefolder",
        data_files=f"{bucket.url}/images/**",
        cache_dir=str(tmp_path / "cache"),
        split="train",
        drop_labels=False,
    )
    assert len(loaded) == 4
    assert sorted(image.getpixel((0, 0))[0] for image in loaded["image"]) == [0, 0, 1, 1]


@pytest.mark.providers("s3", "gs")
@pytest.mark.filterwarnings("ignore:fsync not supported for this stream")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_torchs_distributed_checkpoint_takes_urls_of_torchobjs_own_scheme(bucket, registered):
    register(config=bucket.config, schemes=())
    state = {"weight": torch.arange(12.0).reshape(3, 4)}
    dcp.save(state, checkpoint_id=f"tobj+{bucket.url}/step", no_dist=True)
    assert bucket.keys() == ["step/.metadata", "step/__0_0.distcp"]
    loaded = {"weight": torch.zeros(3, 4)}
    dcp.load(loaded, checkpoint_id=f"tobj+{bucket.url}/step", no_dist=True)
    assert torch.equal(loaded["weight"], state["weight"])


def content(files, path):
    return files.cat(path)


@pytest.mark.matrix
def test_a_file_system_with_keys_works_in_a_spawned_worker_that_has_them(bucket, options, monkeypatch):
    files = fsspec.filesystem("s3", **options)
    files.pipe(f"{bucket.name}/k", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(content, (files, f"{bucket.name}/k")) == b"x"
        # Workers of a running pool received the environment.
        assert pool.apply(content, (files, f"{bucket.name}/k")) == b"x"


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_file_system_with_keys_names_the_next_step_in_a_spawned_worker_without_them(bucket, options, method):
    files = fsspec.filesystem("s3", **options)
    files.pipe(f"{bucket.name}/k", b"x")
    context = multiprocessing.get_context(method).Pool(1)
    with context as pool, pytest.raises(PermissionError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        pool.apply(content, (files, f"{bucket.name}/k"))


def test_a_configuration_is_kept_beside_options(bucket, options):
    files = fsspec.filesystem("s3", config=StoreConfig(max_attempts=2), **options)
    assert files._config.max_attempts == 2
    files.pipe(f"{bucket.name}/k", b"x")
    assert bucket.body("k") == b"x"


@pytest.mark.providers("s3")
def test_a_glob_with_a_slash_at_its_end_selects_the_folders_of_s3fs(bucket, options):
    for key in ("s/a", "s/a/b", "s/c/d", "s/e", "s/c/f/g", "s/c/f"):
        bucket.write(key, b"1")
    ours = fsspec.filesystem("s3", **options)
    theirs = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    for pattern in ("s/*/", "s/[ac]/", "s/a*/", "s/**/", "*/", "s/*/*/", "s/?/", "s/x*/", "s/*"):
        path = f"{bucket.name}/{pattern}"
        assert ours.glob(path) == theirs.glob(path), pattern
    folders = ours.glob(f"{bucket.name}/s/*/", detail=True)
    assert {name.rpartition("/")[2]: entry["type"] for name, entry in folders.items()} == {
        "a": "directory",
        "c": "directory",
    }
    assert ours.info(f"{bucket.name}/s/a")["type"] == "file"
