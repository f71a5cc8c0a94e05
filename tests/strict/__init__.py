"""A small strict server of S3 or GCS: verifies every request, stores objects in memory, and injects scripted faults.

`connection` serves a request in this order: `wire` (bytes of the head), admission by the `protocol`, `faults` (scripted
faults), the operation, `damage` and `sending` (the response). The protocols are `s3` and `gcs.protocol`:

- S3: `target` and `routing` (operation, bucket and key), `signature` and `access` (authentication and authorisation),
  `payload` and `checksums` (the body), `operations` (the operation on `store`).
- GCS: the package `gcs` explains itself.

`control_api` configures the server over HTTP; `control` is its client for tests. `server` listens.
"""
