"""Draws the newest results of the benchmarks as SVG files: `make plots`, after `make bench`.

Each file shows one case: the median of each client's rounds and their spread, best first, with machine, commit and
number of rounds. Texts and lines are of a grey that is readable on white and on black.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib import pyplot

from benchmarks.harness import Spread

ROOT = Path(__file__).resolve().parent.parent
GREY, OURS, OTHERS = "#808590", "#2f7fd6", "#9aa5b1"


class Plot(NamedTuple):
    """What is drawn of a case."""

    benchmark: str
    case: str
    """Label of the case."""
    title: str
    items: float
    """Number of the benchmark's items in one unit."""


PLOTS = (
    Plot("loader", "rate, 20 ms, 4 workers", "shuffled objects of 110 KiB per second, responses after 20 ms", 1),
    Plot("loader", "tensor, 20 ms, 4 workers", "tensors of 110 KiB per second, responses after 20 ms", 1),
    Plot("get", "many 110 KiB plain", "objects of 110 KiB per second, from a server without latency", 1),
    Plot("checkpoint", "load 512 MiB, origin", "MB/s of a load of 512 MiB", 1e6),
    Plot("checkpoint", "save 512 MiB, origin", "MB/s of a save of 512 MiB", 1e6),
)


def draw(plot: Plot, result: dict[str, Any], folder: Path) -> Path:
    """Writes `BENCHMARK-CASE.svg` from results that have the case, and returns its path."""
    cases = {case["label"]: case["runs"] for case in result["cases"]}
    rates = {
        client: [run["items"] / run["wall_s"] / plot.items for run in runs] for client, runs in cases[plot.case].items()
    }
    spreads = {client: Spread.of(figures) for client, figures in rates.items()}
    clients = sorted(spreads, key=lambda client: spreads[client].median)
    medians = [spreads[client].median for client in clients]
    errors = [
        [spreads[client].median - spreads[client].least for client in clients],
        [spreads[client].most - spreads[client].median for client in clients],
    ]
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.4 * len(clients)), layout="constrained")
    colors = [OURS if client == "torchobj" else OTHERS for client in clients]
    bars = axes.barh(clients, medians, xerr=errors, color=colors, ecolor=GREY, capsize=2)
    axes.bar_label(bars, [f" {median:,.0f}".replace(",", "\N{NO-BREAK SPACE}") for median in medians], color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    axes.set_title(plot.title, loc="left", color=GREY, fontsize=11)
    rounds = len(next(iter(rates.values())))
    changed = ", with changes" if result["changed_since"] else ""
    about = f"{result['cpus']} CPUs of {result['cpu']}, commit {result['commit'][:7]}{changed}, {result['time'][:10]}"
    axes.set_xlabel(f"median, least and most of {rounds} rounds; {about}", color=GREY, fontsize=7)
    path = folder / f"{plot.benchmark}-{plot.case.replace(',', '').replace(' ', '-')}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    return path


def main() -> int:
    """Draws what was measured, and names what was not."""
    mpl.use("svg")
    # Text as text, and no random ids: the file changes only with the figures.
    style = {"svg.fonttype": "none", "svg.hashsalt": "torchobj", "axes.edgecolor": GREY}
    mpl.rcParams |= style | {f"{axis}tick.color": GREY for axis in "xy"}
    folder = ROOT / "docs" / "plots"
    folder.mkdir(exist_ok=True)
    drawn = 0
    for plot in PLOTS:
        files = (ROOT / "benchmarks" / "results" / f"{plot.benchmark}{part}.json" for part in ("", "-part"))
        results = [json.loads(file.read_text()) for file in files if file.exists()]
        measured = [result for result in results if plot.case in (case["label"] for case in result["cases"])]
        if not measured:
            print(f"{plot.benchmark}: {plot.case}: not measured; run benchmarks/{plot.benchmark}.py")
            continue
        print(draw(plot, max(measured, key=lambda result: result["time"]), folder).relative_to(ROOT))
        drawn += 1
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
