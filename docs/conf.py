"""Builds the documentation site: `make docs`. Each page is also written as Markdown, with an index in llms.txt."""

import inspect
import pkgutil
import re
from pathlib import Path

import sphinx.util.inspect

import torchobj
from torchobj.config.config_base import ConfigBase

project = "torchobj"
author = "the torchobj developers"
copyright = author  # noqa: A001  Sphinx reads this name
release = version = torchobj.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
html_theme = "furo"
html_title = f"torchobj {release}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
# Docstrings have Markdown's `code`.
default_role = "code"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
# External links are checked by `python -m sphinx -b linkcheck`, in the nightly workflow.
linkcheck_timeout = 20

DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (\S+)\n((?: +:.*\n)*)", re.MULTILINE)
TOCTREE = re.compile(r"```\{toctree\}\n.*?```\n\n?", re.DOTALL)
FENCE = re.compile(r"```\{eval-rst\}\n(.*?)```\n", re.DOTALL)


def keep_colons(_app, what, _name, _thing, _options, lines):
    """Restores what napoleon has read as the type of an attribute: the text before a colon in its docstring."""
    types = [line for line in lines if line.startswith(":type: ")] if what in ("attribute", "data", "property") else []
    for line in types:
        lines.remove(line)
        lines[0] = f"{line.removeprefix(':type: ')}: {lines[0]}"


def code_blocks(_app, _what, _name, _thing, _options, lines):
    """Turns Markdown's fenced blocks in docstrings, and code before a letter (`Buffer`s), into reStructuredText."""
    found, language = [], None
    for line in lines:
        fence = re.fullmatch(r"( *)```(\w*)", line)
        if fence and language is None:
            language = fence[1]
            found += [f"{language}.. code-block:: {fence[2] or 'text'}", ""]
        elif fence:
            language = None
            found.append("")
        else:
            found.append(line if language is None else f"   {line}")
    lines[:] = [re.sub(r"(?<![`\w])(`[^`]+`)(?=\w)", r"\1\\ ", line) for line in found]


def fields(_app, what, _name, thing, _options, _arguments, _returns):
    """Returns the arguments of a configuration, of which Sphinx shows those of `__new__` of the base class."""
    if what != "class" or not issubclass(thing, ConfigBase):
        return None
    shown = sphinx.util.inspect.signature(thing.__init__, bound_method=True)
    return sphinx.util.inspect.stringify_signature(
        shown, show_return_annotation=False, unqualified_typehints=True
    ), None


def described(kind, name, options):
    """Returns the Markdown of one directive of autodoc: the signature and the docstring, and those of its members."""
    thing = pkgutil.resolve_name(name)
    text = [f"### `{signature(name, thing)}`", inspect.getdoc(thing) or ""]
    if ":members:" in options and kind in ("class", "exception"):
        for member, attribute in members(thing, inherited=":inherited-members:" in options):
            value = getattr(attribute, "__func__", attribute)
            doc = inspect.getdoc(value)
            if not member.startswith("_") and doc and (callable(value) or isinstance(value, property)):
                text += [f"#### `{signature(f'{thing.__name__}.{member}', value)}`", doc]
    return "\n\n".join(text) + "\n\n"


def members(thing, *, inherited):
    """Yields name and value of the members of a class, and of those of torchobj from which it derives."""
    found = {}
    for kind in thing.__mro__ if inherited else [thing]:
        if kind.__module__.startswith("torchobj"):
            found = vars(kind) | found
    yield from found.items()


def signature(name, thing):
    """Returns the name of a class or function with its arguments, whose types have no modules."""
    try:
        arguments = str(inspect.signature(thing)) if callable(thing) else ""
    except (TypeError, ValueError):
        return name
    return name + re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z_])", "", arguments)


def markdown(source):
    """Returns a page as Markdown: with docstrings in place of directives, and without tables of contents."""
    source = TOCTREE.sub("", source)
    return FENCE.sub(
        lambda block: "".join(described(*found.groups()) for found in DIRECTIVE.finditer(block[1])), source
    )


def write_markdown(app, exception):
    """Writes each page as Markdown beside its HTML, and llms.txt with the title and the first sentence of each."""
    if exception is not None or app.builder.format != "html":
        return
    lines = ["# torchobj", "", f"> {summary(Path(app.srcdir, 'index.md').read_text())}", ""]
    for page in app.env.toctree_includes_order:
        source = Path(app.srcdir, f"{page}.md").read_text()
        target = Path(app.outdir, f"{page}.md")
        target.write_text(markdown(source))
        title = re.search(r"^# (.*)$", source, re.MULTILINE)[1]
        lines.append(f"- [{title}]({page}.md): {summary(source)}")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n")


def summary(source):
    """Returns the first sentence of a page."""
    paragraph = re.search(r"^# .*\n+((?:.+\n)+)", source, re.MULTILINE)[1]
    return re.split(r"(?<=[.]) ", " ".join(paragraph.split()))[0]


def order_pages(app, env):
    """Keeps the pages in the order of the table of contents."""
    found = []

    def visit(page):
        if page not in found:
            found.append(page)
            for child in env.toctree_includes.get(page, []):
                visit(child)

    visit(app.config.root_doc)
    env.toctree_includes_order = found


def setup(app):
    """Connects the functions above."""
    app.connect("autodoc-process-signature", fields)
    app.connect("autodoc-process-docstring", keep_colons)
    app.connect("autodoc-process-docstring", code_blocks)
    app.connect("env-updated", order_pages)
    app.connect("build-finished", write_markdown)
