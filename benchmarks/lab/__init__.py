"""The servers of the benchmarks, on loopback: `nginx` is the cheapest origin to read from, with optional latency, tail
or a rate limit; `origin` the cheapest to write to and to list; `versitygw` a real server; `limit` a bare loop in Rust.
`packages` has rivals that need their own environment. `objects` defines the content of objects, so that every client
can be verified; `location` describes how each client reaches a bucket.
"""
