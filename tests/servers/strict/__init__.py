"""A small strict S3: it verifies all that it is sent, remembers it in memory, and misbehaves by script.

A request passes, in this order: `wire` (the head's bytes), `target` and `routing` (what is asked, of what),
`signature` and `access` (by whom, and whether they may), `faults` (what shall go wrong), `payload` and `checksums`
(the body), `operations` (doing it in `store`), `sending` (the answer's bytes). `connection` is that order.

`control_api` scripts it over HTTP; `control` is the client of that for tests. `server` listens.
"""
