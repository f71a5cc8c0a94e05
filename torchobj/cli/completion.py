"""`torchobj completion`: the script with which a shell completes commands, options, files and keys."""

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from torchobj.cli.options import Command
from torchobj.cli.output import print_line

__all__ = ["completion"]

_SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command(cls=Command, short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
def completion(shell: str) -> None:
    """Prints the script that makes SHELL complete commands, options, local files and keys of buckets.

    For bash, add `eval "$(torchobj completion bash)"` to ~/.bashrc; likewise for zsh. For fish, write it to
    ~/.config/fish/completions/torchobj.fish.
    """
    root = click.get_current_context().find_root().command
    print_line(_SHELLS[shell](root, {}, "torchobj", "_TORCHOBJ_COMPLETE").source())
