"""Measurements, one question each: `get.py`, `loader.py`, `mlperf.py`, `checkpoint.py`, `gcs.py`, `faults.py`. `lab`
has servers, `rivals` and `feeds` the clients; `measure`, `loop` and `dlio` take a measurement. Users do not install any
of this.
"""
