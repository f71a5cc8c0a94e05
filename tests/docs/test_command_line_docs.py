"""The command lines in the documentation exist, with their options."""

import re
import shlex
from pathlib import Path

import pytest

from torchobj.cli.options import Settings
from torchobj.cli.program import program

TEXT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
PROMPTS = re.findall(r"^\$ (.*)$", TEXT, re.MULTILINE)
LINES = re.findall(r"torchobj [a-z]+ .*", "\n".join(PROMPTS))


@pytest.mark.parametrize("line", LINES)
def test_commands_of_the_documentation_can_be_parsed(line):
    command, arguments = program, shlex.split(line.partition("|")[0])[1:]
    context = command.make_context("torchobj", arguments, obj=Settings())
    name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(name, rest, parent=context)


def test_every_command_is_documented():
    names = {name for name in program.list_commands(None) if name not in ("upload", "download")}
    table = TEXT.partition("## Commands")[2].partition("### cp")[0]
    assert names == set(re.findall(r"^\| `([a-z]+)", table, re.MULTILINE))
