"""Writes the docstrings of the native module into its stub, torchobj/_torchobj.pyi: `make stub`.

The signatures in the stub are written by hand; `make lint` compares them with the binary.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchobj import _torchobj

STUB = Path(__file__).parents[1] / "torchobj" / "_torchobj.pyi"


def definitions(node: Any, owner: Any, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef, Any]]:
    """Yields the name of each public definition of the stub, its node and its object in the binary."""
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)) and not child.name.startswith("_"):
            if not hasattr(owner, child.name):
                continue  # For type checkers only, or for another platform.
            thing = inspect.getattr_static(owner, child.name)
            yield f"{prefix}{child.name}", child, getattr(thing, "__func__", thing)
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, thing, f"{child.name}.")


def with_docstrings(stub: str) -> str:
    """The stub with the docstrings of the binary."""
    lines = stub.split("\n")
    # From the end, so that the lines before keep their numbers.
    for _, node, thing in sorted(definitions(ast.parse(stub), _torchobj), key=lambda each: -each[1].lineno):
        old = node.body[0]
        text = (inspect.getdoc(thing) or "").replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        end = "\n" if "\n" in text else ""
        new = textwrap.indent(f'"""{text}{end}"""', " " * (node.col_offset + 4)).split("\n")
        # A new signature may have its `...` in the same line.
        signature = lines[old.lineno - 1][: old.col_offset].rstrip()
        lines[old.lineno - 1 : old.end_lineno] = [signature, *new] if signature else new
    return "\n".join(lines)


if __name__ == "__main__":
    STUB.write_text(with_docstrings(STUB.read_text()))
