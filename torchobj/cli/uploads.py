"""`torchobj uploads`: unfinished uploads in parts, which are stored and billed, but not listed as objects."""

from datetime import UTC, datetime, timedelta
from typing import Any

import click

from torchobj.cli.errors import CommandError
from torchobj.cli.options import Command, Settings, age_option, settings, shared_options
from torchobj.cli.output import print_json, print_line, shown, time_shown
from torchobj.cli.removing import confirm
from torchobj.cli.targets import parse_target
from torchobj.cli.url_argument import URL
from torchobj.store import Store
from torchobj.store.object_info import UnfinishedUpload

__all__ = ["uploads"]


@click.group(params=shared_options(), short_help="Unfinished uploads: list, sweep.")
def uploads() -> None:
    """Lists and aborts uploads in parts of writers that were killed. Their parts are stored and billed.

    Resumable uploads to Google Cloud Storage are not listed; the store deletes them after a week.
    """


@uploads.command("list", cls=Command)
@click.argument("url", type=URL)
def list_uploads(url: str) -> None:
    """Lists unfinished uploads of keys that start with that of URL: start, upload id, and URL of the object."""
    store, found = _found(url)
    for upload in found:
        _report(settings(), store, upload, "unfinished")


@uploads.command(cls=Command)
@click.argument("url", type=URL)
@click.option(
    "--older-than",
    metavar="AGE",
    required=True,
    callback=age_option,
    help="Abort only uploads that began before, such as 12h or 7d: a recent one may belong to a running writer.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask. Required without a terminal.")
@click.option("--dry-run", is_flag=True, help="Print what would be aborted.")
def sweep(url: str, *, older_than: float, yes: bool, dry_run: bool) -> None:
    """Aborts unfinished uploads of keys that start with that of URL, and deletes their parts.

    An upload whose start is unknown is kept.
    """
    chosen = settings()
    store, found = _found(url)
    limit = datetime.now(UTC) - timedelta(seconds=older_than)
    old = [upload for upload in found if upload.begun is not None and upload.begun <= limit]
    if dry_run:
        for upload in old:
            _report(chosen, store, upload, "would abort")
        return
    if old and not yes:
        confirm(f"abort {len(old)} of {len(found)} uploads below {url}?", "--yes aborts without a question")
    for upload in old:
        store.abort_upload(upload)
        _report(chosen, store, upload, "abort")
    chosen.note(f"{len(old)} of {len(found)} unfinished uploads aborted")


def _found(url: str) -> tuple[Store, list[UnfinishedUpload]]:
    target = parse_target(url, raw=True)
    if target.is_local:
        raise CommandError(f"{url}: a local path; uploads in parts exist in buckets only")
    store, prefix = target.open(settings().config(url))
    return store, list(store.unfinished_uploads(prefix))


def _report(chosen: Settings, store: Store, upload: UnfinishedUpload, action: str) -> None:
    url = f"{store.url}/{upload.key}"
    if not chosen.json:
        shown_action = "" if action == "unfinished" else f"{action}  "
        print_line(f"{shown_action}{time_shown(upload.begun)}  {shown(upload.upload_id)}  {shown(url)}")
        return
    begun = None if upload.begun is None else upload.begun.isoformat()
    fields: dict[str, Any] = {"action": action, "url": url, "upload_id": upload.upload_id, "begun": begun}
    print_json(fields)
