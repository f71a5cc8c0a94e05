"""One read for the ranks of a machine, or of a job: each rank reads other chunks, and all ranks receive all of them.

`reads` chooses how a load reads, and `chunks` divides its ranges. Through a `ring` of shared memory, which `handshake`
passes to them, the ranks of a machine hand over what they read; `participant` reads, publishes and copies chunks.
Between machines, `hosts` sends chunks by the process group.
"""
