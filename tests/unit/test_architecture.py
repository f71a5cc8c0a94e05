"""The house: who may know whom, where `unsafe` stands, how large rooms are, and what importing costs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = sorted((ROOT / "torchobj").rglob("*.py"))
RUST = sorted(path for path in (ROOT / "rust").rglob("*.rs") if "/src/" in str(path))

#: From below: a room imports from rooms above it in this list only.
LAYERS = [
    ["exceptions", "stateful"],
    ["config.checks", "urls"],
    ["config.options"],
    ["config.store"],
    ["config.s3_client"],
    ["config"],
    ["_torchobj"],
    ["_process", "checkpoint.memory", "memory"],
    ["buffers"],
    ["store"],
    [
        "checkpoint.archive",
        "checkpoint.clock",
        "checkpoint.collector",
        "checkpoint.files",
        "checkpoint.keys",
        "checkpoint.ranges",
        "checkpoint.refusal",
    ],
    ["checkpoint.filling", "checkpoint.pickling", "checkpoint.ranks", "checkpoint.selection", "checkpoint.staging"],
    ["checkpoint.outline", "checkpoint.plan", "checkpoint.records"],
    ["checkpoint.load", "checkpoint.save"],
    [
        "datasets.errors",
        "datasets.handover",
        "datasets.ragged",
        "datasets.readers",
        "datasets.share",
        "datasets.unannounced",
        "datasets.workers",
    ],
    ["datasets.rendezvous", "datasets.shared", "datasets.source"],
    ["datasets.listing"],
    ["datasets.ahead", "datasets.base"],
    ["datasets.map", "datasets.iterable", "datasets.objects", "checkpoint.s3"],
    ["checkpoint.dcp.limits"],
    [
        "checkpoint.dcp.asking",
        "checkpoint.dcp.foreign",
        "checkpoint.dcp.item",
        "checkpoint.dcp.manifest",
        "checkpoint.dcp.metadata",
        "checkpoint.dcp.place",
        "checkpoint.dcp.prefix",
        "checkpoint.dcp.slices",
    ],
    ["checkpoint.dcp.attempt", "checkpoint.dcp.file", "checkpoint.dcp.wanted"],
    ["checkpoint.dcp.contents", "checkpoint.dcp.sweeping", "checkpoint.dcp.transfer", "checkpoint.dcp.writing"],
    ["checkpoint.dcp.wave", "checkpoint.dcp.writer"],
    ["checkpoint.dcp.reading", "checkpoint.removal"],
    ["checkpoint.dcp.reader"],
    ["dcp"],
    ["loader.claims", "loader.hints", "loader.nested", "loader.packing", "loader.permutation", "loader.stats"],
    ["loader.tracking"],
    ["loader.iterables", "loader.report", "loader.sampler", "loader.state"],
    ["loader.batches"],
    ["loader.lookahead"],
    ["loader.batch_sampler"],
    ["loader.mixin"],
    ["loader.attaching", "loader.loader"],
    ["loader.callback"],
    ["fsspec_files"],
    ["fsspec"],
    ["lightning"],
    ["checkpoint.commit_format", "checkpoint.handle", "checkpoint.retention", "checkpoint.rng"],
    ["checkpoint.commits"],
    ["checkpoint.admission", "checkpoint.leftovers", "checkpoint.snapshot"],
    ["checkpoint.rank_states"],
    ["checkpoint.divided", "checkpoint.matching", "checkpoint.restoring"],
    ["checkpoint.sharded"],
    ["checkpoint.saving"],
    ["checkpoint.manager"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

#: Where unsafe may stand: memory, and what a fork needs of the system.
UNSAFE = re.compile(r"torchobj-core/src/(arena/|buffer/|fork/mod\.rs)|torchobj-python/src/buffer/")


def module_of(path):
    return ".".join(path.relative_to(ROOT / "torchobj").with_suffix("").parts)


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torchobj":
            inner = node.module.removeprefix("torchobj").lstrip(".")
            for alias in node.names:
                full = f"{inner}.{alias.name}".lstrip(".")
                yield full if full in LEVEL else inner
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("torchobj.") for alias in node.names if alias.name.startswith("torchobj.")
            )


@pytest.mark.parametrize("path", [path for path in PYTHON if path.name != "__init__.py"], ids=module_of)
def test_imports_look_down_only(path):
    mine = LEVEL[module_of(path)]
    for name in imports_of(path):
        assert name in LEVEL, f"{name} has no place in the layers"
        assert LEVEL[name] < mine or (LEVEL[name] == mine and name == "urls"), f"{module_of(path)} imports {name}"


def crates_under(crate):
    """Names of the crates that `crate` is built of."""
    done = subprocess.run(
        ["cargo", "tree", "--locked", "--edges", "normal", "--prefix", "none", "-p", crate],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.split()[0] for line in done.stdout.splitlines() if line}


def test_the_core_knows_no_python_no_http_and_no_cloud():
    names = crates_under("torchobj-core")
    forbidden = re.compile(r"pyo3|hyper|http|rustls|reqwest|aws|google|torchobj-store|torchobj-python")
    assert not [name for name in names if forbidden.search(name)]
    assert "tokio" in names


def test_the_store_knows_no_python():
    names = crates_under("torchobj-store")
    assert not [name for name in names if name.startswith("pyo3")]
    # One TLS and one HTTP stack: the SDK's older ones are features that are left out.
    assert not names & {"ring", "native-tls", "openssl", "reqwest", "h2"}


def test_unsafe_stands_where_it_may_and_says_why():
    for path in RUST:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if re.search(r"\bunsafe\b(?!_)", line.split("//")[0]) and "unsafe_code" not in line:
                assert UNSAFE.search(str(path)), f"{path}:{number + 1}"
                if "unsafe fn" not in line:
                    above = "\n".join(lines[max(0, number - 6) : number + 1])
                    assert "SAFETY" in above, f"{path}:{number + 1}"


def size_of(path):
    lines = path.read_text().splitlines()
    if path.suffix == ".rs":
        tests = [number for number, line in enumerate(lines) if line.startswith("#[cfg(test)]")]
        return tests[0] if tests else len(lines)
    return len(lines)


@pytest.mark.parametrize("path", [*PYTHON, *RUST], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_room_is_too_large_and_each_says_what_it_is_for(path):
    assert size_of(path) <= 400
    first = path.read_text().split("\n", 1)[0]
    assert first.startswith('"""' if path.suffix == ".py" else "//! "), first
    assert not re.search(r"utils|helpers|common", path.name)


def test_importing_and_using_a_store_imports_no_torch():
    script = (
        "import sys, torchobj; s = torchobj.Store('memory://x'); s.put('k', b'v'); s.get_many(['k']);"
        "f = torchobj.open('memory://x/y', 'wb'); f.write(b'z'); f.close(); torchobj.open('memory://x/y').read();"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'torch'; dir(torchobj);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_every_public_name_can_be_had():
    script = "import torchobj; [getattr(torchobj, name) for name in torchobj.__all__]; torchobj.nothing"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert "module 'torchobj' has no attribute 'nothing'" in done.stderr
