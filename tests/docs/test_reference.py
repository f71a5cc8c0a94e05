"""Every public name has an entry in the reference, and every entry is a public name. Does not run Sphinx."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("lightning")

ROOT = Path(__file__).parents[2]
REFERENCE = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
ENTRIES = re.findall(r"^\.\. (?:auto(?:class|function|exception|data)|py:module):: (\S+)$", REFERENCE, re.MULTILINE)

#: The public modules; those of `torchobj` that are not here serve other modules, and the command line.
MODULES = [
    "torchobj",
    "torchobj.accelerate",
    "torchobj.checkpoint",
    "torchobj.collate",
    "torchobj.s3torchconnector.names",
    "torchobj.config",
    "torchobj.s3torchconnector.dcp",
    "torchobj.s3torchconnector.lightning",
    "torchobj.decode",
    "torchobj.exceptions",
    "torchobj.files",
    "torchobj.fsspec",
    "torchobj.lightning",
    "torchobj.loader",
    "torchobj.manifest",
    "torchobj.otel",
    "torchobj.shards",
    "torchobj.store",
    "torchobj.torch_checkpointing",
    "torchobj.transformers",
    "torchobj.wds",
]
#: Functions and classes of `torchobj.config` that other modules of the package use.
INTERNAL = {"Prefix", "file_for", "resolve", "store_config"}  # fmt: skip
#: Documented as what a method or function returns.
RETURNED = {
    "torchobj.datasets.mixing.interleave.IterableInterleaveDataset",
    "torchobj.datasets.mixing.interleave.MapInterleaveDataset",
    "torchobj.telemetry.table.LoaderStats",
}


def public_names():
    for name in MODULES:
        module = importlib.import_module(name)
        yield from (f"{name}.{each}" for each in module.__all__ if each not in INTERNAL)


def names_of(name):
    """The names of the same object in the public modules: one of them has the entry."""
    last, thing = name.rpartition(".")[2], pkgutil.resolve_name(name)
    return {name} | {
        f"{module}.{last}" for module in MODULES if getattr(importlib.import_module(module), last, None) is thing
    }


def test_every_public_name_has_an_entry():
    missing = [name for name in sorted(public_names()) if not names_of(name) & set(ENTRIES)]
    assert not missing, f"add a directive for {missing} to a page of docs/reference/"


def test_every_public_module_has_an_entry():
    assert {name for name in MODULES if name != "torchobj"} <= set(ENTRIES)


def test_every_entry_exists_once_and_is_public():
    assert len(ENTRIES) == len(set(ENTRIES))
    public = set(public_names()) | RETURNED | set(MODULES)
    for name in ENTRIES:
        assert names_of(name) & public, f"{name} is not public"


def test_public_classes_of_the_stub_have_an_entry():
    stub = ast.parse((ROOT / "torchobj" / "_torchobj.pyi").read_text())
    classes = {node.name for node in stub.body if isinstance(node, ast.ClassDef)}
    public = classes & {name.rpartition(".")[2] for name in public_names()}
    assert {"Buffer", "ObjectReader", "ObjectRef"} <= public
    assert public <= {name.rpartition(".")[2] for name in ENTRIES}
