"""Checks that no modules of a crate import each other in a circle."""

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

CRATES = sorted(path.parent for path in (Path(__file__).parents[1] / "rust").glob("*/src"))
#: Modules that only tests have, and the start of the tests within a module.
TEST_MODULE = re.compile(r"#\[cfg\(test\)\]\s*(?:pub(?:\(\w+\))? )?mod (\w+);")
TESTS = re.compile(r"^#\[cfg\(test\)\]\n(?:#\[.*\n)*mod \w+ \{", re.MULTILINE)
USE = re.compile(r"\b(pub(?:\([\w\s:]+\))?\s+)?use\s+([^;]+);")
PATH = re.compile(r"\b(?:crate|super|self)(?:::\w+)+")

Module = tuple[str, ...]


def paths_of(tree):
    """The paths of a `use` declaration, without braces and new names."""
    depth, begin = 0, 0
    parts = []
    for at, letter in enumerate(tree + ","):
        if letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(tree[begin:at].strip())
            begin = at + 1
    for part in filter(None, parts):
        prefix, brace, rest = part.partition("{")
        if brace:
            yield from (prefix + path for path in paths_of(rest.rpartition("}")[0]))
        else:
            yield re.split(r"\s+as\s", part)[0].removesuffix("::self")


def sources_of(crate):
    """The text of each module without its tests and comments, by the path of the module in the crate."""
    texts = {path.relative_to(crate / "src"): path.read_text() for path in (crate / "src").rglob("*.rs")}
    modules = {}
    for path, text in texts.items():
        parts = path.with_suffix("").parts
        modules[parts[:-1] if parts[-1] in ("mod", "lib") else parts] = text
    tests = {(*module, name) for module, text in modules.items() for name in TEST_MODULE.findall(text)}
    without_tests = {
        module: text
        for module, text in modules.items()
        if not any(module[: len(test)] == test for test in tests) and "tests" not in module
    }
    return {module: strip(text) for module, text in without_tests.items()}


def strip(text):
    tests = TESTS.search(text)
    return re.sub(r"//[^\n]*", "", text[: tests.start()] if tests else text)


def resolve(path, module, modules):
    """The module that a path in `module` leads to, and the name in it; None for a path out of the crate."""
    names = path.replace(" ", "").replace("\n", "").split("::")
    if names[0] == "crate":
        base: Module = ()
        names = names[1:]
    elif names[0] in ("self", "super"):
        base = module
        while names and names[0] in ("self", "super"):
            base = base[:-1] if names[0] == "super" else base
            names = names[1:]
    elif (*module, names[0]) in modules:
        base = module
    else:
        return None
    while names and (*base, names[0]) in modules:
        base, names = (*base, names[0]), names[1:]
    return base, names[0] if names else ""


def graph_of(crate):
    """The modules that each module uses. A module that only re-exports names of its children does not use them, and a
    name that is imported from it is one of the child.
    """
    sources = sources_of(crate)
    exported, used = {}, {}
    for module, text in sources.items():
        for public, tree in USE.findall(text):
            for path in paths_of(tree):
                found = resolve(path, module, sources)
                if found and public and found[0] != module:
                    exported[module, found[1]] = found
                elif found:
                    used.setdefault(module, set()).add(found)
        body = USE.sub("", re.sub(r"pub\(in [\w:]+\)", "", text))
        used.setdefault(module, set()).update(
            found for path in PATH.findall(body) if (found := resolve(path, module, sources))
        )
        # A name that a module re-exports and uses itself.
        used[module] |= {
            found for (by, name), found in exported.items() if by == module and re.search(rf"\b{name}\b", body)
        }
    graph = {}
    for module, names in used.items():
        for found in names:
            while found in exported:
                found = exported[found]
            if found[0] != module:
                graph.setdefault(module, set()).add(found[0])
    return graph


def test_there_are_four_crates():
    assert [crate.name for crate in CRATES] == [
        "torchobj-conformance",
        "torchobj-core",
        "torchobj-python",
        "torchobj-store",
    ]


@pytest.mark.parametrize("crate", CRATES, ids=lambda crate: crate.name)
def test_no_modules_of_a_crate_import_each_other_in_a_circle(crate):
    graph = graph_of(crate)
    assert len(graph) > 3
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of modules: {' -> '.join('::'.join(module) or 'lib' for module in error.args[1])}")


def test_a_circle_of_two_modules_is_found(tmp_path):
    source = tmp_path / "crate" / "src"
    source.mkdir(parents=True)
    (source / "lib.rs").write_text("mod one;\nmod two;\npub use one::{One, second as other};\n")
    (source / "one.rs").write_text("use crate::two::{self, Two as T};\n")
    (source / "two.rs").write_text("#[cfg(test)]\nmod tests {\n    use crate::one::One;\n}\n")
    assert graph_of(source.parent) == {("one",): {("two",)}}
    (source / "two.rs").write_text("use super::One;\n")
    with pytest.raises(CycleError):
        TopologicalSorter(graph_of(source.parent)).prepare()
