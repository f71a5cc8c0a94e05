"""The command line `torchobj`, also `python -m torchobj`. Needs click and rich: `pip install 'torchobj[cli]'`.

`program` is the entry point: it finds commands, and turns errors into one line and an exit code. `options` are those of
every command, `targets` parses URLs, paths and globs, `output` prints rows and JSON. The other modules are the
commands, each imported when it is called. Nothing here imports torch; rich is imported for progress bars only.
"""

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command of `sys.argv` and exits: 0 if it succeeded, 1 after an error, 2 if it was called wrongly."""
    try:
        from torchobj.cli.program import run  # noqa: PLC0415  needs click, which is missing without the extra
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("torchobj: click is not installed: pip install 'torchobj[cli]'")
    run()
