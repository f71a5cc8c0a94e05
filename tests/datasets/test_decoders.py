"""What decoders import is imported before workers are started, wherever the decoder is."""

import functools
import io
import sys
from multiprocessing import forkserver
from types import SimpleNamespace

import numpy
import PIL.Image
import pytest
import torch

import torchobj
from tests.support import warm_python
from torchobj import decode
from torchobj.datasets import decoders
from torchobj.datasets.containers.tar_stream import TarIterableDataset

URL = "memory://decoders/"


def by_its_module(reader):
    return torchobj.decode.image(reader)


def by_a_helper(reader):
    return by_its_module(reader), 1


def within_a_function(readers):
    return list(map(lambda reader: decode.image(reader), readers))  # noqa: C417  a function within one


def of_an_argument(function):
    def call(reader):
        return function(reader)

    return call


@functools.wraps(by_its_module)
def decorated(*arguments):
    return None


def of_a_default(reader, function=decode.image):
    return function(reader)


def of_text(reader):
    return torchobj.decode.text(reader)


class Transform:
    """A callable whose method decodes."""

    def __call__(self, reader):
        return decode.image(reader)


class Holding:
    """A callable that holds the decoder."""

    def __init__(self, function):
        self.function = function

    def method(self, reader):
        return self.function(reader)


class Building(torchobj.ObjectDataset):
    """A dataset that decodes by itself."""

    def __len__(self):
        return 1

    def objects_at(self, index):
        return [torchobj.ObjectRef(f"{URL}a")]

    def build(self, index, readers):
        return torchobj.decode.image(readers[0])


class Wrapping(torch.utils.data.Dataset):
    """A user's dataset that contains another one."""

    def __init__(self, inner):
        self.parts = {"first": [inner]}


def of_objects(transform):
    return torchobj.ObjectMapDataset(URL, transform=transform, allow_empty=True)


def composed(*transforms):
    from torchvision.transforms import Compose

    return Compose(transforms)


HELD = {
    "the function": lambda: decode.image,
    "a partial function": lambda: functools.partial(decode.image, mode="L"),
    "an argument of a partial function": lambda: functools.partial(map, decode.image),
    "a list": lambda: [str, decode.image],
    "a dict in a tuple": lambda: ({"jpg": decode.image},),
    "Compose": lambda: composed(decode.image, torch.neg),
    "a function by the module": lambda: by_its_module,
    "a function that a function calls": lambda: by_a_helper,
    "a function within a function": lambda: within_a_function,
    "a lambda": lambda: lambda reader: (torchobj.decode.image(reader), reader.key),
    "a closure": lambda: of_an_argument(decode.image),
    "a decorator": lambda: decorated,
    "a default": lambda: of_a_default,
    "a callable": Transform,
    "a bound method": lambda: Holding(decode.image).method,
}

DATASETS = {
    "loader=": lambda: torchobj.ImageFolder(URL, loader=decode.image),
    "transform=": lambda: of_objects(decode.image),
    "the transform of an iterable dataset": lambda: torchobj.ObjectIterableDataset(URL, transform=decode.image),
    "decode=": lambda: torchobj.TarMapDataset(f"{URL}a.tar", decode={"jpg": decode.image, "txt": decode.text}),
    "decode= of an iterable dataset": lambda: TarIterableDataset(f"{URL}a.tar", decode={"jpg": decode.image}),
    "build": Building,
    "a subset": lambda: torch.utils.data.Subset(of_objects(decode.image), [0]),
    "several datasets": lambda: torch.utils.data.ConcatDataset([of_objects(decode.text), of_objects(decode.image)]),
    "a mixture": lambda: torchobj.InterleaveDataset([of_objects(decode.text), of_objects(decode.image)]),
    "a mixture of iterable datasets": lambda: torchobj.InterleaveDataset(
        [TarIterableDataset(f"{URL}a.tar", decode={"jpg": decode.image})]
    ),
    "a dataset of the user": lambda: Wrapping(of_objects(by_a_helper)),
    "two datasets of the user": lambda: Wrapping(Wrapping(of_objects(decode.image))),
}


@pytest.mark.parametrize("make", (HELD | DATASETS).values(), ids=HELD | DATASETS)
def test_decoders_are_found(make):
    assert decode.image in decoders._decoders_in([make()])


@pytest.mark.parametrize("name", decode.__all__)
def test_every_decoder_is_found_and_no_other(name):
    function = getattr(decode, name)
    assert decoders._decoders_in([of_objects(functools.partial(function))]) == {function}
    assert function in decode._MODULES


@pytest.mark.parametrize("make", [
    lambda: of_objects(None), lambda: of_objects(len), lambda: torch.utils.data.TensorDataset(torch.zeros(3)),
    lambda: Wrapping(list(range(10))), lambda: Building, lambda: None, lambda: torch.utils.data.default_collate,
])  # fmt: skip
def test_nothing_is_found_where_nothing_is_decoded(make):
    assert decoders._decoders_in([make()]) == set()


def test_only_the_decoders_that_a_function_names_are_found():
    assert decoders._decoders_in([of_objects(of_text)]) == {decode.text}
    assert decoders._decoders_in([torchobj.ImageFolder(URL)]) == {decode.pil}


class Raising:
    """An object that raises at any access."""

    def __getattribute__(self, name):
        raise RuntimeError(name)


def test_objects_that_raise_and_that_contain_themselves_are_passed_over():
    cycle = [Raising(), Wrapping(None)]
    cycle[1].parts = [cycle, decode.npy]
    assert decoders._decoders_in(cycle) == {decode.npy}


def test_the_search_is_limited():
    samples = [SimpleNamespace(number=number) for number in range(10 * decoders._MAX_OBJECTS)]
    nested = [[[sample] * 3 for sample in samples[at : at + 99]] for at in range(0, 9900, 99)]
    assert decoders._decoders_in([Wrapping(samples), decode.image]) == {decode.image}
    assert decoders._decoders_in([nested]) == set()


def test_the_modules_of_a_forkserver_are_added_to_those_of_the_program(monkeypatch):
    before = ["__main__", "json", "PIL.Image"]
    monkeypatch.setattr(forkserver._forkserver, "_preload_modules", before)
    decoders.import_decoders([of_objects(decode.pil)], "fork")
    assert forkserver._forkserver._preload_modules == before
    for _ in range(2):
        decoders.import_decoders([of_objects(decode.pil)], "forkserver")
    assert forkserver._forkserver._preload_modules == [*before, "PIL.ImageOps"]


def test_a_module_that_cannot_be_imported_is_left_to_the_decoder(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.setattr(decode, "_native_decoder", lambda: None)
    assert decode.import_libraries([decode.safetensors]) == []
    assert decode.import_libraries([decode.image]) == ["torch", "numpy", "PIL.Image", "PIL.ImageOps"]


def test_nothing_is_imported_for_spawned_workers_and_without_workers(monkeypatch):
    monkeypatch.setattr(decode, "import_libraries", None)
    decoders.import_decoders([decode.image], "spawn")
    torchobj.Store(URL).put("one", b"1")
    assert list(torchobj.DataLoader(of_objects(decode.json))) == [torch.tensor([1])]


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


def saved(write):
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def picture(form):
    return saved(lambda file: PIL.Image.new("RGB", (8, 8)).save(file, form))


def objects_of_decoders():
    """An object of each decoder, and of each format of image."""
    objects = {f"{name}.{form}": picture(form) for name in ("image", "pil") for form in ("JPEG", "PNG", "WEBP", "GIF")}
    objects["npy.npy"] = saved(lambda file: numpy.save(file, numpy.arange(3)))
    objects["npz.npz"] = saved(lambda file: numpy.savez(file, a=numpy.arange(3)))
    objects["pt.pt"] = saved(lambda file: torch.save({"a": torch.ones(3)}, file))
    objects["safetensors.safetensors"] = (8).to_bytes(8, "little") + b"{}      "
    return objects | {"text.txt": b"1", "json.json": b"1"}


def imported_in_workers(folder, method, objects):
    """The modules that the decoder of each object imports in a worker, by loader and object."""
    for name, data in objects.items():
        (folder / name).write_bytes(data)
    script = folder / "script.py"
    script.write_text(IN_WORKERS)
    done = warm_python.run([script, folder.as_uri(), method, *objects], timeout=200, check=True)
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


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


@pytest.mark.parametrize("attached", [False, True])
def test_the_imports_of_decoders_count_as_startup(monkeypatch, attached):
    now, importing = [100.0], []

    def import_libraries(functions):
        # Also called where workers are started, for libraries that start them without `iter`.
        importing.append(set(functions))
        now[0] += 50.0 if len(importing) == 1 else 0
        return []

    monkeypatch.setattr(decode, "import_libraries", import_libraries)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    torchobj.Store(URL).put("counted/one", b"1")
    data = torchobj.ObjectMapDataset(f"{URL}counted/", transform=decode.json)
    settings = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = torchobj.attach((torch.utils.data.DataLoader if attached else torchobj.DataLoader)(data, **settings))
    assert list(loader) == [torch.tensor([1])]
    assert importing == [{decode.json}] * 2
    assert (loader.stats().startup_s, loader.stats().elapsed_s) == (50, 50)
