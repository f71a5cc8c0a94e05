"""The servers of the benchmarks, on loopback: `nginx` is the cheapest origin to read from, with optional latency, tail
or a rate limit; `origin` the cheapest to write to and to list, with the API of Google Cloud Storage; `versitygw` a real
server; `limit` a bare loop in Rust. `objects` defines the content of objects, so that every client can be verified;
`location` describes how each client reaches a bucket; `progress` says what runs.
"""
