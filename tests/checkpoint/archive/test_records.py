"""A file that `torch.save` did not write is refused, and the error names its format."""

import gzip
import io
import pickle
import tarfile
import zipfile

import numpy
import pytest

import torchobj
from torchobj import exceptions


def written(write):
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def zipped(names):
    def write(buffer):
        with zipfile.ZipFile(buffer, "w") as archive:
            for name in names:
                archive.writestr(name, "x")

    return written(write)


def tarred(buffer):
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("x"))


HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
FILES = {
    "safetensors": (
        len(HEADER).to_bytes(8, "little") + HEADER + b"\0\0\0\0",
        "looks like safetensors: pass format='safetensors'",
    ),
    "pickle 2": (pickle.dumps({"a": 1}, 2), "looks like a plain pickle: "),
    "pickle 5": (pickle.dumps({"a": 1}, 5), "use it for trusted files only"),
    "zip": (
        zipped(["notes.txt", "more.txt"]),
        r"a zip archive of 2 records \(more.txt, notes.txt\), not a file of torch.save",
    ),
    "npz": (written(lambda buffer: numpy.savez(buffer, x=numpy.ones(2))), "a zip archive of numpy arrays"),
    "npy": (written(lambda buffer: numpy.save(buffer, numpy.ones(2))), "looks like a numpy array"),
    "gzip": (gzip.compress(b"x"), "looks like a file compressed with gzip: decompress it first"),
    "tar": (written(tarred), "looks like a tar archive"),
    "xml": (
        b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
        "XML, such as the error response of a server",
    ),
    "html": (b"<!DOCTYPE html><html></html>", "looks like HTML"),
    "json": (b' {"a": 1}', "looks like JSON"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
    "text": (b"just text", "it is not a file of torch.save$"),
    "a length alone": (b"\xff" * 8 + b"{", "it is not a file of torch.save$"),
}


@pytest.mark.parametrize(("body", "message"), FILES.values(), ids=FILES.keys())
def test_a_file_of_another_format_is_refused_and_the_format_is_named(body, message):
    torchobj.Store("memory://foreign").put("file", body)
    with pytest.raises(exceptions.CheckpointError, match=message) as caught:
        torchobj.load("memory://foreign/file")
    assert str(caught.value).startswith("memory://foreign/file: it is ")
