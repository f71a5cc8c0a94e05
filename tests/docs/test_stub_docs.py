"""The docstrings of the stub are made from those of the binary, for IDEs."""

import ast
import inspect
import runpy
from pathlib import Path

import pytest

import torchobj
from torchobj import _torchobj

STUB = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "stub.py"))


def test_the_stub_has_the_docstrings_of_the_binary():
    stub = STUB["STUB"].read_text()
    assert STUB["with_docstrings"](stub) == stub, "run make stub"


def test_each_public_definition_of_the_binary_has_a_docstring():
    definitions = list(STUB["definitions"](ast.parse(STUB["STUB"].read_text()), _torchobj))
    assert len(definitions) > 100
    assert [name for name, _, thing in definitions if not inspect.getdoc(thing)] == []


@pytest.mark.parametrize("kind", [torchobj.Buffer, torchobj.ObjectReader])
def test_docstrings_of_shared_memory_state_its_lifetime(kind):
    assert "lives until" in " ".join(inspect.getdoc(kind).split())


def test_a_new_signature_gets_its_docstring():
    stub = "class Buffer:\n    def toreadonly(self) -> int: ...\n\ndef finish(limit_s: float) -> None:\n    ...\n"
    made = STUB["with_docstrings"](stub)
    assert {name for name, _, _ in STUB["definitions"](ast.parse(made), _torchobj)} == {"Buffer", "finish"} | (
        {"Buffer.toreadonly"} if hasattr(torchobj.Buffer, "toreadonly") else set()
    )
    assert ast.get_docstring(ast.parse(made).body[1]) == inspect.getdoc(_torchobj.finish)
    assert STUB["with_docstrings"]("def end_calls() -> None: ...\n").startswith('def end_calls() -> None:\n    """')
