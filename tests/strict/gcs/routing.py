"""Determines the operation from method, path and query. The modules of the operations perform it.

The name of an object is one segment of the path: a name with an unencoded slash is not found. A query parameter that
the operation does not have is answered with 400, so that no client relies on it being ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..wire import Headers
from .errors import GcsError
from .names import decode

_COMMON = frozenset(["alt", "fields", "prettyPrint", "quotaUser", "userProject"])
_CONDITIONS = "ifGenerationMatch ifGenerationNotMatch ifMetagenerationMatch ifMetagenerationNotMatch"
_SOURCE_CONDITIONS = (
    "ifSourceGenerationMatch ifSourceGenerationNotMatch ifSourceMetagenerationMatch ifSourceMetagenerationNotMatch"
)
# Parameters that may be given several times.
_REPEATED = ("permissions",)
_METADATA_ROOT = "computeMetadata/v1"


@dataclass(frozen=True)
class Route:
    """One operation: a path whose segments in braces are variables, and the parameters that it takes.

    chosen_by: the operations of one path and method differ in these parameters.
    """

    operation: str
    method: str
    path: tuple[str, ...]
    parameters: frozenset[str]
    chosen_by: Mapping[str, str] = field(default_factory=dict)


def _route(operation: str, method: str, path: str, parameters: str = "", **chosen_by: str) -> Route:
    return Route(operation, method, tuple(path.split("/")), _COMMON | set(parameters.split()), chosen_by)


_BUCKETS = "storage/v1/b"
_BUCKET = "storage/v1/b/{bucket}"
_OBJECT = "storage/v1/b/{bucket}/o/{object}"
_UPLOAD = "upload/storage/v1/b/{bucket}/o"
_READ = f"generation projection softDeleted {_CONDITIONS}"
_INSERT = f"uploadType name contentEncoding kmsKeyName projection {_CONDITIONS}"
# A session's URL has those of its start, too.
_SESSION = f"upload_id {_INSERT}"

ROUTES = (
    _route("GetMedia", "GET", _OBJECT, _READ, alt="media"),
    _route("GetMedia", "GET", f"download/{_OBJECT}", _READ, alt="media"),
    _route("GetObject", "GET", _OBJECT, _READ),
    _route("DeleteObject", "DELETE", _OBJECT, f"generation {_CONDITIONS}"),
    _route("PatchObject", "PATCH", _OBJECT, f"generation projection {_CONDITIONS}"),
    _route("ComposeObject", "POST", f"{_OBJECT}/compose", f"kmsKeyName {_CONDITIONS}"),
    _route(
        "RewriteObject",
        "POST",
        f"{_OBJECT}/rewriteTo/b/{{bucket2}}/o/{{object2}}",
        "rewriteToken maxBytesRewrittenPerCall destinationKmsKeyName projection sourceGeneration "
        f"{_CONDITIONS} {_SOURCE_CONDITIONS}",
    ),
    _route(
        "ListObjects",
        "GET",
        f"{_BUCKET}/o",
        "prefix delimiter startOffset endOffset pageToken maxResults versions softDeleted includeTrailingDelimiter "
        "projection",
    ),
    _route("InsertObject", "POST", _UPLOAD, _INSERT, uploadType="multipart"),
    _route("InsertObject", "POST", _UPLOAD, _INSERT, uploadType="media"),
    _route("StartResumable", "POST", _UPLOAD, _INSERT, uploadType="resumable"),
    _route("ResumableChunk", "PUT", _UPLOAD, _SESSION, uploadType="resumable"),
    _route("ResumableStatus", "PUT", _UPLOAD, _SESSION, uploadType="resumable"),
    _route("CancelResumable", "DELETE", _UPLOAD, _SESSION, uploadType="resumable"),
    _route("ListBuckets", "GET", _BUCKETS, "project prefix pageToken maxResults projection"),
    _route("CreateBucket", "POST", _BUCKETS, "project projection"),
    _route("GetBucket", "GET", _BUCKET, f"projection {_CONDITIONS}"),
    _route("TestPermissions", "GET", f"{_BUCKET}/iam/testPermissions", "permissions"),
    _route("Token", "GET", f"{_METADATA_ROOT}/instance/service-accounts/{{account}}/token", "scopes"),
    _route("GetMetadata", "GET", f"{_METADATA_ROOT}/instance/service-accounts/{{account}}/", "recursive"),
    _route("GetMetadata", "GET", f"{_METADATA_ROOT}/instance/service-accounts/{{account}}/email"),
    _route("GetMetadata", "GET", f"{_METADATA_ROOT}/project/project-id"),
    _route("GetMetadata", "GET", f"{_METADATA_ROOT}/universe/universe-domain"),
    _route("GetMetadata", "GET", ""),
)
OPERATIONS = frozenset(route.operation for route in ROUTES)
METADATA_OPERATIONS = ("Token", "GetMetadata")


@dataclass(frozen=True)
class Target:
    """What a request addresses: the variables of its path and the parameters of its query, decoded."""

    operation: str
    path: str
    names: Mapping[str, str]
    query: Mapping[str, str]
    repeated: Mapping[str, list[str]]


def _names_of(route: Route, segments: list[str]) -> dict[str, str] | None:
    """Returns the variables of a path, or None if the path is not the route's."""
    if len(segments) != len(route.path):
        return None
    names = {}
    for expected, segment in zip(route.path, segments, strict=True):
        if expected.startswith("{"):
            if not segment:
                return None
            names[expected[1:-1]] = decode(segment)
        elif expected != segment:
            return None
    return names


def _query_of(target: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    query: dict[str, str] = {}
    repeated: dict[str, list[str]] = {name: [] for name in _REPEATED}
    for segment in target.partition("?")[2].split("&"):
        name, _, value = (decode(part, plus_is_space=True) for part in segment.partition("="))
        if name in repeated:
            repeated[name].append(value)
        elif name in query:
            raise GcsError("invalid", f"The query parameter {name!r} is given twice.", parameter=name)
        elif name:
            query[name] = value
    return query, repeated


def parse_target(method: str, target: str, headers: Headers) -> Target:
    """Finds the operation of a request.

    Errors: notFound where no path matches, methodNotAllowed where the path has no such method, invalid where a
    parameter is unknown, given twice or has no valid value.
    """
    path = target.partition("?")[0][1:]
    found = [(route, names) for route in ROUTES if (names := _names_of(route, path.split("/"))) is not None]
    if not found:
        raise GcsError("notFound", f"No resource has the path /{path[:200]}")
    found = [(route, names) for route, names in found if route.method == method]
    if not found:
        raise GcsError("methodNotAllowed")
    query, repeated = _query_of(target)
    if query.get("alt") not in (None, "json", "media"):
        raise GcsError("invalid", f"Invalid value for: alt={query['alt']!r}", parameter="alt")
    operation = _operation_of([route for route, _ in found], query, headers)
    route, names = next((route, names) for route, names in found if route.operation == operation)
    given = {*query, *(name for name, values in repeated.items() if values)}
    for name in sorted(given - route.parameters):
        raise GcsError("invalid", f"{operation} has no query parameter {name!r}.", parameter=name)
    if query.get("alt") == "media" and operation != "GetMedia":
        raise GcsError("invalid", f"{operation} has no media.", parameter="alt")
    return Target(operation, path, names, query, repeated)


def _operation_of(routes: list[Route], query: Mapping[str, str], headers: Headers) -> str:
    chosen = [route for route in routes if all(query.get(name) == value for name, value in route.chosen_by.items())]
    if not chosen:
        name, value = next(iter(routes[0].chosen_by.items()))
        raise GcsError("invalid", f"Invalid value for: {name}={query.get(name)!r}, not {value!r}", parameter=name)
    # A status query has the method and path of a chunk.
    if chosen[0].operation == "ResumableChunk" and (headers.get("content-range") or "").startswith("bytes */"):
        return "ResumableStatus"
    return chosen[0].operation
