"""`torchobj doctor`: checks the machine and a store, and says what to change.

The checks of the machine send no request. Where credentials come from is found as for requests, in the environment and
files only, without the metadata service of a machine; no values are shown. The checks of a store are its address, its
clock, and one request of each kind.
"""

import http.client
import json
import os
import resource
import socket
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal, NamedTuple

import click

from torchobj import _torchobj
from torchobj.cli import machine, write_checks
from torchobj.cli.options import Command, described, next_step, settings
from torchobj.cli.output import command, counted, duration, escaped, human_size
from torchobj.cli.targets import URL, parse_target
from torchobj.config import GCSOptions, StoreConfig, config_file
from torchobj.config.explicit_fields import replace_fields
from torchobj.exceptions import (
    AccessDeniedError,
    ConfigError,
    CredentialsError,
    RangeError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
    TorchobjError,
    UnsupportedError,
)
from torchobj.store import ObjectInfo, Store
from torchobj.urls import Url, shown_url
from torchobj.workers.memory_budget import budget_bytes

_MARKS = {"ok": "ok", "note": "-", "warning": "!", "failed": "FAILED"}

#: Descriptors of a loader with many connections and workers, with a margin.
_FILES = 4096
#: PyTorch workers pass batches through `/dev/shm`. Docker's default is 64 MiB (docs, `docker run --shm-size`).
_SHARED_BYTES = 1 << 30

#: AWS refuses signatures that are older than 15 minutes (S3 API reference, RequestTimeTooSkewed); torchobj corrects the
#: time that it signs with. Credentials and certificates expire by the clock of the machine.
_SKEW_S = 60.0
_LIMIT_S = 5.0
#: Times after which the requests of a store are given up, which may be configured to take minutes.
_READ_LIMIT_S, _WRITE_LIMIT_S = 15.0, 5.0
_READ_BYTES = 1 << 20
#: Permissions of S3 and of Google Cloud Storage, by operation.
_PERMISSIONS = {
    "list": ("s3:ListBucket on the bucket and this prefix", "storage.objects.list on the bucket"),
    "get": ("s3:GetObject on the key, and kms:Decrypt if it is encrypted by KMS", "storage.objects.get"),
    "put": ("s3:PutObject on the key, and kms:GenerateDataKey if it is encrypted by KMS", "storage.objects.create"),
    "delete": ("s3:DeleteObject on the key", "storage.objects.delete"),
}
#: How the check of credentials begins if requests have none.
_UNSIGNED = "no credentials are used"
#: How OpenSSL names an answer in plain text.
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
_NEEDS_TLS = "if the server uses TLS, begin the endpoint with https://"
#: Headers with the id of a request, of which every response of S3 or Google Cloud Storage has one.
_OF_STORES = {"x-amz-request-id", "x-amz-id-2", "x-guploader-uploadid"}
#: Codes of OpenSSL (verify(1)) for certificates whose CA is not known, and for those of other hosts.
_UNKNOWN_CA = (2, 18, 19, 20, 21)
_OTHER_HOST = (62, 64)
#: And for those that are not valid yet, or not any more.
_OTHER_TIME = (9, 10)
_EXPECTED = "expected http://host:port; special characters of a password are written as %2F"


class Check(NamedTuple):
    """What a check found."""

    name: str
    """What was checked."""
    state: Literal["ok", "note", "warning", "failed"]
    """`note`: a fact; `warning`: works, but may become a problem; `failed`: does not work."""
    found: str
    """What was found, with numbers and without secrets."""
    advice: str = ""
    """The next step."""


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
    yield from _machine_checks()
    if url is None:
        yield Check("store", "note", "not checked: no URL was given")
        return
    target = parse_target(url, raw=True)
    store, prefix = target.open(settings().config(url))
    source = None
    if target.url.scheme == "s3":
        source = s3_source(store.config)
    elif target.url.scheme == "gs":
        source = gcs_source(store.config.gcs)
    if source is not None:
        yield source
    yield from _store_checks(target.url, store, prefix, source, write=write)


def _machine_checks() -> Iterator[Check]:
    """Checks the machine."""
    versions = f"torchobj {_torchobj.__version__}, Python {sys.version.split()[0]}, torch {machine.version('torch')}"
    yield Check("versions", "note", f"{versions}, {machine.system()}, {machine.processors()}")
    yield _configuration()
    yield _files()
    yield _locked_memory()
    yield _shared_memory()
    yield _memfd()
    yield _budget()


def _configuration() -> Check:
    path = os.environ.get(config_file.VARIABLE)
    if not path:
        return Check("configuration file", "note", f"none; {config_file.VARIABLE} is not set")
    try:
        file = config_file.current()
    except ConfigError as error:
        return Check("configuration file", "failed", str(error))
    prefixes = ", ".join(map(str, file.settings)) if file is not None else ""
    return Check("configuration file", "ok", f"{path} applies to {prefixes or 'no prefix'}")


def _files() -> Check:
    soft, found = resource.getrlimit(resource.RLIMIT_NOFILE)[0], machine.open_files()
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        advice = f"`ulimit -n {_FILES}`: connections and DataLoader workers need descriptors"
        return Check("open files", "warning", found, advice)
    return Check("open files", "ok", found)


def _locked_memory() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = [
        machine.limit_text(value) if value == resource.RLIM_INFINITY else human_size(value) for value in (soft, hard)
    ]
    # CUDA pins memory by its driver, which this limit does not cover.
    return Check("locked memory", "note", f"{shown[0]}, may be raised to {shown[1]}; torchobj locks none")


def _shared_memory() -> Check:
    try:
        free, total = machine.shared_memory()
    except OSError as error:
        advice = "DataLoader workers of torch need it to pass batches"
        return Check(machine.SHARED_MEMORY, "warning", f"{error.strerror}", advice)
    found = machine.shared_memory_text(free, total)
    if free < _SHARED_BYTES:
        advice = "DataLoader workers that return tensors may fail: `docker run --shm-size=8g`, or an emptyDir in memory"
        return Check(machine.SHARED_MEMORY, "warning", found, advice)
    return Check(machine.SHARED_MEMORY, "ok", found)


def _memfd() -> Check:
    if not hasattr(os, "memfd_create"):
        return Check("memfd", "warning", f"{sys.platform} has none", "workers read by themselves, without look-ahead")
    try:
        number = os.memfd_create("torchobj-doctor")
        try:
            os.ftruncate(number, 1 << 20)
            os.pwrite(number, b"x", (1 << 20) - 1)
        finally:
            os.close(number)
    except OSError as error:
        advice = "the look-ahead of loaders needs it: allow memfd_create in the sandbox"
        return Check("memfd", "failed", str(error.strerror), advice)
    return Check("memfd", "ok", "can be created")


def _budget() -> Check:
    try:
        return Check("memory budget", "note", f"{human_size(budget_bytes())} per rank for objects that are read ahead")
    except ConfigError as error:
        return Check("memory budget", "failed", str(error))


def _file(environ: Mapping[str, str], variable: str, default: str) -> Path:
    return Path(environ.get(variable) or default).expanduser()


def s3_source(config: StoreConfig) -> Check:
    """Where the credentials of S3 come from: what the core signs requests with."""
    name, options = "credentials", config.s3
    if options.anonymous:
        return Check(name, "note", f"{_UNSIGNED}: requests are not signed")
    if options.access_key_id is not None:
        return Check(name, "ok", "access_key_id and secret_access_key of S3Options")
    if options.credential_provider is not None:
        return Check(name, "ok", "from a credential_provider")
    return _of_core(config)


def _of_core(config: StoreConfig) -> Check:
    """The source of credentials that the core finds, in the environment and in files."""
    name = "credentials"
    is_known, found, advice = _torchobj.s3_credential_source(config)
    if is_known is None:
        return Check(name, "failed", found, advice)
    if is_known:
        variables = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        has_id, has_secret = (bool(os.environ.get(variable)) for variable in variables)
        if has_secret and not has_id and config.s3.profile is None:
            found = f"{variables[1]} without {variables[0]} is not used; {found}"
            return Check(name, "warning", found, f"set {variables[0]} too")
        return Check(name, "ok", found)
    advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass --profile"
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        found = "none, and AWS_EC2_METADATA_DISABLED=true"
        return Check(name, "failed", found, f"{advice} or --no-sign-request")
    found = "none in the environment and files: those of the machine's role, if it has one"
    return Check(name, "note", found, f"{advice}, unless this is a machine of AWS")


def gcs_source(options: GCSOptions, environ: Mapping[str, str] = os.environ) -> Check:
    """Where the credentials of Google Cloud Storage come from: Application Default Credentials, in their order."""
    if options.credential_provider is not None:
        return Check("credentials", "ok", "from a credential_provider")
    emulator = options.endpoint_url is None and environ.get("STORAGE_EMULATOR_HOST")
    if options.anonymous or emulator:
        why = "STORAGE_EMULATOR_HOST names an emulator" if emulator else "requests have no token"
        return Check("credentials", "note", f"{_UNSIGNED}: {why}")
    named = environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    folder = _file(environ, "CLOUDSDK_CONFIG", "~/.config/gcloud")
    path = Path(named) if named else folder / "application_default_credentials.json"
    try:
        kind = json.loads(path.read_bytes()).get("type", "unknown type")
    except OSError as error:
        if named:
            advice = "correct GOOGLE_APPLICATION_CREDENTIALS, or unset it"
            return Check("credentials", "failed", f"GOOGLE_APPLICATION_CREDENTIALS={path}: {error.strerror}", advice)
    except (ValueError, AttributeError):
        return Check("credentials", "failed", f"{path}: is not a JSON file of credentials")
    else:
        return Check("credentials", "ok", f"{'GOOGLE_APPLICATION_CREDENTIALS=' if named else ''}{path}: {kind}")
    advice = "`gcloud auth application-default login`, or --no-sign-request, unless this is a machine of Google Cloud"
    where = f" at GCE_METADATA_HOST={environ['GCE_METADATA_HOST']}" if environ.get("GCE_METADATA_HOST") else ""
    return Check(
        "credentials", "note", f"none in files: the service account of the machine, if it has one{where}", advice
    )


def _endpoint_of(url: Url, config: StoreConfig) -> tuple[str, str]:
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


def _store_checks(url: Url, store: Store, prefix: str, source: Check | None, *, write: bool) -> Iterator[Check]:
    """Checks a store: name resolution and clock of a cloud, then LIST, GET, and PUT if `write`.

    Args:
        url: URL of the store.
        store: The store.
        prefix: Prefix of the keys.
        source: Where the credentials come from; None for a store without them.
        write: Whether to try PUT.
    """
    if url.scheme in ("s3", "gs"):
        yield from _network(url, store.config)
    store, found = _within(store, _READ_LIMIT_S), list[ObjectInfo]()
    listed = _timed("LIST", source, lambda: _list(store, prefix, found))
    yield listed
    if found:
        yield _timed("GET", source, lambda: _get(store, found[0]))
    else:
        empty = listed.state != "failed"
        reason = "the prefix has no objects" if empty else "LIST failed"
        advice = f"if it should have some, {command('ls', f'{store.url}/')} shows the bucket's folders" if empty else ""
        yield Check("GET", "note", f"not tried: {reason}", advice)
    if write:
        # A response that is lost must not keep the command for minutes, nor the deletion after it.
        store = _within(store, _WRITE_LIMIT_S)
        written = _timed("PUT", source, lambda: write_checks.put(store, prefix))
        yield written
        if written.state == "ok":
            yield _conditions(store, prefix, source)
    else:
        yield Check("PUT", "note", "not tried; --write writes, reads and deletes small objects of its own")


def _within(store: Store, limit_s: float) -> Store:
    """The store with requests that end after a time, if they do not make progress."""
    names = ("first_byte_timeout_s", "idle_timeout_s", "retry_timeout_s")
    limits = {name: min(getattr(store.config, name), limit_s) for name in names}
    return Store(store.url, config=replace_fields(store.config, **limits))


def _network(url: Url, config: StoreConfig) -> Iterator[Check]:
    endpoint, where = _endpoint_of(url, config)
    if not endpoint.startswith(("http://", "https://")):
        yield Check("endpoint", "failed", f"{shown_url(endpoint)} ({where})", "must begin with http:// or https://")
        return
    yield Check("endpoint", "note", f"{shown_url(endpoint)} ({where})")
    if not _is_valid(endpoint):
        yield Check("endpoint", "failed", f"not a valid URL ({where})", _EXPECTED)
        return
    proxy = _proxy(endpoint)
    if proxy is None and endpoint.startswith("http://") and os.environ.get("HTTP_PROXY"):
        yield Check("proxy", "note", "none: HTTP_PROXY is ignored", "http_proxy names the proxy of http:// endpoints")
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
        status, headers, took = _head(url, endpoint, config)
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        reason = reason if isinstance(reason, Exception) else error
        failed = f"{shown_url(endpoint)}: {type(reason).__name__}: {reason}"
        yield Check("connection", "failed", failed, _connection_advice(url, endpoint, reason))
        return
    if status == 400 and endpoint.startswith("http://") and not headers.keys() & _OF_STORES:
        yield Check("connection", "warning", f"response after {took}: 400, without the id of a store", _NEEDS_TLS)
    else:
        with_tls = ", with TLS" if endpoint.startswith("https") else ""
        yield Check("connection", "ok", f"response after {took}{with_tls}")
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


def _connection_advice(url: Url, endpoint: str, error: Exception) -> str:
    """The next step if there is no response."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_advice(url.scheme, error)
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return "the server does not use TLS: begin the endpoint with http://"
    advice = "check the endpoint, proxies, firewalls and --endpoint-url"
    is_other = isinstance(error, http.client.HTTPException | ConnectionResetError)
    return f"{_NEEDS_TLS}; {advice}" if is_other and endpoint.startswith("http://") else advice


def _certificate_advice(scheme: str, error: ssl.SSLCertVerificationError) -> str:
    """The next step for a certificate that is not trusted, by the reason of OpenSSL."""
    if error.verify_code in _UNKNOWN_CA:
        where = "SSL_CERT_FILE" if scheme == "gs" else "AWS_CA_BUNDLE"
        return f"set {where} to the PEM file of the CA that signed the server's certificate"
    if error.verify_code in _OTHER_HOST:
        return "the endpoint must have a name that is in the server's certificate"
    if error.verify_code in _OTHER_TIME:
        return "the server's certificate is not valid: its operator must renew it, or this machine's clock is wrong"
    return "the operator of the server must replace its certificate, or that of a CA above it"


def _head(url: Url, endpoint: str, config: StoreConfig) -> tuple[int, dict[str, str], str]:
    bundle = config.ca_bundle if url.scheme == "gs" else _torchobj.s3_ca_bundle(config)
    context = ssl.create_default_context(cafile=None if bundle is None else os.fspath(bundle))
    if not config.verify_tls:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    proxy = _proxy(endpoint)
    proxies = {} if proxy is None else {urllib.parse.urlsplit(endpoint).scheme: proxy}
    opener = urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=context), urllib.request.ProxyHandler(proxies)
    )
    bucket = "" if url.scheme == "gs" else urllib.parse.quote(url.bucket)
    address = f"{endpoint.rstrip('/')}/{bucket}"
    started = time.perf_counter()
    try:
        # `_network` has checked the scheme.
        with opener.open(urllib.request.Request(address, method="HEAD"), timeout=_LIMIT_S) as response:  # noqa: S310
            status, headers = response.status, response.headers
    except urllib.error.HTTPError as error:
        # A store refuses the request, which has no signature; its headers are those of any response.
        with error:
            status, headers = error.code, error.headers
    took = duration(time.perf_counter() - started)
    return status, {name.lower(): value for name, value in headers.items()}, took


def _proxy(endpoint: str) -> str | None:
    """The proxy of an endpoint, from the variables that the core reads."""
    parts = urllib.parse.urlsplit(endpoint)
    names = ("https_proxy", "HTTPS_PROXY") if parts.scheme == "https" else ("http_proxy",)
    proxy = next((os.environ[name] for name in names if os.environ.get(name)), None)
    if proxy is None or urllib.request.proxy_bypass(parts.netloc):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _timed(name: str, source: Check | None, check: Callable[[], str]) -> Check:
    started = time.perf_counter()
    try:
        found = check()
    except TorchobjError as error:
        return _failed(name, source, error)
    return Check(name, "ok", f"{found} in {duration(time.perf_counter() - started)}")


def _failed(name: str, source: Check | None, error: TorchobjError) -> Check:
    step = next_step(error)
    text = described(error).removesuffix("" if step is None else f"; {escaped(step)}")
    left = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    message, _, hint = text.rpartition("; ")
    if isinstance(error, CredentialsError) and error.status is None:
        if source is not None and source.state == "ok" and message:
            return Check(name, "failed", f"{message}{left}", f"no request was sent: {hint}")
        return Check(name, "failed", f"{text}{left}", "no request was sent: see the check of credentials")
    advice = _advice(error, source, hint if message else "")
    return Check(name, "failed", f"{message or hint}{left}", advice or step or "")


def _advice(error: TorchobjError, source: Check | None, hint: str) -> str:
    """The next step after a failed request: which other check has the cause, or what to grant.

    Args:
        error: The error.
        source: Where the credentials come from.
        hint: The last part of its message.
    """
    if isinstance(error, (StoreConnectionError, StoreTimeoutError)):
        return "see the checks of endpoint, DNS and connection"
    if source is None or not isinstance(error, StoreError):
        return hint
    if source.found.startswith(_UNSIGNED) and isinstance(error, AccessDeniedError):
        return f"the bucket is not public, and {source.found}"
    if isinstance(error, CredentialsError):
        return f"the store rejects the credentials ({source.found}): {hint or 'renew them where they come from'}"
    if isinstance(error, AccessDeniedError):
        granted = _PERMISSIONS.get(error.operation or "")
        if granted is not None:
            permission = granted[(error.url or "").startswith("gs://")]
            return f"the store accepts the credentials ({source.found}), which lack a permission: grant {permission}"
    return hint


def _list(store: Store, prefix: str, found: list[ObjectInfo]) -> str:
    page = next(iter(store.list(prefix).pages()), None)
    objects = [] if page is None else page.objects
    found += [info for info in objects if not info.key.endswith("/")][:1]
    return f"the first page has {counted(len(objects), 'key')}"


def _get(store: Store, info: ObjectInfo) -> str:
    try:
        size = len(store.get_range(info.key, 0, _READ_BYTES))
    except RangeError:
        size = 0
    return f"{human_size(size)} of {store.url}/{info.key}"


def _conditions(store: Store, prefix: str, source: Check | None) -> Check:
    """Whether the store compares versions before it writes and deletes. Some servers ignore conditions."""
    name = "conditions"
    try:
        ignored = write_checks.ignored_conditions(store, prefix)
    except UnsupportedError as error:
        return Check(name, "note", described(error))
    except TorchobjError as error:
        return _failed(name, source, error)
    if ignored:
        advice = "S3Options(conditional_writes=False) makes checkpoint managers compare versions themselves"
        return Check(name, "warning", f"the store ignores {', '.join(ignored)}", advice)
    return Check(name, "ok", "an object that exists, or has another version, is not replaced or deleted")
