"""The command line `torchobj`, also `python -m torchobj`. Needs click and rich: `pip install 'torchobj[cli]'`.

`program` is the entry point and has the table of commands, `streams` the standard streams. `options` are those of every
command, and the errors that end one; `targets` parses URLs, paths and globs, `output` prints rows and JSON, `progress`
the progress, by `bars` on a terminal. `objects` lists and reads, `removing` deletes; `transfers` copies, moves and
synchronizes what `transfer_plan` selects, by `transfer_run`; `datasets` prepares manifests and shards; `checkpoints`,
`bench` and the package `doctor` are commands; `machine` finds versions and limits. Each is imported when it is called.
Nothing imports torch; rich is imported for progress bars only.
"""

import sys

from torchobj.cli.streams import open_streams

__all__ = ["main"]


def main() -> None:
    """Runs the command of `sys.argv` and exits: 0 if it succeeded, 1 after an error, 2 if it was called wrongly."""
    open_streams()
    try:
        from torchobj.cli.program import run  # noqa: PLC0415  needs click, which is missing without the extra
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        if sys.argv[1:] == ["--versions"]:
            # A bug report may come from an installation without the extra.
            from torchobj.cli import machine  # noqa: PLC0415  of no other command

            machine.print_report()
            return
        sys.exit("torchobj: click is not installed: pip install 'torchobj[cli]'")
    run()
