"""Draw benchmarks/results/novels.json: docs/images/novels.png.

    python -m benchmarks.studies.novels_picture

Left, held-out losses by tokens (the earlier model's first two stages read wrapped lines, all others
whole sentences); right, BLiMP by tokens, with 95 % intervals over pairs.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

RESULTS, OUT = Path("benchmarks/results/novels.json"), Path("docs/images/novels.png")
LOSSES = {"scratch_mlm": "masked LM, ten epochs", "scratch_seed1": "a third of it, seed 1",
          "scratch_seed2": "seed 2", "scratch_seed3": "seed 3",
          "scratch_rtd": "RTD, ten epochs (generator)", "scratch_rtd_17M": "RTD, 17.5 M tokens",
          "novels_mlm": "earlier model: wrapped lines", "novels_decay": "its decay",
          "novels_sentences": "then whole sentences", "novels_longer": "and more of them",
          "novels_ten_epochs": "ten epochs",
          "novels_rtd_from_mlm": "RTD from a masked LM",
          "rtd_weak_300": "the same, weaker generator"}
SCORES = {"pll_word": ("masked LM, or generator, by words", "o"),
          "discriminator_sum": ("discriminator, sum", "s")}


def main() -> None:
    runs = json.loads(RESULTS.read_text())["runs"]
    figure, (losses, scores) = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
    for place, (name, label) in enumerate(LOSSES.items()):
        run, color = runs[name], plt.cm.tab20(place)
        earlier = run.get("tokens_before", 0)
        points = [((earlier + one["tokens_seen"]) / 1e6,
                   one.get("masked_loss", one.get("generator_loss"))) for one in run["evaluations"]]
        losses.plot(*zip(*points, strict=True), ".-", color=color, lw=1.2, label=label)
        for tokens, found in run.get("blimp_by_tokens", {}).items():
            for scorer, (_, marker) in SCORES.items():
                if scorer in found:
                    middle, (low, high) = found[scorer]["accuracy"], found[scorer]["interval"]
                    scores.errorbar(float(tokens) / 1e6, 100 * middle, marker=marker, color=color,
                                    yerr=[[100 * (middle - low)], [100 * (high - middle)]], ms=4)
    for label, marker in SCORES.values():
        scores.plot([], [], marker, color="black", ms=4, label=label)
    scores.axhline(50, color="black", ls=":", lw=1)
    losses.set_title("held-out loss, nats", fontsize=10)
    scores.set_title("BLiMP, %, by tokens", fontsize=10)
    for axis in (losses, scores):
        axis.set_xlabel("tokens seen, millions")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="upper right" if axis is losses else "upper left")
    figure.savefig(OUT, dpi=110)


if __name__ == "__main__":
    main()
