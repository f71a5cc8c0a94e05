"""Checks of the network to a store: endpoint, proxy, DNS, TLS, and the region and the clock in its response."""

import http.client
import os
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from torchobj import _torchobj
from torchobj.cli.doctor.check import Check
from torchobj.cli.output import duration
from torchobj.config import StoreConfig
from torchobj.urls import Url, shown_url

#: AWS refuses signatures that are older than 15 minutes (S3 API reference, RequestTimeTooSkewed); torchobj corrects the
#: time that it signs with. Credentials and certificates expire by the clock of the machine.
_SKEW_S = 60.0
_LIMIT_S = 5.0
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


def checks(url: Url, config: StoreConfig) -> Iterator[Check]:
    """Checks the network to a store: what an unsigned HEAD of its bucket shows."""
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
    region = _region(config)
    return f"https://s3{f'.{region}' if region else ''}.amazonaws.com", "AWS, unless the profile names another one"


def _region(config: StoreConfig) -> str | None:
    """The region that is configured."""
    return config.s3.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")


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
        given, found = _region(config), headers.get("x-amz-bucket-region")
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
        # `checks` has checked the scheme.
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
