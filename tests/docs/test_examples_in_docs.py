"""Runs the examples in docstrings, in the README, and on the pages of the documentation.

The blocks of a page run one after the other in a folder of its own, with the objects of `fill` in the buckets
`s3://bucket` and `s3://my-bucket`. Blocks of code that uses other libraries (```py) are compiled only.
"""

import ast
import doctest
import importlib
import io
import json
import pkgutil
import re
from pathlib import Path
from urllib.request import urlopen

import numpy
import PIL.Image
import pytest
import torch

import torchobj
import torchobj.checkpoint
from tests.strict.control import Control

pytestmark = pytest.mark.xdist_group("lightning")

ROOT = Path(__file__).parents[2]
MODULES = ["torchobj", *(info.name for info in pkgutil.walk_packages(torchobj.__path__, "torchobj."))]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    """The blocks of a page; those within lists are indented."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(f"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def named(pages):
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


# The import of `forkserver_signals` blocks SIGTERM: in this process, for all later tests.
@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith(("_torchobj", "forkserver_signals"))])
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    options = doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    assert doctest.testmod(module, optionflags=options).failed == 0


def test_the_readme_fits_on_a_screen_and_a_half():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert all(any(line.startswith(text) for line in lines[:40]) for text in ("pip install .", "pip install torchobj"))
    assert "not on the package index yet" in "".join(lines[:12])
    assert all(f"`make {name}`" in "".join(lines[:25]) for name in ("demo", "test", "wheel"))
    assert any(line.startswith("for images, labels in loader") for line in lines[:40])


# Lightning warns of few workers, of deprecated functions of torch, and of its loggers.
@pytest.mark.parametrize("page", named([ROOT / "README.md", ROOT / "examples" / "README.md", ROOT / "CONTRIBUTING.md"]))
def test_links_to_files_of_the_repository_exist(page):
    """Sphinx checks the links of the pages in docs/."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        found = page.parent / target if target else page
        assert found.exists(), target
        headings = (
            [line.lstrip("# ") for line in found.read_text().splitlines() if line.startswith("#")] if anchor else []
        )
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in headings]


@pytest.mark.filterwarnings("ignore", "error:Converting a tensor with requires_grad")
@pytest.mark.parametrize("page", named(page for page in PAGES if blocks(page, "python")))
def test_examples_of_a_page(page, buckets, monkeypatch, tmp_path, fsspec_registry, webdataset_registry):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_PROFILE", "strict")
    monkeypatch.setenv("AWS_ENDPOINT_URL", buckets.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "0")
    names = names_of_pages()
    for number, block in enumerate(blocks(page, "python"), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    for check in CHECKS.get(page.stem, []):
        assert eval(check, names), check


@pytest.mark.parametrize("page", named(page for page in PAGES if blocks(page, "py")))
def test_code_of_other_libraries_is_python(page):
    for block in blocks(page, "py"):
        ast.parse(block)


@pytest.mark.parametrize("page", named(page for page in PAGES if blocks(page, "toml")))
def test_configuration_files_of_a_page_can_be_loaded(page, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHOBJ_CONFIG", "")  # restored afterwards: load_config sets it
    for block in blocks(page, "toml"):
        (tmp_path / "torchobj.toml").write_text(block)
        torchobj.load_config(tmp_path / "torchobj.toml")
        (tmp_path / "torchobj.toml").write_text(f"{block}\nno_such_setting = 1\n")
        with pytest.raises(torchobj.TorchobjError, match="no_such_setting: .* has no such field"):
            torchobj.load_config(tmp_path / "torchobj.toml")


#: What the blocks of a page have computed.
CHECKS = {
    "checkpoints": [
        "restored['step'] == 100",
        "torchobj.CheckpointManager('s3://bucket/runs/7').steps() == [100, 200]",
        "weight.shape == (2, 2)",
        "resumed == 100 and torch.load('restored/optimizer.pt').keys() == optimizer.state_dict().keys()",
    ],
    "weights": [
        "metadata == {'format': 'pt'}",
        "sorted(state) == ['bias', 'weight']",
        "name == 'weight'",
        "bias.shape == (2,)",
        "language_model.dtype == torch.bfloat16",
    ],
    "datasets": ["sorted(texts) == sorted([*(f'text {n}' for n in range(6)), 'text 3'])", "len(mixture) >= 6"],
    "tar-shards": ["len(batch['txt']) == 16", "sorted(labels) == sorted(number % 10 for number in range(300))"],
    "parquet": ["torch.equal(torch.cat(ids), torch.arange(1000))", "len(list(rows)) == 1000"],
    "tokens": ["torch.equal(inputs[:, 1:], targets[:, :-1])", "inputs.shape == (8, 128)", "label == 3"],
    "labels": ["len(found) == 3", "label in (0, 1)", "sample['key'] == 'a'", "len(list(balanced)) == 2"],
    "files": ["text.startswith('epoch 1')", "bytes(part) == b'epoch'", "len(sizes) == 8"],
    "migration": ["sorted(samples) == sorted((f'text {n}', n % 10) for n in range(12))"],
    "frameworks": ["restored['step'] == 100", "steps == ['step-100']"],
    "integrations": ["[sample['txt'] for sample in samples] == [b'text']", "table.num_rows == 2"],
    "monitoring": ['b"torchobj_permits_limit{" in urlopen(f"http://127.0.0.1:{server.server_port}").read()'],
    "configuration": ["[bytes(body) for body in bodies] == [b'1', b'2']"],
}


def names_of_pages():
    """The variables that fragments expect."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(batch):
        optimizer.zero_grad()
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        return loss

    def decode(file):
        return torchobj.decode.image(file)

    loader = torchobj.DataLoader(torch.rand(200, 2), batch_size=1)
    return {"__name__": "__main__", "torch": torch, "torchobj": torchobj, "json": json, "PIL": PIL, "urlopen": urlopen} | {
        "model": model, "optimizer": optimizer, "loader": loader, "train": train, "decode": decode
    }  # fmt: skip


@pytest.fixture(scope="module")
def buckets(strict_server):
    """The strict server, with the objects of the pages."""
    options = torchobj.S3Options(endpoint_url=strict_server.endpoint, profile="strict")
    for name in ("bucket", "my-bucket"):
        Control(strict_server.control).bucket(name)
        fill(torchobj.Store(f"s3://{name}/", config=torchobj.StoreConfig(s3=options)))
    return strict_server


@pytest.fixture
def webdataset_registry(monkeypatch):
    """The openers of webdataset, and its writers, restored afterwards."""
    import copyreg

    import webdataset

    tables = [(table, dict(table)) for table in (webdataset.gopen_schemes, copyreg.dispatch_table)]
    for kind in (webdataset.TarWriter, webdataset.ShardWriter):
        for name in ("__exit__", "write", "close", "finish"):
            if name in vars(kind):
                monkeypatch.setattr(kind, name, vars(kind)[name])
    yield
    for table, before in tables:
        table.clear()
        table.update(before)


def fill(store):
    for number in range(8):
        store.put(f"train/{'dog' if number % 2 else 'cat'}/{number}.jpg", picture(number), metadata={"label": "1"})
        store.put(f"val/{'dog' if number % 2 else 'cat'}/{number}.jpg", picture(number))
        store.put(f"images/{number}.jpg", picture(number))
    store.put("train/cat/0001.png", picture(7, "PNG"))
    rows = [f"{number}.jpg,{number % 2}" for number in range(8)]
    store.put("labels.csv", "\n".join(["image,label", *rows]).encode())
    for ending, content in (("jpg", picture(1)), ("mask.png", picture(1, "PNG")), ("json", b'{"class": 3}')):
        store.put(f"scenes/a.{ending}", content)
    for number in range(2):
        store.put(f"tokens/{number}.bin", numpy.arange(number, 2000, dtype=numpy.uint16).tobytes())
    for name in ("a.txt", "b.txt"):
        store.put(name, name.encode())


def picture(number, kind="JPEG"):
    out = io.BytesIO()
    PIL.Image.new("RGB", (32, 32), (number, 0, 0)).save(out, kind)
    return out.getvalue()
