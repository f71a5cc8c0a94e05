"""Runs the examples in docstrings and in the README."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import torchobj
import torchobj.checkpoint

ROOT = Path(__file__).parents[2]
MODULES = ["torchobj", *(info.name for info in pkgutil.walk_packages(torchobj.__path__, "torchobj."))]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

EXAMPLES = (ROOT / "examples" / "README.md").read_text()
CHECKPOINTS = re.findall(
    r"```python\n(.*?)```", EXAMPLES.partition("## Checkpoints")[2].partition("\n## ")[0], re.DOTALL
)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("_torchobj")])
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    options = doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    assert doctest.testmod(module, optionflags=options).failed == 0


def test_the_readme_has_six_examples():
    assert len(BLOCKS) == 6


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[0])
def test_examples_of_the_readme(block, bucket, strict_server, monkeypatch, tmp_path):
    """Runs each block with the README's names in a test bucket."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_PROFILE", "strict")
    monkeypatch.setenv("AWS_ENDPOINT_URL", strict_server.endpoint)
    bucket.boto.create_bucket(Bucket="my-bucket") if "my-bucket" not in [
        entry["Name"] for entry in bucket.boto.list_buckets()["Buckets"]
    ] else None
    for number in range(8):
        bucket.boto.put_object(Bucket="my-bucket", Key=f"train/{number}.jpg", Body=picture(number))
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.filterwarnings("ignore", "error:Converting a tensor with requires_grad")
def test_examples_of_checkpoints(bucket, strict_server, monkeypatch):
    """Runs the blocks one after the other, with the variables that they expect."""
    monkeypatch.setenv("AWS_PROFILE", "strict")
    monkeypatch.setenv("AWS_ENDPOINT_URL", strict_server.endpoint)
    bucket.boto.create_bucket(Bucket="bucket")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torchobj.DataLoader(torch.rand(200, 2), batch_size=1)

    def train(batch):
        optimizer.zero_grad()
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        return loss

    names = {"torchobj": torchobj, "model": model, "optimizer": optimizer, "loader": loader, "train": train}
    for block in CHECKPOINTS:
        exec(compile(block, "examples/README.md", "exec"), names)
    assert names["restored"]["step"] == 100
    manager = torchobj.checkpoint.CheckpointManager("s3://bucket/runs/7")
    assert manager.steps() == [100, 200]
    assert names["weight"].shape == (2, 2)


def test_examples_of_datasets():
    """Runs the blocks one after the other, with the variables that they expect."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "datasets.md").read_text(), re.DOTALL):
        exec(compile(block, "docs/datasets.md", "exec"), names)
    assert len(names["batch"]["txt"]) == 16
    assert sorted(names["labels"]) == sorted(number % 10 for number in range(300))
    assert torch.equal(torch.cat(names["ids"]), torch.arange(1000))
    assert len(list(names["rows"])) == 1000


def picture(number):
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (32, 32), (number, 0, 0)).save(out, "JPEG")
    return out.getvalue()
