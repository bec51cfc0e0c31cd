"""Draw benchmarks/results/*.json as the pictures of docs/evidence/performance.md.

  python -m benchmarks.studies.report [--results DIR] [--out docs/images]
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from benchmarks.measure import RESULTS  # noqa: E402
from deberta_ds.base.errors import UserError, exit_cleanly  # noqa: E402

OURS, PEER = "#1b6ca8", "#b9bec4"


def bars(path: Path, title: str, panels: list[tuple[str, dict[str, float]]], unit: str) -> None:
    """Write one picture: a panel of horizontal bars for each (name, {label: value})."""
    rows = -(-len(panels) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(9.6, 2.4 * rows + 0.4), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, values) in zip(axes.flat, panels, strict=False):
        labels = list(values)[::-1]
        colors = [OURS if label.startswith("ours") else PEER for label in labels]
        drawn = axis.barh(labels, [values[label] for label in labels], color=colors)
        axis.bar_label(drawn, fmt=_number, padding=3, fontsize=8)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel(unit, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.18)
        axis.locator_params(axis="x", nbins=3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(f"wrote {path}")


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def attention_panels(results: list[dict]) -> list[tuple[str, dict[str, float]]]:
    panels = []
    for result in results:
        if result["dropout"]:
            continue
        rows = result["rows"].items()
        values = {name: row["seconds"] * 1e3 for name, row in rows if "seconds" in row}
        panels.append((f"{result['batch']} x {result['length']}, {result['dtype']}", values))
    return panels


def step_panels(results: list[dict]) -> list[tuple[str, dict[str, float]]]:
    return [
        (
            f"{result['model']}, {result['rows']} x {result['length']}",
            {name: seconds * 1e3 for name, seconds in result["seconds"].items()
             if not name.startswith("large product")},
        )
        for result in results
    ]


def memory_panels(results: list[dict]) -> list[tuple[str, dict[str, float]]]:
    panels: dict[str, dict[str, float]] = {}
    for row in results:
        name = f"attention, {row['length']} tokens" if row["kind"] == "attention" else "LM head"
        if "peak_bytes" in row:
            label = "ours, chunked" if row["name"] == "chunked" else row["name"]
            panels.setdefault(name, {})[label] = row["peak_bytes"] / 2**20
    return list(panels.items())


PICTURES = {
    "attention": ("Attention, forward + backward", attention_panels, "ms"),
    "train_step": ("Training step", step_panels, "ms"),
    "memory": ("Peak memory added, forward + backward", memory_panels, "MiB"),
}


def draw(path: Path, out: Path) -> None:
    """Draw one results file."""
    document = json.loads(path.read_text())
    environment = document["environment"]
    processor = environment["processor"].partition(" (")[0]
    where = f"{processor}, torch {environment['packages']['torch']}"
    if environment["device"] == "cpu":
        threads = environment["threads"]
        where += f", {threads} thread{'s' if threads > 1 else ''}"
    title, panels_of, unit = PICTURES[path.stem.partition("-")[0]]
    panels = panels_of(document["results"])
    bars(out / f"{path.stem}.png", f"{title} ({where})", panels, unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    paths = [path for name in PICTURES for path in sorted(options.results.glob(f"{name}-*.json"))]
    if not paths:
        raise UserError(f"{options.results}: no results; run python -m benchmarks.attention first")
    for path in paths:
        draw(path, options.out)


if __name__ == "__main__":
    exit_cleanly(main)
