"""What IDEs and `help` show of the public names: arguments, docstrings, and nothing private."""

import contextlib
import dataclasses
import inspect
import re
import subprocess
import sys

import pytest
import torch.utils.data

import torchobj
from tests.support import warm_python
from torchobj.datasets.base import Options
from torchobj.s3torchconnector.datasets import ConnectorOptions

# It imports Lightning.
pytestmark = pytest.mark.xdist_group("lightning")

DATASETS = (torchobj.ObjectMapDataset, torchobj.ObjectIterableDataset)

#: The classes that accept URLs of S3 only, with the class of any scheme.
OF_S3 = [
    (torchobj.S3MapDataset, torchobj.ObjectMapDataset),
    (torchobj.S3IterableDataset, torchobj.ObjectIterableDataset),
]


def parameters_of(kind):
    return dict(inspect.signature(kind).parameters)


def test_the_dataloader_has_torchs_arguments():
    ours, theirs = parameters_of(torchobj.DataLoader), parameters_of(torch.utils.data.DataLoader)
    lookahead = ours.pop("lookahead")
    assert lookahead.kind is inspect.Parameter.KEYWORD_ONLY
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    positional = [name for name in ours if ours[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == [name for name in theirs if theirs[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    # Arguments that torch added after 2.6 may be missing in an older torch.
    assert set(ours) - set(theirs) <= {"in_order"}


def test_a_misspelt_argument_of_the_dataloader_is_a_type_error():
    with pytest.raises(TypeError, match=r"DataLoader\.__init__\(\) got an unexpected keyword argument 'num_worker'"):
        torchobj.DataLoader(range(3), num_worker=2)


def test_an_argument_that_an_older_torch_lacks_is_refused_only_if_passed(monkeypatch):
    original = torch.utils.data.DataLoader.__init__

    def older(self, *args, **kwargs):
        if "in_order" in kwargs:
            raise TypeError("DataLoader.__init__() got an unexpected keyword argument 'in_order'")
        original(self, *args, **kwargs)

    monkeypatch.setattr(torch.utils.data.DataLoader, "__init__", older)
    assert list(torchobj.DataLoader(range(3), batch_size=None)) == [0, 1, 2]
    with pytest.raises(TypeError, match="in_order"):
        torchobj.DataLoader(range(3), in_order=False)


def test_dir_shows_public_names_only_and_each_can_be_imported():
    """Runs in its own process: other tests import submodules."""
    script = (
        "import inspect, torchobj; print(*dir(torchobj)); print(len(inspect.getmembers(torchobj)))\n"
        "for name in torchobj.__all__: getattr(torchobj, name)\n"
        "torchobj.nothing"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    names, members = done.stdout.splitlines()
    assert names.split() == sorted({*torchobj.__all__, "checkpoint", "exceptions"})
    assert members == str(len(names.split()))
    assert "module 'torchobj' has no attribute 'nothing'" in done.stderr


def test_a_budget_that_is_too_small_is_refused():
    with pytest.raises(torchobj.TorchobjError, match=r"budget_bytes=5: must be an int, a number of bytes"):
        torchobj.set_memory_budget(5)


def test_the_names_of_s3torchconnector_are_attributes_that_are_not_listed():
    assert len(torchobj.__all__) <= 46
    for name in torchobj.s3torchconnector.names.__all__:
        assert getattr(torchobj, name) is getattr(torchobj.s3torchconnector.names, name)
        assert name not in dir(torchobj)


def documented(thing):
    """Returns the arguments that the `Args` section of a docstring explains."""
    found = re.search(r"^Args:\n((?: +.*\n?|\n)*)", inspect.getdoc(thing) or "", re.MULTILINE)
    return set(re.findall(r"\w+", " ".join(re.findall(r"^    ([\w, ]+):", found[1], re.MULTILINE)))) if found else set()


def explained():
    """Returns the public classes and functions, and the methods with several arguments."""
    for name in torchobj.__all__:
        value = getattr(torchobj, name)
        if inspect.isclass(value) and (dataclasses.is_dataclass(value) or issubclass(value, (tuple, Exception))):
            continue  # Each of their fields has its own docstring.
        if callable(value):
            yield name, value
    for kind in (*DATASETS, *(kind for kind, _ in OF_S3)):
        yield f"{kind.__name__}.from_prefix", kind.from_prefix
        yield f"{kind.__name__}.from_objects", kind.from_objects
    for name, method in inspect.getmembers(torchobj.Store, inspect.isfunction):
        if not name.startswith("_"):
            yield f"Store.{name}", method


def test_help_explains_every_argument():
    for name, thing in explained():
        assert set(parameters_of(thing)) - {"self"} <= documented(thing), name


def test_region_and_endpoint_are_arguments_of_stores_file_systems_and_the_names_of_s3torchconnector():
    modules = [torchobj, torchobj.checkpoint, torchobj.files, torchobj.fsspec, torchobj.shards]
    public = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}
    public["torchobj.lightning.ObjectCheckpointIO"] = torchobj.lightning.ObjectCheckpointIO
    found = set()
    for name, value in public.items():
        # Native exceptions have no signature.
        with contextlib.suppress(ValueError):
            called = value.__init__ if inspect.isclass(value) else value
            if callable(called) and {"region", "endpoint_url"} & parameters_of(called).keys():
                found.add(name)
    file_systems = {"torchobj.fsspec.ObjectFileSystem", "torchobj.fsspec.GCSFileSystem"}
    datasets = {"torchobj.S3MapDataset", "torchobj.S3IterableDataset"}
    options = {"torchobj.S3Options", "torchobj.GCSOptions"}
    assert found == {"torchobj.Store", *file_systems, *datasets, *options}


@pytest.mark.parametrize("kind", DATASETS)
def test_every_dataset_is_made_from_a_prefix_and_from_objects_of_any_scheme(kind, tmp_path):
    (tmp_path / "a").write_bytes(b"file")
    torchobj.Store("memory://from-objects").put("b", b"memory")
    urls = [(tmp_path / "a").as_uri(), "memory://from-objects/b"]
    read = kind.from_objects(iter(urls), transform=lambda reader: reader.read())
    assert (list(read), [read.manifest.url(index) for index in range(2)]) == ([b"file", b"memory"], urls)
    config = torchobj.StoreConfig(max_attempts=2)
    assert [reader.read() for reader in kind.from_prefix(tmp_path.as_uri(), config=config)] == [b"file"]
    with pytest.raises(torchobj.TorchobjError, match="config=<class 'dict'>: must be a StoreConfig"):
        kind.from_prefix("memory://from-objects/", config={})


@pytest.mark.parametrize("kind", [*DATASETS, *(kind for kind, _ in OF_S3)])
def test_the_classmethods_have_the_keywords_of_the_constructor(kind):
    keywords = parameters_of(kind).keys() - {"source"}
    # The type of `options`, which type checkers read.
    assert keywords <= (Options if kind in DATASETS else ConnectorOptions).__annotations__.keys()
    for create in (kind.from_prefix, kind.from_objects, kind.from_manifest):
        assert parameters_of(create)["options"].kind is inspect.Parameter.VAR_KEYWORD
        with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
            create("s3://bucket/a" if "S3" in kind.__name__ else "gs://bucket/a", nothing=1)


def test_each_option_of_the_datasets_is_a_keyword_of_a_constructor():
    assert Options.__annotations__.keys() == set().union(*map(parameters_of, DATASETS)) - {"source"}


def test_the_keywords_of_the_constructor_have_their_effect_in_the_classmethods():
    store, names = torchobj.Store("memory://keywords"), ["a.bin", "b.bin", "c.txt", "d.bin"]
    for name in names:
        store.put(name, name.encode())
    urls = [f"memory://keywords/{name}" for name in names]

    def name_of(reader):
        return reader.key

    mapped, iterable = torchobj.ObjectMapDataset, torchobj.ObjectIterableDataset
    chosen = {"transform": name_of, "suffixes": ".bin", "limit": 2}
    assert list(mapped.from_prefix("memory://keywords/", **chosen)) == names[:2]
    assert list(iterable.from_prefix("memory://keywords/", glob="?.b*", **chosen)) == names[:2]
    shuffled = {"shuffle": True, "seed": 3, "transform": name_of}
    expected = list(iterable("memory://keywords/", **shuffled))
    assert expected != names
    assert list(iterable.from_prefix("memory://keywords/", **shuffled)) == expected
    assert list(iterable.from_objects(urls, **shuffled)) == expected
    missing = [*urls, "memory://keywords/missing"]
    assert list(iterable.from_objects(missing, transform=name_of, on_error="skip")) == names
    assert mapped.from_objects(missing, transform=name_of, on_error="replace")[4] == names[0]
    for create in (mapped.from_prefix, mapped.from_objects, iterable.from_prefix, iterable.from_objects):
        with pytest.raises(torchobj.TorchobjError, match="on_error='x': must be"):
            create("memory://keywords/a", on_error="x")


def test_modules_are_attributes_and_are_imported_at_their_first_use():
    names = ["collate", "datasets", "fsspec", "lightning", "loader", "wds"]
    code = (
        "import sys, torchobj\n"
        "assert not {'torch', 'fsspec', 'webdataset'} & sys.modules.keys()\n"
        f"for name in {names}:\n"
        "    assert f'torchobj.{name}' not in sys.modules or name in ('fsspec', 'loader'), name\n"
        "    assert getattr(torchobj, name) is sys.modules[f'torchobj.{name}']\n"
        "assert torchobj.checkpoint is sys.modules['torchobj.checkpoint']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_callback_without_its_library_names_the_extra():
    code = (
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "import torchobj\n"
        "try:\n"
        "    torchobj.transformers.LookaheadCallback\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = warm_python.run(["-c", code], check=True)
    assert "torchobj.transformers.LookaheadCallback needs transformers" in done.stdout
    assert "pip install 'torchobj[transformers]'" in done.stdout


def test_metadata_of_objects_is_hashable():
    store = torchobj.Store("memory://hashable")
    store.put("k", b"1", metadata={"label": "cat"})
    listed, head = next(iter(store.list())), store.head("k")
    assert {head: 1}[store.head("k")] == 1
    assert {listed, *store.list()} == {listed}
    assert hash(head._replace()) == hash(head)
