"""Creates boto3 clients for the test servers, and extracts the errors that they get. Tests decide what to request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from .launch import Server


def boto_client(server: Server, *, config: Config | None = None, **changed: Any) -> Any:
    """Returns a path-style client without retries; `changed` replaces arguments of boto3's `client`."""
    own = Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}, connect_timeout=5, read_timeout=10)
    given = {
        "endpoint_url": server.endpoint,
        "aws_access_key_id": server.access_key,
        "aws_secret_access_key": server.secret_key,
        "region_name": server.region,
        "verify": server.ca_file,
        "config": own.merge(config or Config()),
    }
    return _session().client("s3", **given | changed)


@functools.cache
def _session() -> boto3.session.Session:
    # Each session parses botocore's description of S3, in a fifth of a second.
    return boto3.session.Session()


@functools.cache
def shared_client(server: Server) -> Any:
    """Returns the same client in each call."""
    return boto_client(server)


def refusal(call: Callable[..., Any], **named: Any) -> tuple[int, str]:
    """Returns the status and code of the error that a boto3 call raises; AssertionError if it succeeds."""
    try:
        call(**named)
    except ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
    raise AssertionError(f"{call.__name__} was not refused")
