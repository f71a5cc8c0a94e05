"""The stub and the binary have the same docstrings, for IDEs and for `help`."""

import ast
import inspect
from pathlib import Path

import pytest

import torchobj
from torchobj import _torchobj

STUB = ast.parse(Path(torchobj.__file__).with_name("_torchobj.pyi").read_text())


def definitions(node, owner, prefix=""):
    """Yields each definition of the stub with its run-time object."""
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)) and not child.name.startswith("_"):
            if not hasattr(owner, child.name):
                continue  # For type checkers only, or for another platform.
            thing = inspect.getattr_static(owner, child.name)
            yield f"{prefix}{child.name}", child, getattr(thing, "__func__", thing)
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, thing, f"{child.name}.")


ALL = [pytest.param(node, thing, id=name) for name, node, thing in definitions(STUB, _torchobj)]


@pytest.mark.parametrize(("node", "thing"), ALL)
def test_the_stub_and_the_binary_have_the_same_docstrings(node, thing):
    said = inspect.getdoc(thing)
    assert said
    # Lines of the stub may break elsewhere.
    assert ast.get_docstring(node).split() == said.split()


@pytest.mark.parametrize("kind", [torchobj.Buffer, torchobj.ObjectReader])
def test_docstrings_of_shared_memory_state_its_lifetime(kind):
    assert "lives until" in " ".join(inspect.getdoc(kind).split())
