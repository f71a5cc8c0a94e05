"""What is measured against, on loopback: `nginx` is the cheapest origin to read from, with latency, a tail or a limit
where wanted, `origin` the cheapest to write to, `versitygw` a real server, `limit` the bare loop in Rust. `packages`
are those of rivals that need a place of their own. `objects` says what the objects contain, so that every client can
be checked; `place` where a bucket is and how it is reached.
"""
