"""Draw what `benchmarks.studies.orderings` tabulates: docs/images/orderings-cpu.png.

    python -m benchmarks.studies.orderings_picture --runs trained --arms gdes es nes mlm
    python -m benchmarks.studies.orderings_picture --runs trained \
        --arms mlm mlm-noemd mlm-nop2c mlm-noc2p \
        --out docs/images/ablations-cpu.png

A line or a point a run; the short line is the mean of an arm's seeds, the dotted one is chance, or
the majority of the probe's classes.
"""

import argparse
import itertools
from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.studies.orderings import Run, find_runs, measures, read  # noqa: E402
from deberta_ds.base.errors import exit_cleanly  # noqa: E402
from deberta_ds.tracking.records import read_metrics  # noqa: E402

COLORS = ("#1b6ca8", "#f2b134", "#c0504d", "#6a8f3c", "#7e57a0", "#8d6e63", "#455a64", "#00897b")
CURVES = {"masked words, held-out loss in nats": ("masked_loss", "generator_loss"),
          "detection, held-out loss in nats": ("discriminator_loss",)}
SCORES = ("BLiMP", "common ROC-AUC", "probe")


def draw_curve(axis, title: str, names: tuple[str, ...], runs: list[Run], colors: dict) -> None:
    labelled = set()
    for run in runs:
        points = [(record["tokens_seen"] / 1e6, record[name])
                  for record in read_metrics(run.path / "metrics.jsonl")
                  if record["kind"] == "eval" for name in names if name in record]
        if points:
            axis.plot(*zip(*points, strict=True), color=colors[run.arm], lw=1.3, marker=".",
                      ls="--" if run.arm == "nes" else "-",  # whose generator is gdes's
                      label=None if run.arm in labelled else run.arm)
            labelled.add(run.arm)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("tokens seen, millions")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def draw_scores(axis, name: str, runs: list[Run], colors: dict) -> None:
    found = [(run.arm, measures(run)[name]) for run in runs if name in measures(run)]
    arms = list(dict.fromkeys(arm for arm, _ in found))
    for place, arm in enumerate(arms):
        values = [value for one, value in found if one == arm]
        axis.plot([place - 0.25, place + 0.25], [np.mean(values)] * 2, color=colors[arm], lw=2)
        axis.plot([place] * len(values), values, "o", color=colors[arm], ms=4)
    values = [value for _, value in found]
    if name.startswith("BLiMP"):
        values.append(50.0)
    if name == "probe":
        probed = next(found for run in runs if (found := read(run.scores / "probe.json")))
        values.append(100 * probed["majority"])
    if name != "common ROC-AUC":
        axis.axhline(values[-1], color="black", ls=":", lw=1)
    margin = max(0.5, 0.15 * (max(values) - min(values)))
    axis.set_ylim(min(values) - margin, max(values) + margin)
    axis.set_xlim(-0.5, len(arms) - 0.5)
    many = {"rotation": 30, "ha": "right"} if len(arms) > 3 else {}
    axis.set_xticks(range(len(arms)), arms, fontsize=8, **many)
    axis.set_title(f"{name}, %", fontsize=10)
    axis.grid(axis="y", alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/images/orderings-cpu.png"))
    parser.add_argument("--arms", nargs="+", help="which, in this order; default: all")
    options = parser.parse_args()
    runs = find_runs(options.runs)
    arms = options.arms or list(dict.fromkeys(run.arm for run in runs))
    runs = sorted((run for run in runs if run.arm in arms), key=lambda run: arms.index(run.arm))
    colors = dict(zip(arms, itertools.cycle(COLORS), strict=False))
    of_arms = {run.arm: measures(run) for run in runs}
    counts = Counter(name for found in of_arms.values() for name in found)
    names = [name for name in counts if name.startswith(SCORES) and counts[name] > 1 and (
        name in SCORES or any(one.get(name) != one.get("BLiMP") for one in of_arms.values()))]
    columns = max(len(CURVES), -(-len(names) // 2))
    curves = {title: names for title, names in CURVES.items() if any(
        name in record for run in runs for record in read_metrics(run.path / "metrics.jsonl")
        for name in names)}
    rows = 1 + -(-len(names) // columns)
    figure = plt.figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, 2 * columns)
    width = 2 * columns // len(curves)
    for place, (title, curve) in enumerate(curves.items()):
        draw_curve(figure.add_subplot(grid[0, place * width : (place + 1) * width]), title,
                   curve, runs, colors)
    for place, name in enumerate(names):
        row, column = divmod(place, columns)
        draw_scores(figure.add_subplot(grid[1 + row, 2 * column : 2 * column + 2]), name, runs,
                  colors)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    exit_cleanly(main)
