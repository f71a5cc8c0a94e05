"""Formats the tables of `checkpoint.py`. `checkpoint_targets` compares them with the targets."""

from benchmarks import beside, blocking, dcp, report
from benchmarks.checkpoint_measure import Case, Run
from benchmarks.report import OURS, Spread


def table(case: Case) -> str:
    """Returns the lines of one case: medians, with minimum and maximum if there were several rounds."""
    grown = "RSS +MiB" if case.action == "save" else "RSS +, of the payload"
    rows = [["", "rounds", "MB/s", "CPU-s per GB", grown, "requests", "s", "our rate is", "our CPU is"]]
    for client, runs in case.runs.items():
        share = case.spread(Run.grown_share, client).text(2)
        requests = [run.requests for run in runs if run.requests is not None]
        row = [
            client,
            str(len(runs)),
            case.spread(Run.rate, client).text(0),
            case.spread(Run.cpu_s_per_gb, client).text(2),
            case.spread(Run.grown_mib, client).text(0) if case.action == "save" else f"{share}x",
            f"{Spread.of(requests).median:.0f}" if requests else "",
            f"{case.spread(lambda run: run.wall_s, client).median:.2f}",
        ]
        if client != OURS and OURS in case.runs:
            row += [f"{case.ratio(figure, client).text(2)}x" for figure in (Run.rate, Run.cpu_s_per_gb)]
        else:
            row += ["", ""]
        rows.append(row)
    lines = [report.aligned(f"{case.label}: median (min-max)", rows)]
    lines += [f"  {client} is left out: {text}" for client, text in case.failed.items()]
    return "\n".join(lines)


def calls_table(calls: dcp.Calls) -> str:
    """Microseconds per tensor."""
    bases = (dcp.ASKING, dcp.NOTHING)
    rows = [["", "rounds", "us for each", *(f"beside {base}" for base in bases), f"CPU us beside {dcp.ASKING}"]]
    for client, runs in calls.runs.items():
        row = [client, str(len(runs)), calls.spread(dcp.Call.tensor_us, client).text(1)]
        if client not in bases:
            row += [Spread.of(calls.beside(dcp.Call.tensor_us, client, base)).text(1) for base in bases]
            row.append(Spread.of(calls.beside(dcp.Call.tensor_cpu_us, client, dcp.ASKING)).text(1))
        else:
            row += ["", "", ""]
        rows.append(row)
    return report.aligned(f"{calls.label}: median (min-max)", rows)


def phases_table(phases: beside.Phases) -> str:
    """Samples per second."""
    rows = [["", "rounds", "samples/s", "upload Mbit/s"]]
    for name, runs in phases.runs.items():
        uploaded = phases.spread(beside.Phase.upload_mbit_s, name).text(0) if name == beside.BESIDE else ""
        rows.append([name, str(len(runs)), phases.spread(beside.Phase.rate, name).text(0), uploaded])
    title = f"{phases.label}, uploads capped at {beside.CAP_MBIT_S:g} Mbit/s: median (min-max)"
    return report.aligned(title, rows)


def stops_table(stops: blocking.Stops) -> str:
    """Milliseconds for which the loop is blocked."""
    rows = [["", "rounds", "ms", "of a memcpy", "CPU ms"]]
    for name, runs in stops.runs.items():
        times = stops.ratio(blocking.Stop.milliseconds, blocking.MEMCPY, name)
        ms, cpu = (stops.spread(figure, name) for figure in (blocking.Stop.milliseconds, lambda stop: stop.cpu_s * 1e3))
        rows.append([name, str(len(runs)), ms.text(0), f"{times.text(2)}x", f"{cpu.median:.0f}"])
    return report.aligned(f"{stops.label}: median (min-max)", rows)
