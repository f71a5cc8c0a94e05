"""What a loader measures and shows: the time it waited by cause (`exposed`), its `stats`, and their `report`.

`timeline` has the rates of a run over time, and `page` writes them to a file.
"""
