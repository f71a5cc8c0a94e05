"""A small strict S3 server: verifies every request, stores objects in memory, and injects scripted faults.

A request passes through these modules in order: `wire` (bytes of the head), `target` and `routing` (operation, bucket
and key), `signature` and `access` (authentication and authorisation), `faults` (scripted faults), `payload` and
`checksums` (the body), `operations` (the operation on `store`), `sending` (the response). `connection` calls them.

`control_api` configures it over HTTP; `control` is its client for tests. `server` listens.
"""
