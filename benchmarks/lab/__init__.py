"""What is measured against, on loopback: `nginx` is the cheapest origin, with latency, a tail or a limit where wanted,
`versitygw` a real server, `limit` the bare loop in Rust. `objects` says what the objects contain, so that every client
can be checked; `place` where a bucket is and how it is reached.
"""
