"""How fast, and with how much CPU, is Google Cloud Storage read and written, compared with other clients and with S3?

    python benchmarks/gcs.py                            # everything, about half an hour
    python benchmarks/gcs.py --quick                    # a preview, a few minutes: not for publication
    python benchmarks/gcs.py --only many --only "one 1" # the cases whose label has these words
    python benchmarks/gcs.py --only upload --without gcsfs

Needs the extra `bench`, nginx with its lua module, and a C compiler. Objects are read from nginx, which serves the
paths of the JSON, XML and S3 APIs; files are uploaded to an origin that discards them and counts requests by kind. Both
are on this machine, over plain HTTP and without credentials. A case is run by one client after the other, round after
round; each run is its own process, and CPU time includes that of the processes that it starts. obstore has the XML API
only. transfer_manager uploads files only; in the cases "upload" the others upload from memory, torchobj a file as well.
Files are in tmpfs or, where the label says disk, in the page cache. Of what is downloaded every byte of the last
batch or file is compared, in the loader one object of each batch; before its uploads are measured, what a client
uploads is read by boto3 and compared.
"""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gcs_cases, gcs_targets
from benchmarks.lab import origin
from benchmarks.program import Program


def main() -> None:
    program = Program(__doc__, 5, ("short rounds, without 4 GiB", 2)).has_cases()
    given = program.start()
    chosen = program.selected(list(gcs_cases.cases(quick=given.quick)), lambda case: case.label)
    done = []
    with contextlib.ExitStack() as stack:
        read = stack.enter_context(gcs_cases.locations(chosen))
        written = stack.enter_context(origin.running())
        bench = gcs_cases.Bench(read, written, given.rounds, 0.4 if given.quick else 1.0)
        stack.callback(bench.close)
        for case in chosen:
            done.append(bench.run(case, given.without))
            print(done[-1].table, "", sep="\n", flush=True)
    verdicts = gcs_targets.verdicts([each.rounds for each in done])
    program.finish("gcs", verdicts, {"cases": [each.fields() for each in done]})


if __name__ == "__main__":
    main()
