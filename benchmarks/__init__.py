"""Measurements, one question each, with the alternatives in the same run: `get.py`, `list.py`, `scan.py`, `files.py`,
`shards.py`, `manifest.py`, `loader.py`, `mlperf.py`, `checkpoint.py`, `weights.py`, `gcs.py`, `faults.py`, `cold.py`.
`harness` has the clients, measurement and reporting, `lab` the servers. Users do not install any of this.
"""
