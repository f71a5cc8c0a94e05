"""The libraries of decoders are imported before workers are started: at the first access, or since a worker had to."""

import functools
import pickle
import subprocess
import sys
import types
from multiprocessing import forkserver

import numpy
import PIL.Image
import pytest
import torch

import torchobj
from tests.support import warm_python
from tests.support.decoding import encoded, saved
from tests.support.long_tables import often
from torchobj import decode
from torchobj.decode import images, libraries

URL = "memory://decoders/"


@pytest.mark.parametrize(("module", "package", "function"), [
    ("PIL.Image", "pillow", "pil"), ("PIL.Image", "pillow", "image"), ("safetensors.torch", "safetensors", "safetensors"),
])  # fmt: skip
def test_a_missing_package_is_named_with_its_command(monkeypatch, module, package, function):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        torchobj.exceptions.ConfigError,
        match=rf"torchobj\.decode\.{function} needs {package} .*: pip install {package}",
    ):
        getattr(decode, function)(b"GIF")


@pytest.mark.parametrize("name", decode.__all__)
def test_every_function_can_be_pickled(name):
    function = getattr(decode, name)
    assert isinstance(function, types.FunctionType)
    assert pickle.loads(pickle.dumps(function)) is function
    assert pickle.loads(pickle.dumps(functools.partial(function, mode="L"))).func is function


def test_importing_it_imports_no_library():
    script = "import sys, torchobj; torchobj.decode.json(b'1'); print({'torch', 'numpy', 'PIL'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


def test_the_modules_of_a_forkserver_are_added_to_those_of_the_program(monkeypatch):
    before = ["__main__", "json", "PIL.Image"]
    monkeypatch.setattr(forkserver._forkserver, "_preload_modules", before)
    monkeypatch.setattr(libraries, "_imported", {})
    monkeypatch.setattr(libraries, "FORKED", type(libraries.FORKED)())
    libraries.import_all(libraries.LIBRARIES["pil"])
    libraries.import_for_workers("fork")
    assert forkserver._forkserver._preload_modules == before
    for _ in range(2):
        libraries.import_for_workers("forkserver")
    assert forkserver._forkserver._preload_modules == [*before, "PIL.ImageOps"]


def test_a_module_that_cannot_be_imported_is_left_to_the_decoder(monkeypatch):
    monkeypatch.setattr(libraries, "_imported", {})
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    libraries.import_all(["safetensors.torch", "torchobj.none", "numpy"])
    assert [*libraries._imported] == ["numpy"]


def test_nothing_is_imported_for_spawned_workers_and_without_workers(monkeypatch):
    decoder = decode.json
    monkeypatch.setattr(libraries, "import_all", None)
    libraries.import_for_workers("spawn")
    torchobj.Store(URL).put("one", b"1")
    data = torchobj.ObjectMapDataset(URL, transform=decoder)
    assert list(torchobj.DataLoader(data)) == [torch.tensor([1])]


#: Prints the modules that decoders import in a worker, for each loader and object. Each object is named as its decoder.
IN_WORKERS = """
import functools, sys
import torch
import torchobj

def imported(function, reader):
    before = set(sys.modules)
    function(reader)
    return sorted(set(sys.modules) - before)

if __name__ == "__main__":
    folder, method, *names = sys.argv[1:]
    assert {"torchvision", "PIL", "safetensors"}.isdisjoint(sys.modules)
    settings = {"num_workers": 1, "multiprocessing_context": method, "collate_fn": list}
    for loader in ("DataLoader", "attach"):
        for name in names:
            function = functools.partial(imported, getattr(torchobj.decode, name.partition(".")[0]))
            data = torchobj.ObjectMapDataset.from_objects([f"{folder}/{name}"], transform=function)
            kind = torchobj.DataLoader if loader == "DataLoader" else torch.utils.data.DataLoader
            [modules] = next(iter(torchobj.attach(kind(data, **settings))))
            print(f"{loader} {name}: {modules}", flush=True)
"""


def picture(form):
    return encoded(PIL.Image.new("RGB", (8, 8)), form)


def objects_of_decoders():
    """An object of each decoder, and of each format of image."""
    objects = {f"{name}.{form}": picture(form) for name in ("image", "pil") for form in ("JPEG", "PNG", "WEBP", "GIF")}
    objects["npy.npy"] = saved(numpy.save, numpy.arange(3))
    objects["npz.npz"] = saved(numpy.savez, numpy.arange(3))
    objects["pt.pt"] = saved(lambda file, value: torch.save(value, file), {"a": torch.ones(3)})
    objects["safetensors.safetensors"] = (8).to_bytes(8, "little") + b"{}      "
    return objects | {"text.txt": b"1", "json.json": b"1"}


def printed_by(script, folder, objects, *arguments):
    """What a script prints that reads objects of a folder."""
    for name, data in objects.items():
        (folder / name).write_bytes(data)
    path = folder / "script.py"
    path.write_text(script)
    return warm_python.run([path, folder.as_uri(), *arguments], timeout=200, check=True).stdout


def imported_in_workers(folder, method, objects):
    """The modules that the decoder of each object imports in a worker, by loader and object."""
    printed = printed_by(IN_WORKERS, folder, objects, method, *objects)
    return dict(line.split(": ", 1) for line in printed.splitlines())


@pytest.mark.timeout(300)
def test_workers_import_nothing_that_decoders_need(tmp_path):
    pytest.importorskip("safetensors")
    objects = objects_of_decoders()
    assert {name.partition(".")[0] for name in objects} == {*decode.__all__}
    found = imported_in_workers(tmp_path, "fork", objects)
    assert found == {f"{loader} {name}": "[]" for loader in ("DataLoader", "attach") for name in objects}


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_workers_of_a_forkserver_do_not_import_torchvision(tmp_path):
    found = imported_in_workers(tmp_path, "forkserver", {"image.JPEG": picture("JPEG")})
    assert len(found) == 2
    assert not any("torchvision" in modules for modules in found.values())


#: Prints the modules of other libraries that a worker imports in the first pass and in the second, for one transform.
IN_PASSES = """
import functools, sys
import torchobj
from torchobj.decode import images, libraries

# Not that of the processes which the same server has started.
libraries.FORKED = type(libraries.FORKED)()

def function(reader):
    return torchobj.decode.image(reader)

def by_itself(reader):
    import torchvision.io

    return torchobj.decode.image(reader)

TRANSFORMS = {
    "decoder": lambda: torchobj.decode.image,
    "partial function": lambda: functools.partial(torchobj.decode.image, mode="L"),
    "closure": lambda: (lambda decoder: lambda reader: decoder(reader))(torchobj.decode.image),
    "function": lambda: function,
    "lambda": lambda: lambda reader: torchobj.decode.image(reader),
    "function that imports by itself": lambda: by_itself,
}

def imported(transform, reader):
    before = set(sys.modules)
    transform(reader)
    return sorted(name for name in set(sys.modules) - before if not name.startswith("torchobj."))

if __name__ == "__main__":
    folder, transform = sys.argv[1:]
    assert {"torchvision", "PIL"}.isdisjoint(sys.modules)
    function = functools.partial(imported, TRANSFORMS[transform]())
    data = torchobj.ObjectMapDataset.from_objects([f"{folder}/image.JPEG"], transform=function)
    loader = torchobj.DataLoader(data, num_workers=1, multiprocessing_context="fork", collate_fn=list)
    for _ in range(2):
        print(*(modules for [modules] in loader))
"""


@pytest.mark.parametrize("transform", often(1, ["decoder", "partial function", "closure"]))
def test_what_is_accessed_before_workers_start_is_imported_by_their_parent(tmp_path, transform):
    assert printed_by(IN_PASSES, tmp_path, {"image.JPEG": picture("JPEG")}, transform) == "[]\n[]\n"


@pytest.mark.parametrize("transform", often(1, ["function", "function that imports by itself", "lambda"]))
def test_what_workers_had_to_import_is_imported_by_their_parent_before_the_next_pass(tmp_path, transform):
    first, second = printed_by(IN_PASSES, tmp_path, {"image.JPEG": picture("JPEG")}, transform).splitlines()
    assert "'torchvision.io'" in first
    assert second == "[]"


@pytest.mark.parametrize("attached", [False, True])
def test_the_imports_of_decoders_count_as_startup(monkeypatch, attached):
    now, importing = [100.0], []

    def import_for_workers(start_method):
        # Also called where workers are started, for libraries that start them without `iter`.
        importing.append(start_method)
        now[0] += 50.0 if len(importing) == 1 else 0

    monkeypatch.setattr(libraries, "import_for_workers", import_for_workers)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    torchobj.Store(URL).put("counted/one", b"1")
    data = torchobj.ObjectMapDataset(f"{URL}counted/", transform=decode.json)
    settings = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = torchobj.attach((torch.utils.data.DataLoader if attached else torchobj.DataLoader)(data, **settings))
    assert list(loader) == [torch.tensor([1])]
    assert importing == ["fork"] * 2
    assert (loader.stats().startup_s, loader.stats().elapsed_s) == (50, 50)


@pytest.mark.parametrize("name", decode.__all__)
def test_a_pickle_of_a_decoder_has_its_public_name(name):
    assert f"torchobj.decode\n{name}\n".encode() in pickle.dumps(getattr(decode, name), protocol=0)


def test_a_library_that_fails_at_its_import_is_not_used(monkeypatch, tmp_path):
    for package in ("torchcodec", "torchvision"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ValueError('numpy.dtype size changed')")
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    images.native_decoder.cache_clear()
    try:
        assert images.native_decoder() is None
        assert decode.image(encoded(PIL.Image.new("RGB", (2, 2)), "JPEG")).shape == (3, 2, 2)
    finally:
        images.native_decoder.cache_clear()
