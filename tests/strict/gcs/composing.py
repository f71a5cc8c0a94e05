"""ComposeObject: makes one object of up to 32. Source: GCS documentation, "Composite objects", and the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..response import Response
from .access import require
from .attributes import Attributes, patched
from .errors import GcsError
from .inserting import kms_key_of
from .names import check_object_name
from .request import Request
from .resources import object_response
from .store import Bucket, StoredObject, crc32c_of
from .writing import DECRYPT, check_declared, check_key, check_removable, store

SOURCES_LIMIT = 32
_REQUEST_FIELDS = {"kind", "sourceObjects", "destination", "deleteSourceObjects"}
_SOURCE_FIELDS = {"name", "generation", "objectPreconditions"}


def _check_fields(given: object, known: set[str], what: str) -> Mapping[str, Any]:
    if not isinstance(given, dict) or set(given) - known:
        raise GcsError("parseError", f"{what} must be an object with the fields {sorted(known)}.")
    return given


def _generation(value: object) -> int:
    """Returns a generation in JSON, which is text or a number."""
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdecimal()):
        raise GcsError("invalid", f"Invalid value for: generation={value!r}")
    return int(text)


def _source_of(bucket: Bucket, given: object) -> StoredObject:
    entry = _check_fields(given, _SOURCE_FIELDS, "A source object")
    name = check_object_name(entry["name"] if isinstance(entry.get("name"), str) else "")
    generation = entry.get("generation")
    stored = bucket.version(name, _generation(generation) if generation is not None else None)
    if stored is None:
        raise GcsError("notFound", f"Object {name} (generation: {generation or 0}) not found.")
    conditions = _check_fields(entry.get("objectPreconditions") or {}, {"ifGenerationMatch"}, "objectPreconditions")
    live = bucket.objects.get(name)
    wanted = conditions.get("ifGenerationMatch")
    if wanted is not None and _generation(wanted) != (live.generation if live is not None else 0):
        raise GcsError("conditionNotMet")
    return stored


def _sources_of(bucket: Bucket, given: object) -> list[StoredObject]:
    if not isinstance(given, list) or not given:
        raise GcsError("required", "You must provide at least one source component.")
    if len(given) > SOURCES_LIMIT:
        message = f"The number of source components provided ({len(given)}) exceeds the maximum ({SOURCES_LIMIT})"
        raise GcsError("invalid", message)
    sources = [_source_of(bucket, entry) for entry in given]
    if len({source.attributes.storage_class for source in sources}) > 1:
        raise GcsError("invalid", "The source objects must have the same storage class.")
    return sources


def compose_object(request: Request) -> Response:
    bucket, name = request.bucket, request.name
    given = _check_fields(request.json(), _REQUEST_FIELDS, "The request")
    destination = given.get("destination") or {}
    if not isinstance(destination, dict):
        raise GcsError("parseError", "destination must be an object.")
    require(bucket, "storage.objects.get")
    sources = _sources_of(bucket, given.get("sourceObjects"))
    for source in sources:
        check_key(bucket, DECRYPT, source.attributes.kms_key)
    # Each is deleted once, and what is at the destination is overwritten anyway.
    removed = {source.generation: source for source in sources if source.name != name}
    if given.get("deleteSourceObjects"):
        require(bucket, "storage.objects.delete")
        for source in removed.values():
            check_removable(request, bucket, source)
    content = b"".join(source.body for source in sources)
    check_declared({"crc32c": destination.get("crc32c")}, crc32c_of(content), None)
    stored = store(
        request,
        bucket,
        name,
        content,
        patched(Attributes(), destination),
        query=request.query,
        kms_key=kms_key_of(request.query, destination),
        component_count=sum(source.component_count or 1 for source in sources),
    )
    if given.get("deleteSourceObjects"):
        for source in removed.values():
            bucket.delete(source, request.now_s, permanently=True)
    return object_response(request, bucket, stored)
