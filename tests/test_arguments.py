"""Arguments of a wrong type raise an error that names the argument and what it must be."""

import pytest

import torchobj
from torchobj.exceptions import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"glob": 3}, "glob=3: must be a pattern"),
        ({"suffixes": 3}, "suffixes=3: must be a string or a list of strings"),
        ({"suffixes": [3]}, r"suffixes=\[3\]: must be a string or a list of strings"),
        ({"limit": "3"}, "limit='3': must be 1 or more"),
        ({"limit": 0}, "limit=0: must be 1 or more"),
        ({"limit": True}, "limit=True: must be 1 or more"),
        ({"transform": "x"}, "transform='x': must be callable, or None"),
    ],
)
@pytest.mark.parametrize("kind", [torchobj.ObjectMapDataset, torchobj.ObjectIterableDataset])
def test_arguments_of_a_dataset(kind, arguments, message):
    with pytest.raises(ConfigError, match=message):
        kind("memory://arguments/", **arguments)


def test_the_reader_constructor():
    for create in (torchobj.ObjectMapDataset.from_prefix, torchobj.ObjectIterableDataset.from_objects):
        with pytest.raises(ConfigError, match="reader_constructor='x': must be from S3ReaderConstructor, or None"):
            create("memory://arguments/a", reader_constructor="x")


@pytest.mark.parametrize(
    "arguments", [{"seed": "x"}, {"num_replicas": 1.5, "rank": 0}, {"num_replicas": 2, "rank": "0"}]
)
def test_arguments_of_a_sampler(arguments):
    with pytest.raises(ConfigError, match="must be an int"):
        torchobj.ElasticDistributedSampler(range(3), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metadata": {"a": 1}}, "metadata: must be a dict whose keys and values are str"),
        ({"metadata": ["a"]}, "metadata: must be a dict"),
        ({"content_type": 3}, "content_type: must be a str"),
    ],
)
def test_attributes_of_an_object(arguments, message):
    with pytest.raises(TypeError, match=message):
        torchobj.Store("memory://arguments").put("a", b"", **arguments)


def test_objects_to_read():
    with pytest.raises(TypeError, match="must be a key, a URL or an ObjectRef, not <class 'int'>"):
        torchobj.Store("memory://arguments").get_many([3])
