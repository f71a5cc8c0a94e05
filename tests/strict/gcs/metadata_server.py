"""The metadata server of a virtual machine, as far as its tokens need it. Clients find it through GCE_METADATA_HOST.

Source: Compute Engine documentation, "View and query VM metadata".
"""

from __future__ import annotations

import json

from ..response import Response
from .errors import GcsError
from .request import Request

_EMAIL = "strict@torchobj.iam.gserviceaccount.com"
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def check_flavor(request: Request) -> None:
    """Raises forbidden if the header that protects the metadata from foreign pages is missing."""
    if request.headers.get("metadata-flavor") != "Google":
        raise GcsError("forbidden", "Missing Metadata-Flavor:Google header.")


def _json(document: object) -> Response:
    return Response(200, [("Content-Type", "application/json")], json.dumps(document).encode())


def token(request: Request) -> Response:
    """Returns a new token, valid for the limit `token_lifetime_s`."""
    lifetime_s = request.state.limits.token_lifetime_s
    new = f"ya29.strict-metadata_{request.state.next_number():06d}"
    request.project.tokens.add(new, request.now_s + lifetime_s)
    return _json({"access_token": new, "expires_in": lifetime_s, "token_type": "Bearer"})


def get_metadata(request: Request) -> Response:
    path = request.target.path
    if path.endswith("universe-domain"):
        raise GcsError("notFound")
    if path.endswith("/project-id"):
        return Response(200, [("Content-Type", "application/text")], b"torchobj")
    if path.endswith("/email"):
        return Response(200, [("Content-Type", "application/text")], _EMAIL.encode())
    if path:
        return _json({"aliases": ["default"], "email": _EMAIL, "scopes": [_SCOPE]})
    return Response(200, [("Content-Type", "application/text")], b"computeMetadata/\n")
