"""The command `torchobj doctor`: runs the checks in their order, and prints what they find."""

from collections.abc import Iterator

import click

from torchobj.cli.doctor import machine, network, store
from torchobj.cli.doctor.check import Check
from torchobj.cli.doctor.gcs_credentials import gcs_source
from torchobj.cli.doctor.s3_credentials import s3_source
from torchobj.cli.options import Command, settings
from torchobj.cli.output import escaped
from torchobj.cli.targets import URL, parse_target

_MARKS = {"ok": "ok", "note": "-", "warning": "!", "failed": "FAILED"}


@click.command(cls=Command, short_help="Check credentials, endpoint, clock and limits.")
@click.argument("url", type=URL, required=False)
@click.option("--write", is_flag=True, help="Also write, read and delete small objects of its own below URL.")
def doctor(url: str | None, *, write: bool) -> None:
    """Checks this machine, and the store of URL: where credentials are found, region, endpoint, DNS, clock, one LIST
    and one GET. Shows no secrets. The exit code is 1 if a check failed.
    """
    chosen = settings()
    failed = False
    for check in _checks(url, write=write):
        failed |= check.state == "failed"
        text = f"{_MARKS[check.state]:>6}  {check.name:<18}  {escaped(check.found)}"
        if check.advice and check.state != "ok":
            text += f"\n{'':>6}  {'':<18}  -> {escaped(check.advice)}"
        chosen.show(check._asdict(), text)
    if failed:
        raise click.exceptions.Exit(1)


def _checks(url: str | None, *, write: bool) -> Iterator[Check]:
    yield from machine.checks()
    if url is None:
        yield Check("store", "note", "not checked: no URL was given")
        return
    target = parse_target(url, raw=True)
    opened, prefix = target.open(settings().config(url))
    source = None
    if target.url.scheme in ("s3", "gs"):
        source = s3_source(opened.config) if target.url.scheme == "s3" else gcs_source(opened.config.gcs)
        yield source
        yield from network.checks(target.url, opened.config)
    yield from store.checks(opened, prefix, source, write=write)
