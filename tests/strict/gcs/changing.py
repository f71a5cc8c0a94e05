"""DeleteObject and PatchObject."""

from __future__ import annotations

from dataclasses import replace

from ..response import Response
from .attributes import patched
from .errors import GcsError
from .reading import addressed_object
from .request import Request
from .resources import object_response
from .writing import check_removable


def delete_object(request: Request) -> Response:
    """Deletes the live object or the given generation; the latter is deleted for good."""
    stored = addressed_object(request)
    check_removable(request, request.bucket, stored)
    permanently = request.number("generation") is not None
    request.bucket.delete(stored, request.now_s, permanently=permanently)
    return Response(204)


def patch_object(request: Request) -> Response:
    """Changes the given fields of the metadata; the storage class can only be changed by a rewrite."""
    stored, resource = addressed_object(request), request.json()
    if resource.get("storageClass") not in (None, stored.attributes.storage_class):
        raise GcsError("invalid", "The storage class of an object can be changed by a rewrite only.")
    attributes = patched(stored.attributes, {name: value for name, value in resource.items() if name != "storageClass"})
    changed = replace(stored, attributes=attributes, metageneration=stored.metageneration + 1, updated_s=request.now_s)
    request.bucket.update(changed)
    return object_response(request, request.bucket, changed)
