"""Checkpoints that other versions of torch wrote load here; ours load there."""

import subprocess
from pathlib import Path

import pytest

import torchobj
from tests.golden import make_golden

pytestmark = pytest.mark.filterwarnings("ignore:Validating sparse tensor")

FOLDER = Path(make_golden.__file__).parent


@pytest.mark.parametrize("file", sorted(FOLDER.glob("torch-*.pt")), ids=lambda file: file.name)
@pytest.mark.parametrize("weights_only", [True, False])
def test_files_of_other_versions_load(bucket, file, weights_only):
    bucket.boto.upload_file(str(file), bucket.name, file.name)
    expected = make_golden.legacy() if "legacy" in file.name else make_golden.golden()
    url = f"{bucket.url}/{file.name}"
    loaded = torchobj.load(url, weights_only=weights_only, config=bucket.config)
    assert make_golden.differences(expected, loaded) == []
    assert loaded["tied"]["encoder"] is loaded["tied"]["decoder"]
    assert loaded["row"].untyped_storage().data_ptr() == loaded["base"].untyped_storage().data_ptr()
    some = torchobj.load(url, keys=["dtypes", "row"], config=bucket.config)
    assert make_golden.differences({name: expected[name] for name in ("dtypes", "row")}, some) == []


def test_there_are_files_of_the_oldest_torch_that_is_supported_and_of_a_new_one():
    names = {file.name for file in FOLDER.glob("torch-*.pt")}
    assert {"torch-2.6.0.pt", "torch-2.6.0-legacy.pt", "torch-2.15.0.pt", "torch-2.15.0-legacy.pt"} <= names


@pytest.mark.matrix
@pytest.mark.parametrize("checksum", [True, False])
def test_ours_load_under_an_old_torch(tmp_path, old_python, checksum):
    torchobj.save(make_golden.golden(), f"file://{tmp_path}/ours.pt", checksum=checksum)
    command = [old_python, str(FOLDER / "make_golden.py"), "check", str(tmp_path / "ours.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
