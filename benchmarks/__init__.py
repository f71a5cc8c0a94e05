"""Measurements, one question each: `get.py`. The servers under them are in `lab`, the clients in `rivals`, and how a
figure is taken in `measure`. Nothing here is part of what users install.
"""
