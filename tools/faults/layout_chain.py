"""One run in four layouts, ranks 1 -> 2 -> 4 -> 1 and ZeRO 3 -> 1 -> 2 -> 3, against the unbroken.

    python tools/faults/layout_chain.py --out benchmarks/results/layout_chain.json \
        --figure docs/images/layout_chain.svg

Each leg is stopped at a checkpoint and resumed with --resume auto in the next layout. Dropout is
off: its masks are drawn per rank, so they depend on the world size. (The unbroken run has one rank,
ZeRO-3.)
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import rank_helpers  # noqa: E402
from launching import losses, make_run  # noqa: E402

from deberta_ds.base.files import write_atomic  # noqa: E402

LEGS = [(1, 3), (2, 1), (4, 2), (1, 3)]  # (ranks, ZeRO stage)


def measure(work: Path, precision: str, steps_per_leg: int) -> dict:
    run_file = make_run(work, steps=str(steps_per_leg * len(LEGS)), eval_every="1000000")
    for stage in {stage for _, stage in LEGS}:
        zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
        (work / f"zero{stage}.json").write_text(json.dumps(
            {"zero_optimization": zero, "bf16": {"enabled": precision == "bf16"}}))

    def arguments(stage: int, out: Path) -> list[str]:
        return ["--config", str(run_file), "--deepspeed_config", str(work / f"zero{stage}.json"),
                f"--out_dir={out}"]

    chain, unbroken = work / "chain", work / "unbroken"
    for leg, (ranks, stage) in enumerate(LEGS):
        stop = f"--train.stop_after={(leg + 1) * steps_per_leg}"
        rank_helpers.run(ranks, [*arguments(stage, chain), stop], work / "chain.log")
        print(f"{precision} leg {leg + 1}: {ranks} ranks, ZeRO-{stage}", flush=True)
    rank_helpers.run(1, arguments(3, unbroken), work / "unbroken.log")
    a, b = losses(chain), losses(unbroken)
    return {"precision": precision, "legs": LEGS, "steps_per_leg": steps_per_leg,
            "chain": [a[step] for step in sorted(a)], "unbroken": [b[step] for step in sorted(b)],
            "maximum_difference": max(abs(a[step] - b[step]) for step in b)}


def draw(result: dict, path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = range(1, len(result["unbroken"]) + 1)
    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 4.6), height_ratios=(2, 1))
    top.plot(steps, result["unbroken"], color="#b0b0b0", linewidth=5, label="unbroken: 1 rank, "
             "ZeRO-3")
    top.plot(steps, result["chain"], color="#1f5fa8", linewidth=1.5, label="four layouts")
    top.set_ylabel("loss")
    top.legend(frameon=False)
    difference = [abs(a - b) for a, b in zip(result["chain"], result["unbroken"], strict=True)]
    bottom.plot(steps, difference, color="#1f5fa8", linewidth=1.5)
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
    for leg, (ranks, stage) in enumerate(result["legs"]):
        start = leg * result["steps_per_leg"]
        for axes in (top, bottom):
            axes.axvline(start + 0.5, color="#d0d0d0", linewidth=0.8)
        text = f"{ranks} rank{'s' if ranks > 1 else ''}, ZeRO-{stage}"
        top.annotate(text, (start + 0.8, 1.02), xycoords=("data", "axes fraction"), fontsize=8)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps of each leg")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--work", type=Path, default=Path("runs/layout_chain"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path, help="SVG or PNG of the first precision")
    options = parser.parse_args()
    results = []
    for precision in options.precisions:
        work = options.work.resolve() / precision
        shutil.rmtree(work, ignore_errors=True)
        results.append(measure(work, precision, options.steps))
        print(f"{precision}: maximum difference {results[-1]['maximum_difference']:.2e}")
    if options.out:
        write_atomic(options.out, json.dumps(results, indent=1) + "\n")
    if options.figure:
        draw(results[0], options.figure)


if __name__ == "__main__":
    main()
