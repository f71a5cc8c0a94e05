"""Tools that `make` needs besides Python packages: a shared build, cargo-deny, pyright, and building and testing a wheel.

`python -m tests.tools environment` prints a name for the environment that pyproject.toml asks for.
`python -m tests.tools requirements [extra]` prints the requirements of the package, with those of one extra or of all.
`python -m tests.tools take` and `built`, before and after cargo, let checkouts share what one of them has built.
`python -m tests.tools cargo-deny` checks licences, bans and sources; it builds cargo-deny once, into the cache.
`python -m tests.tools pyright` checks the types of the examples and public names; it is installed once, into the cache.
`python -m tests.tools licenses` collects the licences of the crates that are linked into the extension, for the wheel.
`python -m tests.tools wheel` builds a manylinux wheel into `dist/` and tries it where there is neither compiler nor Rust.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
import zlib
from pathlib import Path
from typing import Any

from tests.servers.install import cache_directory

ROOT = Path(__file__).resolve().parents[1]
CACHE = cache_directory()

CARGO_DENY = "0.20.2"
PYRIGHT = "1.1.414"

#: The licences of the crates. `license-files` of pyproject.toml puts it beside LICENSE into the wheel.
THIRD_PARTY = ROOT / "LICENSE-THIRD-PARTY.txt"

#: The oldest glibc that the wheel supports: that of Debian 10, RHEL 8 and Ubuntu 20.04.
MANYLINUX = "manylinux_2_28"


def requirements(*selected: str) -> list[str]:
    """Returns the requirements of the package and of the selected extras; of all extras if none is selected."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(each for name in selected or extras for each in extras[name])]


def environment() -> str:
    """Returns a name that changes with the requirements and with the version of Python."""
    return "{:08x}-{}.{}".format(zlib.crc32("\n".join(requirements()).encode()), *sys.version_info[:2])


def _built_units(target: Path) -> dict[str, int]:
    """The times at which cargo last compiled each unit of our crates."""
    units = (target / "release" / ".fingerprint").glob("torchobj-*/invoked.timestamp")
    return {unit.parent.name: unit.stat().st_mtime_ns for unit in units}


def _sources(root: Path) -> dict[str, tuple[str, int]]:
    """The hash and the time of each Rust source of a checkout."""
    return {
        str(source.relative_to(root)): (hashlib.sha256(source.read_bytes()).hexdigest(), source.stat().st_mtime_ns)
        for source in (root / "rust").rglob("*.rs")
    }


def take(root: Path, target: Path) -> None:
    """Makes the sources of this checkout as old as those of which `target` has the build, and the others of a checkout
    that was not the last to build newer.

    cargo compares times only. Those of a clone are new, so it would compile all of them again; and what another checkout
    built after these sources were written, it would take for theirs.
    """
    owner, record = target / "checkout", target / "built.json"
    is_last = owner.exists() and owner.read_text() == str(root)
    found = json.loads(record.read_text()) if record.exists() else {}
    # Nothing was compiled since, such as by a cargo that was not called by make.
    times = found["sources"] if found.get("units") == _built_units(target) else {}
    for name, (digest, _) in _sources(root).items():
        built_digest, modified_ns = times.get(name, (None, 0))
        if digest == built_digest:
            os.utime(root / name, ns=(modified_ns, modified_ns))
        elif not is_last:
            (root / name).touch()
    target.mkdir(parents=True, exist_ok=True)
    owner.write_text(str(root))


def built(root: Path, target: Path) -> None:
    """Records the sources that were built, for `take`."""
    new = target / f"built.json.{os.getpid()}"
    new.write_text(json.dumps({"units": _built_units(target), "sources": _sources(root)}))
    new.replace(target / "built.json")


def cargo_deny() -> None:
    """Checks licences, bans and sources."""
    root = CACHE / f"cargo-deny-{CARGO_DENY}"
    if not (root / "bin" / "cargo-deny").exists():
        print(f"building cargo-deny {CARGO_DENY}, once", flush=True)
        command = ["cargo", "install", "--quiet", "--locked", "--root", str(root), f"cargo-deny@{CARGO_DENY}"]
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"CARGO_TARGET_DIR": str(root / "target")})
        shutil.rmtree(root / "target")
    # cargo-deny also reads crates for other platforms, which no build has fetched.
    subprocess.run(["cargo", "fetch", "--quiet", "--locked"], cwd=ROOT, check=True)
    checks = ["licenses", "bans", "sources"]
    command = [str(root / "bin" / "cargo-deny"), "--offline", "--log-level", "error", "--config", "rust/deny.toml"]
    subprocess.run([*command, "check", "--hide-inclusion-graph", *checks], cwd=ROOT, check=True)


def pyright() -> None:
    """Checks the types of the examples and of the public names, as an IDE with pyright does."""
    root = CACHE / f"pyright-{PYRIGHT}"
    if not (root / "ready").exists():
        print(f"installing pyright {PYRIGHT}, once", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(root)], check=True)
        # The package includes the Node.js that pyright needs.
        install = [str(root / "bin" / "python"), "-m", "pip", "install", "--quiet", f"pyright[nodejs]=={PYRIGHT}"]
        subprocess.run(install, check=True)
        (root / "ready").touch()
    command = [str(root / "bin" / "pyright"), "--warnings", "--pythonpath", sys.executable, "--pythonversion", "3.11"]
    environment = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    subprocess.run([*command, "examples", "tests/typing"], cwd=ROOT, env=environment, check=True)


def crates() -> list[dict[str, Any]]:
    """Returns the packages of cargo that the extension is made of on this machine, without our own."""
    version = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    host = version.partition("host: ")[2].split()[0]
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", host]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    packages = {package["id"]: package for package in found["packages"]}
    needs = {
        node["id"]: [need["pkg"] for need in node["deps"] if any(kind["kind"] is None for kind in need["dep_kinds"])]
        for node in found["resolve"]["nodes"]
    }
    ids: set[str] = set()
    new = [id_ for id_, package in packages.items() if package["name"] == "torchobj-python"]
    while new:
        ids.add(id_ := new.pop())
        new += [need for need in needs[id_] if need not in ids]
    return sorted((packages[id_] for id_ in ids if packages[id_]["source"]), key=lambda package: package["name"])


def licenses() -> None:
    """Writes the licences of the crates, each text once, after the crates that it applies to."""
    texts: dict[str, tuple[str, list[str]]] = {}
    for package in crates():
        folder, title = Path(package["manifest_path"]).parent, f"{package['name']} {package['version']}"
        # Also those of C sources that a crate contains.
        files = [file for pattern in ("*", "*/*") for file in sorted(folder.glob(pattern)) if file.is_file()]
        files = [file for file in files if re.match(r"(un)?licen[cs]e|copying|notice", file.name, re.IGNORECASE)]
        named = [file.read_text(errors="replace").strip() for file in files if file.suffix not in (".py", ".rs")]
        for text in named or [f"{package['license']}, {package['repository']}; it has no file with the text"]:
            texts.setdefault(" ".join(text.split()), (text, []))[1].append(title)
    sections = (f"{', '.join(sorted(set(titles)))}\n\n{text}\n" for text, titles in texts.values())
    THIRD_PARTY.write_text(f"\n{'=' * 80}\n\n".join(["The extension module contains these crates.\n", *sections]))


def wheel() -> None:
    """Builds a manylinux wheel and tests it."""
    licenses()
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    maturin = [sys.executable, "-m", "maturin", "build", "--out", "dist", "--zig"]
    # The linker, zig, is a package of the same environment.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([*maturin, "--compatibility", MANYLINUX], cwd=ROOT, env=environment, check=True)
    [built] = (ROOT / "dist").glob("*.whl")
    assert any(name.endswith(THIRD_PARTY.name) for name in zipfile.ZipFile(built).namelist()), "it has no licences"
    print(f"built {built.relative_to(ROOT)}, {built.stat().st_size / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory() as folder:
        try_wheel(built, Path(folder))


def try_wheel(built: Path, folder: Path) -> None:
    """Installs a wheel into a new environment and uses it without a compiler and without Rust on the PATH."""
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    environment = {"PATH": str(folder / "empty"), "HOME": str(folder), "PIP_NO_INDEX": "1"}
    for tool in ("cargo", "rustc", "cc", "gcc", "clang", "make"):
        assert shutil.which(tool, path=environment["PATH"]) is None
    # torch is half a gigabyte: only what works without torch is tested, and torch itself needs no compiler.
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(built)]
    subprocess.run(install, env=environment, check=True)
    script = (
        "import torchobj; store = torchobj.Store('memory://wheel'); store.put('k', b'it works');"
        "print(torchobj.__version__, bytes(store.get('k')).decode(), torchobj.__file__)"
    )
    subprocess.run([str(python), "-c", script], env=environment, cwd=folder, check=True)


if __name__ == "__main__":
    if sys.argv[1] == "environment":
        print(environment())
    elif sys.argv[1] == "requirements":
        print(*requirements(*sys.argv[2:]), sep="\n")
    elif sys.argv[1] in ("take", "built"):
        {"take": take, "built": built}[sys.argv[1]](ROOT, Path(os.environ["CARGO_TARGET_DIR"]))
    else:
        {"cargo-deny": cargo_deny, "licenses": licenses, "pyright": pyright, "wheel": wheel}[sys.argv[1]]()
