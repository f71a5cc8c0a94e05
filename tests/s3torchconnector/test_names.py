"""Every public name of s3torchconnector 1.5 exists here, with a compatible signature."""

import importlib
import inspect
import io
import pickle

import pytest
import s3torchconnector
import s3torchconnector.dcp
import torch.utils.data
from s3torchconnector.dcp.s3_prefix_strategy import RoundRobinPrefixStrategy

import torchobj
import torchobj.s3torchconnector.dcp
import torchobj.s3torchconnector.lightning

pytestmark = pytest.mark.xdist_group("lightning")

DATASETS = [
    (cls, method) for cls in ("S3MapDataset", "S3IterableDataset") for method in ("from_prefix", "from_objects")
]
CONSTRUCTORS = ["sequential", "range_based", "dcp_optimized", "default", "get_reader_type_string"]


@pytest.mark.parametrize("name", s3torchconnector.__all__)
def test_the_name_exists(name):
    assert getattr(torchobj, name) is not None
    assert name in {*torchobj.__all__, *torchobj.s3torchconnector.names.__all__}


def assert_takes(ours, theirs, *, optional=(), constructor=None):
    """Checks that ours accepts every call that theirs accepts, and that `optional` can be left out. Ours may pass options
    to a constructor.
    """
    mine = dict(inspect.signature(ours).parameters)
    if constructor is not None and mine.pop("options", None):
        mine |= list(inspect.signature(constructor).parameters.items())[1:]
    for position, (name, parameter) in enumerate(inspect.signature(theirs).parameters.items()):
        assert name in mine, name
        assert mine[name].kind == parameter.kind, name
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            assert list(mine)[position] == name
        if parameter.default is not inspect.Parameter.empty or name in optional:
            assert mine[name].default is not inspect.Parameter.empty, name
        if name not in ("transform", *optional) and parameter.default is not inspect.Parameter.empty:
            assert mine[name].default == parameter.default or "S3" in repr(parameter.default), name
    extra = [name for name in mine if name not in inspect.signature(theirs).parameters]
    assert all(mine[name].default is not inspect.Parameter.empty for name in extra), extra


@pytest.mark.parametrize(("cls", "method"), DATASETS)
def test_datasets_are_created_by_the_same_calls(cls, method):
    ours, theirs = getattr(torchobj, cls), getattr(s3torchconnector, cls)
    # None, the default of enable_sharding, is False with a log line where several ranks read all samples.
    optional = ("region", "enable_sharding")
    assert_takes(getattr(ours, method), getattr(theirs, method), optional=optional, constructor=ours)
    assert issubclass(ours, torch.utils.data.Dataset)
    assert issubclass(torchobj.S3IterableDataset, torch.utils.data.IterableDataset)


@pytest.mark.parametrize("name", ["S3Checkpoint", "S3ClientConfig"])
def test_classes_are_created_by_the_same_calls(name):
    assert_takes(getattr(torchobj, name), getattr(s3torchconnector, name), optional=("region",))


def test_checkpoints_have_the_same_methods():
    for method in ("reader", "writer"):
        assert_takes(getattr(torchobj.S3Checkpoint, method), getattr(s3torchconnector.S3Checkpoint, method))


def test_the_lightning_plugin_has_the_same_calls():
    # Imports Lightning, which takes seconds.
    theirs = importlib.import_module("s3torchconnector.lightning").S3LightningCheckpoint
    ours = torchobj.s3torchconnector.lightning.S3LightningCheckpoint
    assert_takes(ours, theirs, optional=("region",))
    for method in ("save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown"):
        assert_takes(getattr(ours, method), getattr(theirs, method))
    assert isinstance(ours(region="us-east-1"), theirs.__mro__[1])


@pytest.mark.parametrize("method", CONSTRUCTORS)
def test_readers_are_selected_by_the_same_calls(method):
    ours, theirs = getattr(torchobj.S3ReaderConstructor, method), getattr(s3torchconnector.S3ReaderConstructor, method)
    assert_takes(ours, theirs)


def test_kinds_of_readers_have_the_same_names():
    for ours, theirs in ((torchobj.S3ReaderConstructor, s3torchconnector.S3ReaderConstructor),):
        for kind in ("sequential", "range_based", "dcp_optimized", "default"):
            assert ours.get_reader_type_string(getattr(ours, kind)()) == theirs.get_reader_type_string(
                getattr(theirs, kind)()
            )
        assert ours.get_reader_type_string(None) == theirs.get_reader_type_string(None)


def test_readers_and_writers_have_the_same_members():
    for ours, theirs in (
        (torchobj.S3Reader, s3torchconnector.S3Reader),
        (torchobj.S3Writer, s3torchconnector.S3Writer),
    ):
        missing = {name for name in dir(theirs) if not name.startswith("_")} - set(dir(ours))
        assert missing <= {"writelines"}, missing
        assert issubclass(ours, io.BufferedIOBase)


def test_configurations_have_the_same_defaults():
    theirs = s3torchconnector.S3ClientConfig()
    ours = torchobj.S3ClientConfig()
    assert all(getattr(ours, name) == getattr(theirs, name) for name in theirs.__dataclass_fields__)


def test_their_exception_catches_ours():
    with pytest.raises(torchobj.S3Exception):
        torchobj.Store("memory://compat").get("missing")


@pytest.mark.parametrize("name", [*s3torchconnector.dcp.__all__, "RoundRobinPrefixStrategy"])
def test_names_of_distributed_checkpoints_exist_and_are_created_by_the_same_calls(name):
    theirs = getattr(s3torchconnector.dcp, name, RoundRobinPrefixStrategy)
    assert name in torchobj.s3torchconnector.dcp.__all__
    assert_takes(getattr(torchobj.s3torchconnector.dcp, name), theirs)
    missing = {method for method in dir(theirs) if not method.startswith("_")} - set(
        dir(getattr(torchobj.s3torchconnector.dcp, name))
    )
    assert missing <= {"stage", "synchronize_staging", "should_synchronize_after_execute", "close"}, missing


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("DefaultPrefixStrategy", {}),
        ("BinaryPrefixStrategy", {"prefix_count": 5}),
        ("BinaryPrefixStrategy", {"epoch_num": 3, "min_prefix_length": 2, "prefix_count": 9}),
        ("HexPrefixStrategy", {"prefix_count": 300, "min_prefix_length": 1}),
        ("RoundRobinPrefixStrategy", {"user_prefixes": ["a", "b/c"], "epoch_num": 0}),
    ],
)
def test_prefixes_are_the_same(name, arguments):
    ours = getattr(torchobj.s3torchconnector.dcp, name)(**arguments)
    theirs = getattr(s3torchconnector.dcp, name, RoundRobinPrefixStrategy)(**arguments)
    assert [ours(rank) for rank in range(20)] == [theirs(rank) for rank in range(20)]


FILE_SYSTEM_METHODS = [name for name in vars(s3torchconnector.dcp.S3FileSystem) if not name.startswith("_")]


@pytest.mark.parametrize("method", [*FILE_SYSTEM_METHODS, "create_stream", "rename", "rm_file"])
def test_the_file_system_of_a_writer_and_a_reader_has_the_same_methods(method):
    theirs = getattr(s3torchconnector.dcp.S3FileSystem, method)
    for kind in (torchobj.s3torchconnector.dcp.S3StorageWriter, torchobj.s3torchconnector.dcp.S3StorageReader):
        user = kind("us-east-1", "s3://bucket/step 1")
        assert type(user.fs) is torchobj.s3torchconnector.dcp.S3FileSystem
        assert user.path == "s3://bucket/step 1"
        assert list(inspect.signature(getattr(user.fs, method)).parameters) == [
            name for name in inspect.signature(theirs).parameters if name != "self"
        ]
        assert pickle.loads(pickle.dumps(user)).fs is not None
