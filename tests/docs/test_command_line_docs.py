"""The command lines in the documentation exist, with their options."""

import re
import shlex
from pathlib import Path

import pytest

from torchobj.cli.options import Settings
from torchobj.cli.program import program

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "cli.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = re.findall(
    r"^```(?:console|bash)\n(.*?)^```$", "\n".join(map(Path.read_text, PAGES)), re.DOTALL | re.MULTILINE
)
#: The prompts of examples with output, and the commands of shells; those of `completion` are in a substitution.
PROMPTS = re.findall(r"^(?:\$ |(?=torchobj ))(.*)$", "\n".join(BLOCKS), re.MULTILINE)
LINES = sorted({line for line in re.findall(r"torchobj [a-z]+ .*", "\n".join(PROMPTS)) if "completion" not in line})


@pytest.mark.parametrize("line", LINES)
def test_commands_of_the_documentation_can_be_parsed(line):
    command, arguments = program, shlex.split(line.partition("|")[0], comments=True)[1:]
    context = command.make_context("torchobj", arguments, obj=Settings())
    name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(name, rest, parent=context)


def test_every_command_is_documented():
    names = {name for name in program.list_commands(None) if name not in ("upload", "download")}
    table = TEXT.partition("## Commands")[2].partition("### cp")[0]
    assert names == set(re.findall(r"^\| `([a-z]+)", table, re.MULTILINE))
