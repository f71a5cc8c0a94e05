"""The type of arguments that are URLs or paths, with completion of local files and of keys."""

import re

import click
from click.shell_completion import CompletionItem

from torchobj.cli.options import Settings
from torchobj.cli.targets import WILDCARD
from torchobj.config import AdvancedOptions, StoreConfig
from torchobj.store import Store
from torchobj.urls import canonical_url, parse_url

__all__ = ["URL"]

#: Maximum number of keys that are offered.
_MAX_KEYS = 200
#: A wildcard that stands for itself.
_ESCAPED = re.compile(r"\[([*?\[{}\\])\]")
#: Limit of a listing for completion.
_LIMIT_S = 2.0


class _UrlType(click.ParamType):  # type: ignore[type-arg]  # not generic at runtime before click 8.4
    """A URL or path, as a string."""

    name = "url"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,
        incomplete: str,
    ) -> list[CompletionItem]:
        """Keys below a URL, level by level; otherwise local files."""
        if "://" not in incomplete:
            return [CompletionItem(incomplete, type="file")]
        try:
            url = canonical_url(incomplete)
            if not _takes_wildcards(ctx, param):
                return [CompletionItem(key) for key in _keys(ctx.ensure_object(Settings), url)]
            found = _keys(ctx.ensure_object(Settings), _ESCAPED.sub(r"\1", url))
            return [CompletionItem(_escaped(key)) for key in found]
        except Exception:  # noqa: BLE001  a completion has nowhere to report an error
            return []


def _takes_wildcards(ctx: click.Context, param: click.Parameter) -> bool:
    """Whether wildcards in the argument are not taken as they are."""
    has_raw = any(each.name == "raw" for each in ctx.command.params)
    return has_raw and not ctx.params.get("raw") and param.name not in ("destination", "file")


def _escaped(key: str) -> str:
    """A URL as a pattern that matches it alone."""
    return re.sub(r"[*?\[{}\\]", r"[\g<0>]", key) if WILDCARD.search(key) else key


def _keys(chosen: Settings, incomplete: str) -> list[str]:
    url = parse_url(incomplete)
    given = chosen.config(incomplete)
    limited = StoreConfig(
        s3=given.s3,
        gcs=given.gcs,
        max_attempts=1,
        first_byte_timeout_s=_LIMIT_S,
        retry_timeout_s=_LIMIT_S,
        advanced=AdvancedOptions(connect_timeout_s=_LIMIT_S),
    )
    store = Store(url.base, config=limited)
    for page in store.list(url.key, "/").pages():
        return sorted(f"{url.base}/{key}" for key in [info.key for info in page.objects] + page.prefixes)[:_MAX_KEYS]
    return []


#: Type of arguments that are URLs or local paths.
URL = _UrlType()
