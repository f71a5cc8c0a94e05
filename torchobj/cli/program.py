"""The program `torchobj`: its commands, which are imported when they are called, and how the process ends."""

import contextlib
import importlib
import os
import signal
import stat
import sys
import time
from typing import NoReturn

import click

from torchobj import _shutdown, _torchobj
from torchobj.cli.completion import register
from torchobj.cli.options import BROKEN_PIPE, Settings, Terminated, interrupted_code, shared_options
from torchobj.cli.output import escaped
from torchobj.cli.streams import is_pipe_broken

#: Signals that end a command, after its uploads were aborted.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: Time after which an interrupted command says what it waits for.
_QUIET_S = 1.0

#: Modules of the commands, in the order of the help.
_COMMANDS = {
    "ls": "objects:ls",
    "du": "objects:du",
    "cp": "transfers:cp",
    "upload": "transfers:cp",
    "download": "transfers:cp",
    "sync": "transfers:sync",
    "mv": "transfers:mv",
    "rm": "removing:rm",
    "head": "objects:head",
    "cat": "objects:cat",
    "scan": "objects:scan",
    "uploads": "removing:uploads",
    "manifest": "datasets:manifest",
    "pack": "datasets:pack",
    "index": "datasets:index",
    "checkpoints": "checkpoints:checkpoints",
    "cache": "cache:cache",
    "bench": "bench:bench",
    "doctor": "doctor.command:doctor",
    "completion": "completion:completion",
}

_HELP = """Lists, copies, reads and checks objects of S3 and Google Cloud Storage.

Arguments are URLs, s3://bucket/key, gs://bucket/key or file:///path, or local paths. In keys, * and ? match within a
folder, ** across folders, and {a,b} and [ab] alternatives; quote them. Credentials, regions and endpoints are found as
the SDKs of AWS and Google find them, or in the file that TORCHOBJ_CONFIG names.

Exit codes: 0, all was done; 1, an error; 2, the command was called wrongly; 128 and the number of a signal
that ended it, 130 for Ctrl-C.
"""


class _Program(click.Group):
    """A group that imports a command when it is called or described."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  as in click
        """The names, in the order of the help."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  as in click
        """The command of a name."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(f"torchobj.cli.{module}"), name)
        return command


program = _Program(
    "torchobj",
    help=_HELP,
    params=shared_options(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
click.version_option(_torchobj.__version__, prog_name="torchobj")(program)
register()


def _show_versions(ctx: click.Context, _: click.Parameter, given: bool) -> None:  # noqa: FBT001  as in click
    if given and not ctx.resilient_parsing:
        importlib.import_module("torchobj.cli.machine").print_report()
        ctx.exit()


click.option(
    "--versions",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_versions,
    help="Show the versions and limits that a bug report needs, and exit.",
)(program)


def run() -> NoReturn:
    """Runs the command of `sys.argv` and exits."""
    code: int | str | None = 0
    chosen = Settings()
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup(1) ignores SIGHUP, also for the program that it starts.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminate)
    try:
        program.main(prog_name="torchobj", obj=chosen)
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt as error:
        code = interrupted_code(error)
    except Exception as error:  # noqa: BLE001  outside of a command: in its import or arguments
        with contextlib.suppress(BrokenPipeError):
            chosen.fail(error)
        code = 1
    _end(code if isinstance(code, int) else 0 if code is None else 1, chosen)


def _terminate(number: int, _: object) -> NoReturn:
    for each in (signal.SIGTERM, signal.SIGHUP):
        # A shell and its terminal may both send one. Ctrl-C ends the clean-up.
        signal.signal(each, signal.SIG_IGN)
    for descriptor in (1, 2):
        # Writes to a terminal that was closed would fail before the uploads are aborted.
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    raise Terminated(number)


def _end(code: int, chosen: Settings) -> NoReturn:
    """Ends the process. After a signal it waits for the aborts of its uploads, and for nothing else."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if code == 0 and not isinstance(error, BrokenPipeError):
            with contextlib.suppress(BrokenPipeError):
                chosen.fail(error)
            code = 1
        # What was not written is discarded at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except KeyboardInterrupt as error:
        code = interrupted_code(error)
    if code < 128 and is_pipe_broken():
        # Also where click ends the program, as in a help.
        code = BROKEN_PIPE
    if code not in (*(128 + number for number in _SIGNALS), BROKEN_PIPE):
        sys.exit(code)
    with contextlib.suppress(KeyboardInterrupt):
        _abort_uploads(chosen)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for url, upload_id, _ in _torchobj.finish(0):
        chosen.error(escaped(_shutdown.left_behind(url, upload_id, chosen.given())))
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.flush()
    if code == BROKEN_PIPE:
        # As cat(1): the shell and its parent see that the pipe was closed.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(code)


def _abort_uploads(chosen: Settings) -> None:
    """Waits until what was begun is aborted. A second signal ends the wait."""
    began = time.monotonic()
    _torchobj.end_calls()
    left = _torchobj.finish(_QUIET_S)
    if left and time.monotonic() - began >= _QUIET_S:
        limit_s = _shutdown.FINISH_TIMEOUT_S
        chosen.note(f"torchobj: aborting {len(left)} uploads, for up to {limit_s:.0f} s; Ctrl-C ends at once")
        _torchobj.finish(limit_s - _QUIET_S)
