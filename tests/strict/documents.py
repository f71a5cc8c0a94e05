"""Writes and reads S3's XML. The operations define the meaning of each document."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from urllib.parse import quote_plus
from xml.etree import ElementTree

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
_TO_ESCAPE = re.compile(r'[&<>"\x00-\x1f\x7f]')


class MalformedDocument(Exception):
    """XML of a client that cannot be parsed or does not have the expected structure."""


def escape(text: str) -> str:
    """Escapes text for an element; control characters become character references, as in S3's responses.

    XML 1.0 forbids most such references: S3 offers encoding-type=url for this reason, and clients must request it.
    """
    return _TO_ESCAPE.sub(lambda found: _ESCAPES.get(found.group(), f"&#x{ord(found.group()):x};"), text)


def tag(name: str, text: str | int) -> str:
    """Returns an element that contains only text."""
    return f"<{name}>{escape(str(text))}</{name}>"


def group(name: str, *elements: str) -> str:
    """Returns an element that contains elements."""
    return f"<{name}>{''.join(elements)}</{name}>"


def document(name: str, *elements: str, namespace: bool = True) -> bytes:
    """Returns a document as bytes; S3's errors have no namespace."""
    attribute = f' xmlns="{NAMESPACE}"' if namespace else ""
    content = "".join(elements)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}{attribute}>{content}</{name}>'.encode()


def timestamp(moment_s: float) -> str:
    """Returns the ISO 8601 form of S3's documents, in milliseconds; `moment_s` is in seconds since the Unix epoch."""
    return datetime.fromtimestamp(moment_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def url_encoder(encoding_type: str | None) -> Callable[[str], str]:
    """Returns the encoder of encoding-type=url, form encoding (space as +) except for / and *, or the identity."""
    if encoding_type is None:
        return lambda text: text
    return lambda text: quote_plus(text, safe="/*")


class Node:
    """A parsed element whose children are found by name in any namespace, which clients may omit."""

    def __init__(self, element: ElementTree.Element) -> None:
        self._element = element
        self.name = element.tag.rpartition("}")[2]

    @property
    def text(self) -> str:
        return self._element.text or ""

    def __iter__(self) -> Iterator[Node]:
        return (Node(child) for child in self._element)

    def all(self, name: str) -> list[Node]:
        return [child for child in self if child.name == name]

    def find(self, name: str) -> str | None:
        """Returns the text of the child with that name, or None."""
        children = self.all(name)
        if len(children) > 1:
            raise MalformedDocument(f"<{self.name}> has {len(children)} <{name}>, at most one is allowed")
        return children[0].text if children else None

    def require(self, name: str) -> str:
        text = self.find(name)
        if text is None:
            raise MalformedDocument(f"<{self.name}> lacks <{name}>")
        return text


def parse(body: bytes, root: str) -> Node:
    """Parses a client's document, whose root element must have the given name."""
    try:
        node = Node(ElementTree.fromstring(body))
    except (ElementTree.ParseError, ValueError) as error:
        raise MalformedDocument(str(error)) from error
    if node.name != root:
        raise MalformedDocument(f"the root element is <{node.name}>, not <{root}>")
    return node
