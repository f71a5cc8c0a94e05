"""`torchobj doctor`: checks the machine and a store, and says what to change."""

from collections.abc import Iterator

import click

from torchobj.cli.checks import Check
from torchobj.cli.credential_sources import gcs_source, s3_source
from torchobj.cli.machine_checks import machine_checks
from torchobj.cli.options import Command, fail_with, settings
from torchobj.cli.output import escaped, print_json, print_line
from torchobj.cli.store_checks import store_checks
from torchobj.cli.targets import parse_target
from torchobj.cli.url_argument import URL

__all__ = ["doctor"]

_MARKS = {"ok": "ok", "note": "-", "warning": "!", "failed": "FAILED"}


@click.command(cls=Command, short_help="Check credentials, endpoint, clock and limits.")
@click.argument("url", type=URL, required=False)
@click.option("--write", is_flag=True, help="Also write, read and delete a small object of its own below URL.")
def doctor(url: str | None, *, write: bool) -> None:
    """Checks this machine, and the store of URL: where credentials are found, region, endpoint, DNS, clock, one LIST
    and one GET. Shows no secrets. The exit code is 1 if a check failed.
    """
    chosen = settings()
    failed = False
    for check in _checks(url, write=write):
        failed |= check.state == "failed"
        if chosen.json:
            print_json(check._asdict())
        else:
            print_line(f"{_MARKS[check.state]:>6}  {check.name:<18}  {escaped(check.found)}")
            if check.advice and check.state != "ok":
                print_line(f"{'':>6}  {'':<18}  -> {escaped(check.advice)}")
    if failed:
        fail_with()


def _checks(url: str | None, *, write: bool) -> Iterator[Check]:
    yield from machine_checks()
    if url is None:
        yield Check("store", "note", "not checked: no URL was given")
        return
    target = parse_target(url, raw=True)
    store, prefix = target.open(settings().config(url))
    if target.url.scheme == "s3":
        yield s3_source(store.config.s3)
    elif target.url.scheme == "gs":
        yield gcs_source(store.config.gcs)
    yield from store_checks(target.url, store, prefix, write=write)
