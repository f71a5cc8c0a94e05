"""Checks of a store for `torchobj doctor`: its address, its clock, and one request of each kind."""

import http.client
import os
import secrets
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from torchobj.cli.checks import Check
from torchobj.cli.errors import described, next_step
from torchobj.cli.output import duration, escaped, human_size
from torchobj.config import StoreConfig
from torchobj.exceptions import RangeError, StoreError, TorchobjError
from torchobj.store import Store
from torchobj.store.object_info import ObjectInfo
from torchobj.urls import Url, shown_url

__all__ = ["endpoint_of", "store_checks"]

#: AWS refuses signatures that are older than 15 minutes (S3 API reference, RequestTimeTooSkewed); torchobj corrects the
#: time that it signs with. Credentials and certificates expire by the clock of the machine.
_SKEW_S = 60.0
_LIMIT_S = 5.0
_READ_BYTES = 1 << 20
_EXPECTED = "expected http://host:port; special characters of a password are written as %2F"
#: Name of the temporary object, before a nonce.
_PROBE = ".torchobj-doctor-"


def endpoint_of(url: Url, config: StoreConfig) -> tuple[str, str]:
    """The endpoint of a URL's store, and where it is configured. The core determines it in the same order."""
    if url.scheme == "gs":
        if config.gcs.endpoint_url is not None:
            return config.gcs.endpoint_url, "configured"
        if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
            return emulator if "://" in emulator else f"http://{emulator}", "STORAGE_EMULATOR_HOST"
        return f"https://storage.{config.gcs.universe_domain or 'googleapis.com'}", "Google Cloud Storage"
    if config.s3.endpoint_url is not None:
        return config.s3.endpoint_url, "configured"
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return os.environ[name], name
    region = config.s3.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return f"https://s3{f'.{region}' if region else ''}.amazonaws.com", "AWS, unless the profile names another one"


def store_checks(url: Url, store: Store, prefix: str, *, write: bool) -> Iterator[Check]:
    """Checks a store: name resolution and clock of a cloud, then LIST, GET, and PUT if `write`."""
    if url.scheme in ("s3", "gs"):
        yield from _network(url, store.config)
    found: list[ObjectInfo] = []
    listed = _timed("LIST", lambda: _list(store, prefix, found))
    yield listed
    if found:
        yield _timed("GET", lambda: _get(store, found[0]))
    else:
        reason = "LIST failed" if listed.state == "failed" else "the prefix has no objects"
        yield Check("GET", "note", f"not tried: {reason}")
    if write:
        yield _timed("PUT", lambda: _put(store, prefix))
    else:
        yield Check("PUT", "note", "not tried; --write writes, reads and deletes a small object of its own")


def _network(url: Url, config: StoreConfig) -> Iterator[Check]:
    endpoint, where = endpoint_of(url, config)
    if not endpoint.startswith(("http://", "https://")):
        yield Check("endpoint", "failed", f"{shown_url(endpoint)} ({where})", "must begin with http:// or https://")
        return
    yield Check("endpoint", "note", f"{shown_url(endpoint)} ({where})")
    if not _is_valid(endpoint):
        yield Check("endpoint", "failed", f"not a valid URL ({where})", _EXPECTED)
        return
    proxy = _proxy(endpoint)
    if proxy is not None:
        if not _is_valid(proxy):
            yield Check("proxy", "failed", "not a valid URL", _EXPECTED)
            return
        yield Check("proxy", "note", shown_url(proxy))
    yield _addresses(proxy or endpoint)
    yield from _answer(url, endpoint, config)


def _is_valid(address: str) -> bool:
    """Whether a URL has a host, a port that is a number, and no password that contains a slash."""
    try:
        parts = urllib.parse.urlsplit(address)
        return bool(parts.hostname) and (parts.port or 1) > 0 and "@" not in parts.path + parts.query + parts.fragment
    except ValueError:
        return False


def _addresses(endpoint: str) -> Check:
    parts = urllib.parse.urlsplit(endpoint)
    started = time.perf_counter()
    try:
        answers = socket.getaddrinfo(parts.hostname, parts.port or parts.scheme, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Check("DNS", "failed", f"{parts.hostname}: {error}", "check the endpoint and the name servers")
    addresses = sorted({str(answer[4][0]) for answer in answers})
    took = duration(time.perf_counter() - started)
    shown = ", ".join(addresses[:8]) + (", ..." if len(addresses) > 8 else "")
    noun = "address" if len(addresses) == 1 else "addresses"
    return Check("DNS", "ok", f"{parts.hostname}: {len(addresses)} {noun} in {took}: {shown}")


def _answer(url: Url, endpoint: str, config: StoreConfig) -> Iterator[Check]:
    """What an unsigned HEAD of the bucket tells: the clock of the server, and the region of the bucket."""
    try:
        headers, took = _head(endpoint, "" if url.scheme == "gs" else url.bucket, config)
    except (OSError, http.client.HTTPException) as error:
        advice = "check the endpoint, proxies, firewalls and --endpoint-url"
        yield Check("connection", "failed", f"{shown_url(endpoint)}: {type(error).__name__}: {error}", advice)
        return
    yield Check("connection", "ok", f"response after {took}" + (", with TLS" if endpoint.startswith("https") else ""))
    if url.scheme == "s3":
        given = config.s3.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        found = headers.get("x-amz-bucket-region")
        if found is not None and given is not None and found != given:
            advice = f"--region {found} saves a redirect"
            yield Check("region", "warning", f"{given} is configured, the bucket is in {found}", advice)
        else:
            yield Check("region", "note", found or given or "not configured, and not in the response; it is detected")
    date = headers.get("date")
    try:
        skew = None if date is None else (parsedate_to_datetime(date) - datetime.now(UTC)).total_seconds()
    except (TypeError, ValueError):
        skew = None
    if skew is None:
        yield Check("clock", "note", "the server sends no time")
    elif abs(skew) > _SKEW_S:
        advice = "set the clock of this machine; signatures are corrected, but credentials expire by it"
        yield Check("clock", "warning", f"the server's is {skew:+.0f} s from this machine's", advice)
    else:
        # The header has whole seconds.
        yield Check("clock", "ok", f"the server's is within {max(1, abs(round(skew)))} s of this machine's")


def _head(endpoint: str, bucket: str, config: StoreConfig) -> tuple[dict[str, str], str]:
    bundle = config.ca_bundle or os.environ.get("AWS_CA_BUNDLE")
    context = ssl.create_default_context(cafile=None if bundle is None else os.fspath(bundle))
    if not config.verify_tls:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    proxy = _proxy(endpoint)
    proxies = {} if proxy is None else {urllib.parse.urlsplit(endpoint).scheme: proxy}
    opener = urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=context), urllib.request.ProxyHandler(proxies)
    )
    url = f"{endpoint.rstrip('/')}/{urllib.parse.quote(bucket)}"
    started = time.perf_counter()
    try:
        # `_network` has checked the scheme.
        with opener.open(urllib.request.Request(url, method="HEAD"), timeout=_LIMIT_S) as response:  # noqa: S310
            headers = response.headers
    except urllib.error.HTTPError as error:
        # A store refuses the request, which has no signature; its headers are those of any response.
        with error:
            headers = error.headers
    return {name.lower(): value for name, value in headers.items()}, duration(time.perf_counter() - started)


def _proxy(endpoint: str) -> str | None:
    """The proxy of an endpoint, from the variables that the core reads."""
    parts = urllib.parse.urlsplit(endpoint)
    names = ("https_proxy", "HTTPS_PROXY") if parts.scheme == "https" else ("http_proxy",)
    proxy = next((os.environ[name] for name in names if os.environ.get(name)), None)
    if proxy is None or urllib.request.proxy_bypass(parts.netloc):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _timed(name: str, check: Callable[[], str]) -> Check:
    started = time.perf_counter()
    try:
        found = check()
    except TorchobjError as error:
        step = next_step(error)
        if step is not None and "`torchobj doctor" in step:
            message = described(error).removesuffix(f"; {escaped(step)}")
            return Check(name, "failed", message, "see the checks of credentials, endpoint and connection")
        message, _, advice = described(error).rpartition("; ")
        return Check(name, "failed", message or advice, advice if message else "")
    return Check(name, "ok", f"{found} in {duration(time.perf_counter() - started)}")


def _list(store: Store, prefix: str, found: list[ObjectInfo]) -> str:
    page = next(iter(store.list(prefix).pages()), None)
    objects = [] if page is None else page.objects
    found += [info for info in objects if not info.key.endswith("/")][:1]
    return f"the first page has {len(objects)} {'key' if len(objects) == 1 else 'keys'}"


def _get(store: Store, info: ObjectInfo) -> str:
    try:
        size = len(store.get_range(info.key, 0, _READ_BYTES))
    except RangeError:
        size = 0
    return f"{human_size(size)} of {store.url}/{info.key}"


def _put(store: Store, prefix: str) -> str:
    folder = prefix[: prefix.rfind("/") + 1]
    key, data = f"{folder}{_PROBE}{secrets.token_hex(16)}", secrets.token_bytes(1024)
    store.put(key, data)
    try:
        if bytes(memoryview(store.get(key))) != data:
            raise StoreError(f"get {store.url}/{key}: other bytes than were written; check caches and proxies")
    finally:
        # Its name is random, so that no other object is deleted.
        store.delete(key)
    return f"{store.url}/{key} was written, read and deleted"
