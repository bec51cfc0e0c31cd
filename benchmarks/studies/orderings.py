"""Score finished runs of several arms and seeds, and say which of the papers' orderings hold.

    python -m benchmarks.studies.orderings score --runs trained --blimp blimp.tar.xz --nli glue \
        --superglue superglue --common trained/mlm-s0
    python -m benchmarks.studies.orderings table --runs trained
    python -m benchmarks.studies.orderings table --runs recipes --name recipes

Runs are directories named ARM-sSEED. `score` goes on where it was stopped: what a run has in
RUN/scores/ is not made again. `table` prints what is there and writes results/NAME-cpu.json.

A difference between two arms is formed seed by seed (same seed, same rows, same order). Its 95 %
interval is Student's over the seeds; minimal pairs have a second one, a bootstrap over the mean
differences of paradigms. A claim holds where all intervals are above zero, does not where all are
below, and is not significant otherwise.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.measure import save
from deberta_ds.base.files import write_atomic
from deberta_ds.tracking.records import read_metrics

FINETUNING = {"MNLI": (3, 1), "CB": (10, 3), "RTE": (4, 1), "WiC": (4, 1)}  # epochs, seeds
CLAIMS = (("gdes", "es"), ("es", "nes"), ("gdes", "nes"), ("nes", "mlm"), ("gdes", "mlm"),
          ("mlm", "mlm-noemd"), ("mlm", "mlm-nop2c"), ("mlm", "mlm-noc2p"), ("mlm", "mlm-bert"),
          ("mlm-fall", "mlm"),
          *((f"mlm-half-{part}", "mlm-half")
            for part in ("betas", "wsd", "all", "muon", "allmuon", "b16")),
          ("mlm-half-allmuon", "mlm-half-all"),
          *((f"gdes-third-{part}", "gdes-third")
            for part in ("fall", "lambda", "muon", "hot", "all")),
          *((f"cached-{one}", "gdes-third") for one in ("third", "plain", "hot")),
          ("cached-third", "cached-plain"), ("cached-hot", "cached-third"),
          ("deep-quarter", "deep-half"),
          ("mlm-grow128", "mlm-batch128"), ("mlm-grow512", "mlm-batch512"))
COSTS = {"tokens, millions": ("tokens_seen", 1e6), "minutes": ("seconds", 60)}
LOSSES = ("masked_loss", "generator_loss")  # their masks differ, so they do not compare
_NAME = re.compile(r"(?P<arm>.+)-s(?P<seed>\d+)")
_DRAWS = 10_000


@dataclass(frozen=True)
class Run:
    """One finished run."""

    arm: str
    seed: int
    path: Path

    @property
    def scores(self) -> Path:
        return self.path / "scores"


def find_runs(directory: Path) -> list[Run]:
    found = [Run(match["arm"], int(match["seed"]), path) for path in sorted(directory.iterdir())
             if (match := _NAME.fullmatch(path.name)) and is_finished(path)]
    if not found:
        raise SystemExit(f"{directory}: no finished run named ARM-sSEED")
    return found


def is_finished(path: Path) -> bool:
    if not (path / "metrics.jsonl").is_file():
        return False
    records = read_metrics(path / "metrics.jsonl")
    last = records[-1] if records else {}
    return last.get("event") == "end" and last.get("detail") == "all steps done"


# ------------------------------------------------------------------------------------------ score

def score(run: Run, options: argparse.Namespace) -> None:
    """Run the product's own commands on a run; each writes one file or directory."""
    run.scores.mkdir(exist_ok=True)
    if options.blimp:
        once(run.scores / "minimal_pairs.json", "launch/minimal_pairs.py", "--model", run.path,
             "--data", options.blimp, "--sample", options.sample, "--out", run.scores)
    if options.common and "mlm" not in run.arm:
        printed(run.scores / "common.json", "launch/evaluate.py", "--run", run.path, "--generator",
                options.common)
    for task in options.tasks:
        if data := options.nli if task == "MNLI" else options.superglue:
            finetune(run, task, data)


def finetune(run: Run, task: str, data: Path) -> None:
    epochs, seeds = FINETUNING[task]
    more = ("--any_size",) if task == "MNLI" else ()  # of which a small one may be given
    once(run.scores / task / f"seed-{seeds}/result.json", "launch/finetune.py",
         "--task", task, "--model", run.path, "--data", data, "--skip_test", "--out", run.scores,
         "--deepspeed_config", "ds_configs/zero1_autocast_cpu.json", "--no_save_model",
         "--seeds", seeds, "--all.learning_rate=5e-4", "--all.global_batch_size=32",
         "--all.max_length=128", f"--all.epochs={epochs}", *more)


def once(result: Path, *command) -> None:
    if not result.exists():
        subprocess.run([sys.executable, *map(str, command)], check=True)


def printed(result: Path, *command) -> None:
    """As `once`, for a command that prints its JSON."""
    if not result.exists():
        done = subprocess.run([sys.executable, *map(str, command)], check=True, text=True,
                              stdout=subprocess.PIPE)
        write_atomic(result, done.stdout[done.stdout.index("{"):])


# ------------------------------------------------------------------------------------------ table

def measures(run: Run) -> dict[str, float]:
    """Return every score of a run that is there, in percent unless it is a loss."""
    records = read_metrics(run.path / "metrics.jsonl")
    last = [record for record in records if record["kind"] == "eval"][-1]
    found = {name: last[key] / unit for name, (key, unit) in COSTS.items() if key in last}
    found |= {name.replace("_", " "): last[name] for name in LOSSES if name in last}
    if pairs := read(run.scores / "minimal_pairs.json"):
        found |= {measure: 100 * pairs["scorers"][name]["accuracy"]
                  for measure, name in pair_measures(pairs).items()}
    if probe := read(run.scores / "probe.json"):
        found["probe"] = 100 * probe["accuracy"]
    if common := read(run.scores / "common.json"):
        found["common ROC-AUC"] = 100 * common["roc_auc"]
    for task, (_, seeds) in FINETUNING.items():
        results = [read(path) for path in sorted(run.scores.glob(f"{task}/seed-*/result.json"))]
        if len(results) == seeds:  # a seed that diverged counts as 0
            found[task] = 100 * float(np.median([one["score"] for one in results]))
    return found


def pair_measures(pairs: dict) -> dict[str, str]:
    """Return {measure: scorer}. A generator's likelihoods are not compared with a whole masked
    LM's; what compares all runs is the network that is kept, by the scorer that fits it.
    """
    scorers = pairs["scorers"]
    if "discriminator_sum" not in scorers:
        return {"BLiMP": "pll_word"} | {f"BLiMP {name}": name for name in scorers}
    whose = {name: "generator " if name.startswith("pll") else "" for name in scorers}
    return {"BLiMP": "discriminator_sum"} | {f"BLiMP {whose[name]}{name}": name for name in scorers}


def paradigms(run: Run, measure: str) -> dict[str, float]:
    pairs = read(run.scores / "minimal_pairs.json")
    scorer = pairs["scorers"][pair_measures(pairs)[measure]]
    return {name: 100 * values["accuracy"] for name, values in scorer["paradigms"].items()}


def read(path: Path) -> dict | None:
    return json.loads(path.read_text()) if path.exists() else None


def difference(better: dict[int, Run], worse: dict[int, Run], measure: str) -> dict | None:
    """Return how far one arm is ahead of the other in a measure, with intervals and a verdict."""
    sign = -1 if measure.endswith(" loss") else 1
    seeds = [seed for seed in sorted(better.keys() & worse.keys())
             if measure in measures(better[seed]) and measure in measures(worse[seed])]
    if not seeds:
        return None
    ahead = np.array([sign * (measures(better[seed])[measure] - measures(worse[seed])[measure])
                      for seed in seeds])
    found = {"seeds": len(seeds), "ahead": float(ahead.mean())}
    intervals = []
    if len(seeds) > 1:
        half = stats.t.ppf(0.975, len(seeds) - 1) * ahead.std(ddof=1) / np.sqrt(len(seeds))
        intervals.append([float(ahead.mean() - half), float(ahead.mean() + half)])
        found["interval over seeds"] = intervals[-1]
    if measure.startswith("BLiMP"):
        pairs = [(paradigms(better[seed], measure), paradigms(worse[seed], measure))
                 for seed in seeds]
        by_paradigm = np.array([np.mean([one[name] - other[name] for one, other in pairs])
                                for name in pairs[0][0]])
        draws = np.random.default_rng(0).choice(by_paradigm, (_DRAWS, len(by_paradigm)))
        intervals.append(np.percentile(draws.mean(axis=1), [2.5, 97.5]).tolist())
        found["interval over paradigms"] = intervals[-1]
    found["verdict"] = verdict(intervals if len(seeds) > 1 else [])
    return found


def verdict(intervals: list[list[float]]) -> str:
    if not intervals:
        return "one seed: no claim"
    if all(low > 0 for low, _ in intervals):
        return "holds"
    if all(high < 0 for _, high in intervals):
        return "does not hold"
    return "not significant"


def table(runs: list[Run]) -> dict:
    """Print means, spreads and claims; return them."""
    arms: dict[str, dict[int, Run]] = defaultdict(dict)
    for run in runs:
        arms[run.arm][run.seed] = run
    found = {arm: {seed: measures(run) for seed, run in of_arm.items()}
             for arm, of_arm in arms.items()}
    names = list(dict.fromkeys(name for of_arm in found.values() for one in of_arm.values()
                               for name in one))
    print("| | " + " | ".join(f"{arm} ({len(of_arm)})" for arm, of_arm in found.items()) + " |")
    print("|---" * (len(found) + 1) + "|")
    for name in names:
        cells = []
        for of_arm in found.values():
            values = [one[name] for one in of_arm.values() if name in one]
            spread = f" +- {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
            some = f" ({len(values)})" if len(values) < len(of_arm) else ""
            cells.append(f"{np.mean(values):.2f}{spread}{some}" if values else "-")
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("\n| ahead | of | measure | seeds | by | over seeds | over paradigms | verdict |")
    print("|---" * 8 + "|")
    claims = []
    for one, other in CLAIMS:
        for name in names:
            if name in COSTS or not (one in arms and other in arms):
                continue
            if found_here := difference(arms[one], arms[other], name):
                claims.append({"arm": one, "of": other, "measure": name} | found_here)
                spans = [" to ".join(f"{end:+.2f}" for end in found_here[key])
                         if key in found_here else "-"
                         for key in ("interval over seeds", "interval over paradigms")]
                print(f"| {one} | {other} | {name} | {found_here['seeds']} | "
                      f"{found_here['ahead']:+.2f} | {spans[0]} | {spans[1]} | "
                      f"{found_here['verdict']} |")
    return {"runs": found, "claims": claims}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("score", "table"))
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--blimp", type=Path)
    parser.add_argument("--sample", type=int, default=200, help="pairs a paradigm")
    parser.add_argument("--nli", type=Path, help="directory of MNLI/, which may be small")
    parser.add_argument("--superglue", type=Path)
    parser.add_argument("--tasks", nargs="*", choices=FINETUNING, default=list(FINETUNING),
                        help="fine-tuned on")
    parser.add_argument("--name", default="orderings", help="of the table's results")
    parser.add_argument("--common", type=Path, help="whose generator all discriminators face")
    options = parser.parse_args()
    runs = find_runs(options.runs)
    if options.what == "score":
        for run in runs:
            score(run, options)
        return
    save(options.name, "cpu", table(runs))


if __name__ == "__main__":
    main()
