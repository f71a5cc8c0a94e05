"""The JSON API of Google Cloud Storage as a protocol of the strict server. Objects are in memory.

A request passes through `routing` (operation, bucket, names), `access` (token, permission, requester pays) and the
module of its operation: `reading`, `listing`, `inserting`, `resumable`, `composing`, `rewriting`, `changing`,
`buckets`, `metadata_server`. `writing` stores a new object for all of them, `conditions` checks preconditions,
`resources` and `masks` make the JSON. `protocol` calls them; the parent package has connections, faults and the log.
"""
