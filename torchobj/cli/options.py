"""Options that every command has, the store configuration that they make, and the errors that end a command."""

import dataclasses
import logging
import re
import signal
import sys
import traceback
from itertools import islice
from typing import Any

import click

from torchobj import exceptions
from torchobj.cli.output import age_s, command, escaped, print_json, print_line
from torchobj.config import GCSOptions, S3Options, StoreConfig
from torchobj.urls import canonical_url, shown_url

#: Exit codes of a shell for a process that a signal ended are 128 and its number.
_BY_SIGNAL = 128
BROKEN_PIPE = _BY_SIGNAL + signal.SIGPIPE


class CommandError(Exception):
    """A command cannot do what it was called for; the message names the object and the next step."""


#: What to do next, by the type of the error. The first match counts.
_NEXT_STEPS: tuple[tuple[type[Exception], str | None], ...] = (
    # Its message has the endpoint and the next step.
    (exceptions.BucketNotFoundError, None),
    (exceptions.ObjectNotFoundError, "`torchobj ls` shows the keys of a prefix"),
    (exceptions.CredentialsError, "`torchobj doctor URL` shows where credentials are looked for"),
    (exceptions.AccessDeniedError, "`torchobj doctor URL` shows which credentials are used and what they allow"),
    (exceptions.StoreConnectionError, "`torchobj doctor URL` tests the endpoint"),
    (exceptions.StoreTimeoutError, "`torchobj doctor URL` tests the endpoint"),
    (exceptions.ThrottledError, "try again later"),
    (exceptions.PreconditionFailedError, "the object exists, or another writer has replaced it"),
)

#: The same for local files, which have no credentials and no endpoint.
_NEXT_STEPS_OF_FILES: tuple[tuple[type[Exception], str | None], ...] = (
    (exceptions.AccessDeniedError, "check the permissions of the file and of the folders above it"),
    (exceptions.PreconditionFailedError, "the file exists, or another writer has replaced it"),
)

#: How the library names the option of the command line.
_OPTION = re.compile(r"(S3|GCS)Options\(anonymous=True\)")


def next_step(error: BaseException) -> str | None:
    """What to do about an error; None if its message says it."""
    url = getattr(error, "url", None)
    steps = _NEXT_STEPS_OF_FILES if url is not None and url.startswith("file://") else _NEXT_STEPS
    step = next((step for kind, step in steps if isinstance(error, kind)), None)
    # A listing of buckets has none.
    if step is None or not url or url.endswith("://"):
        return step
    return step.replace("`torchobj doctor URL`", command("doctor", url))


def described(error: BaseException) -> str:
    """The message of an error on one line, without control characters."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, OSError) and not isinstance(error, exceptions.TorchobjError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif not isinstance(error, (exceptions.TorchobjError, CommandError, OSError)):
        text = f"unexpected {type(error).__name__}: {text}; --log-level debug shows where"
    text = _OPTION.sub("--no-sign-request", text)
    step = next_step(error)
    return escaped(" ".join(text.splitlines()) if step is None else f"{' '.join(text.splitlines())}; {step}")


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP was received; it ends a command as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__(f"terminated by {signal.Signals(number).name}")
        self.number = number


def interrupted_code(error: KeyboardInterrupt) -> int:
    """The exit code after Ctrl-C or another signal."""
    return _BY_SIGNAL + (error.number if isinstance(error, Terminated) else signal.SIGINT)


@dataclasses.dataclass
class Settings:
    """Values of the options that every command has."""

    json: bool = False
    log_level: str = "warning"
    endpoint_url: str | None = None
    profile: str | None = None
    region: str | None = None
    no_sign_request: bool = False

    def config(self, *urls: str) -> StoreConfig:
        """The configuration for URLs. Options of a provider apply to its URLs only.

        Raises:
            CommandError: An option applies to none of the URLs, or an endpoint to two providers.
        """
        schemes = {canonical_url(url).partition("://")[0] for url in urls}
        both = {"endpoint_url": self.endpoint_url, "anonymous": self.no_sign_request or None}
        given: dict[str, Any] = {"profile": self.profile, "region": self.region, **both}
        given = {name: value for name, value in given.items() if value is not None}
        gcs = {name: value for name, value in given.items() if name in both}
        usable = given if "s3" in schemes else gcs if "gs" in schemes else {}
        for option, name in sorted((_option(name), name) for name in given.keys() - usable.keys()):
            scheme = "s3:// or gs://" if name in both else "s3://"
            raise CommandError(
                f"{option}: applies to URLs of {scheme}, not to {' '.join(map(shown_url, urls)) or 'local files'}"
            )
        if self.endpoint_url is not None and {"s3", "gs"} <= schemes:
            raise CommandError(
                "--endpoint-url: s3:// and gs:// URLs have different endpoints; set AWS_ENDPOINT_URL and "
                "STORAGE_EMULATOR_HOST, or name a configuration file in TORCHOBJ_CONFIG"
            )
        return StoreConfig(
            s3=S3Options(**(given if "s3" in schemes else {})), gcs=GCSOptions(**(gcs if "gs" in schemes else {}))
        )

    def given(self) -> list[str]:
        """The options that select a store and an identity, as arguments."""
        values = {"endpoint_url": self.endpoint_url, "profile": self.profile, "region": self.region}
        arguments = [part for name, value in values.items() if value is not None for part in (_option(name), value)]
        return [*arguments, *([_option("anonymous")] if self.no_sign_request else [])]

    def fail(self, error: BaseException) -> None:
        """Prints an error to stderr: a line, or an object with `--json`."""
        if self.log_level == "debug":
            text = "".join(traceback.format_exception(error))
            click.echo("\n".join(map(escaped, text.splitlines())), err=True)
        is_emulator = self.endpoint_url is not None and not self.no_sign_request
        if is_emulator and isinstance(error, exceptions.CredentialsError) and (error.url or "").startswith("gs://"):
            self.error(f"{described(error)}; an emulator takes requests with --no-sign-request", error)
        else:
            self.error(described(error), error)

    def error(self, text: str, error: BaseException | None = None) -> None:
        """Prints an error to stderr, given its text without control characters."""
        if not self.json:
            click.echo(f"torchobj: {text}", err=True)
            return
        fields: dict[str, Any] = {"error": text}
        if isinstance(error, exceptions.TorchobjError):
            named = {name: getattr(error, name) for name in ("url", "operation", "status", "code", "request_id")}
            fields |= {"type": type(error).__name__} | {name: value for name, value in named.items() if value}
        print_json(fields, sys.stderr)

    def show(self, fields: dict[str, Any], text: str) -> None:
        """Prints an object: its fields with `--json`, otherwise its line."""
        if self.json:
            print_json(fields)
        else:
            print_line(text)

    def note(self, text: str) -> None:
        """Prints a line to stderr for people; nothing with `--json`."""
        if not self.json:
            click.echo(text, err=True)


def _option(name: str) -> str:
    return {"anonymous": "--no-sign-request"}.get(name, "--" + name.replace("_", "-"))


def settings() -> Settings:
    """The settings of the running command."""
    return click.get_current_context().ensure_object(Settings)


def _set(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    # An option of the command overrides the same one before the command.
    if value is not None and value is not False and parameter.name is not None:
        setattr(ctx.ensure_object(Settings), parameter.name, value)


def _shared(*names: str, **attributes: Any) -> click.Option:
    return click.Option(names, expose_value=False, callback=_set, **attributes)


def output_options() -> list[click.Parameter]:
    """The options that every command has, before and after its name."""
    levels = click.Choice(["debug", "info", "warning", "error"])
    return [
        _shared("--json", is_flag=True, help="Print JSON: an object per line."),
        _shared("--log-level", type=levels, help="Log to stderr from this level; debug shows tracebacks.  [warning]"),
    ]


def shared_options() -> list[click.Parameter]:
    """The options of commands that use a store, before and after their names."""
    return [
        *output_options(),
        _shared("--endpoint-url", metavar="URL", help="Endpoint of an S3-compatible store or of a GCS emulator."),
        _shared("--profile", metavar="NAME", help="Profile of the AWS configuration files."),
        _shared("--region", metavar="NAME", help="Region of the S3 bucket, if it is not to be detected."),
        _shared("--no-sign-request", is_flag=True, help="Send requests without credentials, for public buckets."),
    ]


class _Handler(logging.Handler):
    """Writes records to the current stderr, each on one line. Those during a progress bar appear above it."""

    def emit(self, record: logging.LogRecord) -> None:
        # Not by click, which writes to the terminal itself: the bar replaces `sys.stderr`.
        sys.stderr.write(f"torchobj: {record.levelname.lower()}: {escaped(record.getMessage())}\n")
        sys.stderr.flush()


def start_logging(level: str) -> None:
    """Logs to stderr from a level: debug, info, warning or error."""
    logger = logging.getLogger("torchobj")
    if not any(isinstance(handler, _Handler) for handler in logger.handlers):
        logger.addHandler(_Handler())
    logger.setLevel(level.upper())
    logger.propagate = False


class LocalCommand(click.Command):
    """A command that uses no store, whose errors are one line on stderr and an exit code."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.params += self._shared_options()

    def _shared_options(self) -> list[click.Parameter]:
        return output_options()

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        chosen = ctx.ensure_object(Settings)
        start_logging(chosen.log_level)
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except KeyboardInterrupt as error:
            chosen.error(str(error) or "interrupted")
            raise click.exceptions.Exit(interrupted_code(error)) from None
        except BrokenPipeError:
            raise click.exceptions.Exit(BROKEN_PIPE) from None
        except Exception as error:  # noqa: BLE001  the user sees a line, and a traceback with debug
            chosen.fail(error)
            raise click.exceptions.Exit(1) from None


class Command(LocalCommand):
    """A command that uses a store."""

    def _shared_options(self) -> list[click.Parameter]:
        return shared_options()


class PatternCommand(Command):
    """A command with `--exclude` and `--include`, whose values it gets as `patterns`, in the order of the arguments."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        excluded = "Skip what matches; repeatable. The last of all patterns that matches counts."
        for name, text in (("exclude", excluded), ("include", "Do not skip what matches; repeatable.")):
            self.params.append(click.Option([f"--{name}"], metavar="PATTERN", multiple=True, help=text))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        rest = super().parse_args(ctx, args)
        values = {name: iter(ctx.params.pop(name, ())) for name in ("exclude", "include")}
        given = [parameter.name for parameter in order if parameter.name in values]
        # A completion may have options without a value.
        ctx.params["patterns"] = tuple((name, value) for name in given for value in islice(values[name], 1))
        return rest


def age_option(_: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Callback of options that are ages."""
    try:
        return None if value is None else age_s(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from None


#: Option of commands that ask before they delete.
yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask. Required without a terminal.")
