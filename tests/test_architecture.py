"""Checks the layers of imports, where `unsafe` is allowed, the size of modules, and the cost of importing."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = sorted((ROOT / "torchobj").rglob("*.py"))
RUST = sorted(path for path in (ROOT / "rust").rglob("*.rs") if "/src/" in str(path))

#: The packages and modules of `torchobj` from the bottom, a layer a line: a module imports from its own package and from
#: lower layers.
LAYERS = [
    ["exceptions"],
    ["stateful", "urls"],
    ["config"],
    ["_torchobj"],
    ["_shutdown", "telemetry", "warn_once"],
    ["decode"],
    ["store"],
    ["parquet", "files"],
    ["manifest"],
    ["shards", "workers"],
    ["ranks"],
    ["reading"],
    ["datasets", "fsspec", "wds"],
    ["collate"],
    ["loader"],
    ["checkpoint"],
    ["accelerate", "lightning", "otel", "torch_checkpointing", "transformers"],
    ["s3torchconnector"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

#: Where unsafe is allowed: memory, and system calls around a fork.
UNSAFE = re.compile(r"torchobj-core/src/(arena/|buffer/|fork/(mod|inherited)\.rs)|torchobj-python/src/buffer/")


def module_of(path):
    parts = path.relative_to(ROOT / "torchobj").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PYTHON} | {"_torchobj": ROOT / "torchobj" / "_torchobj.pyi"}


def imports_of(path):
    """The modules of torchobj that a module imports, here or in a function. A package is its `__init__`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torchobj":
            inner = node.module.removeprefix("torchobj").lstrip(".")
            for alias in node.names:
                full = f"{inner}.{alias.name}".lstrip(".")
                yield full if full in MODULES else inner
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("torchobj.") for alias in node.names if alias.name.startswith("torchobj.")
            )


def layer_of(module):
    return module.split(".", maxsplit=1)[0]


def test_each_package_has_a_layer():
    assert {layer_of(name) for name in MODULES if name} == set(LEVEL)


def test_modules_import_only_from_lower_layers():
    for module, path in MODULES.items():
        for name in imports_of(path) if module else ():
            own, other = layer_of(module), layer_of(name)
            assert LEVEL[other] < LEVEL[own] or other == own, f"{module} imports {name}"


def test_no_modules_of_a_package_import_each_other():
    graph = {
        name: {other for other in imports_of(path) if other != name and layer_of(other) == layer_of(name)}
        for name, path in MODULES.items()
        if path.name != "__init__.py"
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_the_top_has_few_modules():
    assert len(list((ROOT / "torchobj").glob("*.py"))) <= 14


def crates_under(crate):
    """Returns the names of the crates that `crate` depends on."""
    done = subprocess.run(
        ["cargo", "tree", "--locked", "--edges", "normal", "--prefix", "none", "-p", crate],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.split()[0] for line in done.stdout.splitlines() if line}


def dependents_of(crate: str) -> set[str]:
    """Returns the names of the crates that depend on `crate` directly."""
    command = ["cargo", "tree", "--locked", "--edges", "normal", "--prefix", "none", "--depth", "1", "--invert", crate]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines() if line} - {crate}


def test_the_core_depends_on_no_python_no_http_and_no_cloud():
    names = crates_under("torchobj-core")
    forbidden = re.compile(r"pyo3|hyper|http|rustls|reqwest|aws|google|torchobj-store|torchobj-python")
    assert not [name for name in names if forbidden.search(name)]
    assert "tokio" in names


def test_the_store_depends_on_no_python():
    names = crates_under("torchobj-store")
    assert not [name for name in names if name.startswith("pyo3")]
    # A single TLS and a single HTTP stack: the SDK's older ones are disabled features.
    assert not names & {"ring", "native-tls", "openssl"}


def test_only_the_crates_of_google_cloud_use_another_http_client():
    google = {"google-cloud-auth", "google-cloud-gax-internal"}
    assert dependents_of("reqwest") == google
    assert dependents_of("tonic") <= {"google-cloud-gax-internal", "google-cloud-storage", "tonic-prost"}
    # hyper supports HTTP/2 because tonic enables it; `http/` has its own HTTP/1.1.
    assert dependents_of("h2") == {"google-cloud-gax-internal", "hyper", "tonic"}


def test_unsafe_is_confined_to_its_modules_and_has_a_safety_comment():
    for path in RUST:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if re.search(r"\bunsafe\b(?!_)", line.split("//")[0]) and "unsafe_code" not in line:
                assert UNSAFE.search(str(path)), f"{path}:{number + 1}"
                if not re.search("unsafe (fn|trait)", line):
                    above = "\n".join(lines[max(0, number - 6) : number + 1])
                    assert "SAFETY" in above, f"{path}:{number + 1}"


def size_of(path):
    lines = path.read_text().splitlines()
    if path.suffix == ".rs":
        tests = [number for number, line in enumerate(lines) if line.startswith("#[cfg(test)]")]
        return tests[0] if tests else len(lines)
    return len(lines)


def test_no_module_is_too_large_and_each_starts_with_a_description():
    for path in (*PYTHON, *RUST):
        assert size_of(path) <= 600, path
        first = path.read_text().split("\n", 1)[0]
        assert first.startswith('"""' if path.suffix == ".py" else "//! "), (path, first)
        assert not re.search(r"utils|helpers|common", path.name), path


def test_importing_and_using_a_store_imports_no_torch():
    script = (
        "import sys, torchobj; s = torchobj.Store('memory://x'); s.put('k', b'v'); s.get_many(['k']);"
        "f = torchobj.open('memory://x/y', 'wb'); f.write(b'z'); f.close(); torchobj.open('memory://x/y').read();"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'torch'; dir(torchobj);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
