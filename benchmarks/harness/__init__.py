"""What the benchmarks share: `rivals` are the clients, `fork_server` runs one in a process of its own; `measure`,
`transfers`, `states`, `weights`, `ranks`, `loop` and `dlio` take a measurement; `report` compares rounds, `targets`
judges them; `program` is the command line. `fault_*` are the cells of `faults.py`.
"""

from benchmarks.harness import targets as targets
from benchmarks.harness.fork_server import Clients as Clients
from benchmarks.harness.fork_server import JobError as JobError
from benchmarks.harness.measure import Stopwatch as Stopwatch
from benchmarks.harness.measure import Timed as Timed
from benchmarks.harness.measure import timed as timed
from benchmarks.harness.program import Program as Program
from benchmarks.harness.report import LIMIT as LIMIT
from benchmarks.harness.report import OURS as OURS
from benchmarks.harness.report import Rounds as Rounds
from benchmarks.harness.report import Spread as Spread
from benchmarks.harness.targets import Part as Part
from benchmarks.harness.targets import Verdict as Verdict
