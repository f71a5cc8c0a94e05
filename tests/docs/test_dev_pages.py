"""The pages for contributors name files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    "/" + str(path.relative_to(ROOT))
    for folder in ("torchobj", "rust", "tests", "docs")
    for path in (ROOT / folder).rglob("*.*")
]


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "dev").glob("*.md")), ids=lambda page: page.stem)
def test_the_files_that_a_page_names_exist(page):
    named = re.findall(r"`([\w/]+\.(?:py|pyi|rs|md))`", page.read_text())
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in FILES)] == []


def test_the_architecture_names_every_layer_of_the_package():
    text = (ROOT / "docs" / "dev" / "architecture.md").read_text()
    layout = text[text.index("\ntorchobj/ ") : text.index("\nrust/tests.toml")]
    names = {path.stem for path in (ROOT / "torchobj").glob("[a-z]*") if path.suffix in ("", ".py")} - {"py"}
    assert {name for name in names if not re.search(rf"\b{name}\b", layout)} == set()
