"""Creates google-cloud-storage clients for the test servers, and extracts the errors that they get."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from google.api_core.exceptions import GoogleAPICallError
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.oauth2.credentials import Credentials

from .launch import Server

PROJECT = "torchobj"


def gcs_client(server: Server) -> Any:
    """Returns a client of the JSON API with the server's token, or without credentials if it has none."""
    options = {"api_endpoint": server.endpoint}
    credentials = Credentials(server.token) if server.token else AnonymousCredentials()  # type: ignore[no-untyped-call]
    return storage.Client(project=PROJECT, credentials=credentials, client_options=options)


@functools.cache
def shared_client(server: Server) -> Any:
    """Returns the same client in each call."""
    return gcs_client(server)


def refusal(call: Callable[..., Any], *given: Any, **named: Any) -> tuple[int, str]:
    """Returns the status and reason of the error that a call raises; AssertionError if it succeeds."""
    try:
        call(*given, **named)
    except GoogleAPICallError as error:
        details = error.response.json()["error"]
        return details["code"], details["errors"][0]["reason"]
    raise AssertionError(f"{call.__name__} was not refused")
