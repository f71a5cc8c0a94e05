"""`S3MapDataset` and `S3IterableDataset` take URLs of S3 only; their arguments are those of other datasets, and more."""

import inspect

import pytest

import torchobj
from torchobj.exceptions import ConfigError


@pytest.mark.parametrize("kind", ["MapDataset", "IterableDataset"])
def test_a_dataset_of_s3_names_the_class_that_accepts_other_urls(kind):
    cls = getattr(torchobj, f"S3{kind}")
    for make in (cls, cls.from_prefix, cls.from_objects):
        for url in ("file:///folder/x", "memory://folder/x", "gs://bucket/x", "gcs://bucket/x"):
            with pytest.raises(ConfigError, match=f"scheme .*, expected s3://; use Object{kind}$"):
                make(url)
    for url in ("az://bucket/x", "/folder/x"):
        with pytest.raises(ConfigError, match="expected"):
            cls(url)


@pytest.mark.parametrize("kind", ["MapDataset", "IterableDataset"])
def test_a_dataset_of_s3_names_the_class_that_explains_its_arguments(kind):
    ours, any_scheme = getattr(torchobj, f"S3{kind}"), getattr(torchobj, f"Object{kind}")
    assert inspect.getdoc(ours).startswith(f"An `{any_scheme.__name__}` of `s3://` URLs only, with its arguments.")
    mine, others = (dict(inspect.signature(each).parameters) for each in (ours, any_scheme))
    assert mine.keys() - others.keys() == {"region", "endpoint_url", "endpoint", "s3client_config"}
    assert (mine.pop("allow_empty").default, others.pop("allow_empty").default) == (True, False)
    assert {name: mine[name] for name in others} == others
