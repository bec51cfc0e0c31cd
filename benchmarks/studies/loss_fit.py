"""Fit the held-out loss of masked LMs by their size and tokens: `LOSS` of planner/new_run.py.

    python -m benchmarks.studies.loss_fit

Three shapes, each after two numbers of tokens, of benchmarks/results/novels.json: ln(loss) is a
constant, plus a factor times ln(millions of weights in the layers), plus a factor times
ln(millions of tokens). The runs in `LEFT_OUT` test it.
"""

import json
from pathlib import Path

import numpy as np

from deberta_ds.planner.new_run import loss_terms

RESULTS = Path("benchmarks/results/novels.json")
FITTED = [f"fit_{shape}_{tokens}" for shape in ("4x128", "6x192", "7x256")
          for tokens in ("8M", "32M")]
LEFT_OUT = ["fit_6x192_16M", "scratch_seed1", "scratch_seed2", "scratch_seed3", "scratch_mlm"]


def fit(runs: dict) -> tuple[np.ndarray, dict[str, float]]:
    """Return (the three constants, {run: expected - measured loss in nats})."""
    names = FITTED + LEFT_OUT
    rows = np.array([loss_terms(*runs[name]["shape"], runs[name]["last_logged_tokens"])
                     for name in names])
    losses = np.array([runs[name]["evaluations"][-1]["masked_loss"] for name in names])
    few = len(FITTED)
    constants = np.linalg.lstsq(rows[:few], np.log(losses[:few]))[0]
    return constants, dict(zip(names, np.exp(rows @ constants) - losses, strict=True))


if __name__ == "__main__":
    constants, errors = fit(json.loads(RESULTS.read_text())["runs"])
    print("LOSS =", tuple(constants.round(4).tolist()))
    for name, error in errors.items():
        print(f"{name:16} {error:+.3f} nats{'  (left out)' * (name in LEFT_OUT)}")
