"""torch's default device is for the tensors of users: datasets keep their own numbers and bytes on the CPU."""

import io
import tarfile

import pyarrow
import pyarrow.parquet
import pytest
import torch

import torchobj


@pytest.fixture(autouse=True)
def on_meta():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.fixture
def folder(tmp_path):
    for number in range(4):
        for suffix in ("txt", "cls"):
            (tmp_path / "objects").mkdir(exist_ok=True)
            (tmp_path / "objects" / f"{number}.{suffix}").write_bytes(b"x" * number)
    with tarfile.open(tmp_path / "0.tar", "w") as shard:
        for number in range(4):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = number
            shard.addfile(member, io.BytesIO(b"x" * number))
    table = pyarrow.table({"url": [f"file://{tmp_path}/objects/{number}.txt" for number in range(4)], "id": range(4)})
    pyarrow.parquet.write_table(table, tmp_path / "0.parquet")
    return tmp_path


class Named(torchobj.ObjectDataset):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __len__(self):
        return 4

    def objects_at(self, index):
        return [torchobj.ObjectRef(f"file://{self.folder}/objects/{index}.txt")]

    def build(self, index, readers):
        return readers[0]


OBJECTS = {"glob": "*.txt"}
MAKERS = {
    "map": lambda folder: torchobj.ObjectMapDataset(f"file://{folder}/objects/", **OBJECTS),
    "iterable": lambda folder: torchobj.ObjectIterableDataset(f"file://{folder}/objects/", shuffle=True, **OBJECTS),
    "named": Named,
    "groups": lambda folder: torchobj.GroupDataset(f"file://{folder}/objects/", {"txt": ".txt", "cls": ".cls"}),
    "folders": lambda folder: torchobj.ImageFolder(f"file://{folder}/", loader=bytes, extensions=(".txt",)),
    "table": lambda folder: torchobj.TableDataset(f"file://{folder}/0.parquet", "url"),
    "tar": lambda folder: torchobj.TarIterableDataset(f"file://{folder}/0.tar", shuffle_buffer=2, uneven="pad"),
    "tar map": lambda folder: torchobj.TarMapDataset(f"file://{folder}/0.tar"),
    "parquet": lambda folder: torchobj.ParquetIterableDataset(f"file://{folder}/0.parquet", columns=["id"]),
    "batches": lambda folder: torchobj.ParquetIterableDataset(f"file://{folder}/", ["id"], 2),
    "mixture": lambda folder: torchobj.interleave(
        [torchobj.TarIterableDataset(f"file://{folder}/0.tar"), range(4)], stopping_strategy="all_exhausted"
    ),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_datasets_are_made_and_read(folder, kind):
    data = MAKERS[kind](folder)
    is_iterable = isinstance(data, torch.utils.data.IterableDataset)
    samples = list(data) if is_iterable else [data[index] for index in range(4)]
    assert len(samples) == {"batches": 2, "mixture": 8}.get(kind, 4)
    if kind == "batches":
        assert [batch["id"].tolist() for batch in samples] == [[0, 1], [2, 3]]
    # torch's own loader does not work with this default device; the workers must have the dataset's numbers.
    torch.set_default_device(None)
    loader = torchobj.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="forkserver")
    assert len(list(loader)) == len(samples)


def test_batches_of_readers_are_on_the_cpu(folder):
    data = MAKERS["map"](folder)
    batch = torch.utils.data.default_collate(data.__getitems__(range(4)))
    assert batch.offsets.tolist() == [0, 0, 1, 3, 6]
    assert [batch[index].tolist() for index in range(4)] == [[120] * number for number in range(4)]
    assert (batch.data.device.type, batch.data.tolist()) == ("cpu", [120] * 6)


def test_the_sampler_yields_its_order():
    assert sorted(torchobj.ElasticDistributedSampler(range(8))) == list(range(8))


def test_a_saved_state_is_loaded_with_its_values():
    weights = torch.arange(3.0, device="cpu")
    torchobj.save({"weights": weights, "step": torch.tensor(7.0, device="cpu")}, "memory://default-device/saved.pt")
    loaded = torchobj.load("memory://default-device/saved.pt")
    assert (loaded["weights"].tolist(), loaded["step"].item()) == ([0.0, 1.0, 2.0], 7.0)
