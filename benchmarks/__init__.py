"""Measurements, one question each: `get.py`, `loader.py`, `mlperf.py`. The servers under them are in `lab`; what they
read by in `rivals` and `feeds`; how a figure is taken in `measure`, `loop` and `dlio`. Nothing here is part of what
users install.
"""
