"""What the benchmarks share: `rivals` are the clients, `fork_server` runs one in a process of its own; `measure`,
`reads`, `transfers`, `loop` and `dlio` take a measurement; `report` compares rounds, `targets` judges them; `program`
is the command line. `fault_*` are the cells of `faults.py`.
"""
