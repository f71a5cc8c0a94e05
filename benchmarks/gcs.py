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

import argparse
import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gcs_cases, gcs_targets, report
from benchmarks.lab import origin


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short rounds, without 4 GiB: not for publication")
    parser.add_argument("--rounds", type=int, help="rounds of each case (default 5, with --quick 2)")
    parser.add_argument("--only", action="append", help="only cases whose label has these words; may be repeated")
    parser.add_argument("--without", action="append", default=[], help="leave a client out; may be repeated")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    about = report.machine()
    print(*(f"{name}: {value}" for name, value in about.items()), "", sep="\n", flush=True)
    chosen = list(gcs_cases.cases(quick=given.quick))
    if given.only:
        chosen = [case for case in chosen if any(words in case.label for words in given.only)]
    done = []
    with contextlib.ExitStack() as stack:
        read = stack.enter_context(gcs_cases.locations(chosen))
        written = stack.enter_context(origin.running())
        rounds = given.rounds or (2 if given.quick else 5)
        bench = gcs_cases.Bench(read, written, rounds, 0.4 if given.quick else 1.0)
        stack.callback(bench.close)
        for case in chosen:
            done.append(bench.run(case, given.without))
            print(done[-1].table, "", sep="\n", flush=True)
    verdicts = gcs_targets.verdicts([each.rounds for each in done])
    if verdicts:
        print("against the targets", *(f"  {verdict.text()}" for verdict in verdicts), "", sep="\n")
    whole = not given.only and not given.without and rounds >= 3
    name = "gcs-quick" if given.quick else "gcs" if whole else "gcs-part"
    content = {
        "cases": [each.fields() for each in done],
        "targets": [verdict.fields() for verdict in verdicts],
    }
    print(report.write(name, (__doc__ or "").splitlines()[0], about, content))


if __name__ == "__main__":
    main()
