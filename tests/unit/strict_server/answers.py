"""Reads the strict server's responses on raw sockets."""

from __future__ import annotations


def code_in(body: bytes) -> str:
    return body.partition(b"<Code>")[2].partition(b"</Code>")[0].decode()
