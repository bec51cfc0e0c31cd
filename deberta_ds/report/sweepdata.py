"""results.json of a fine-tuning sweep as the page reads it (written by launch/superglue.py)."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as checked

from deberta_ds.report.reading import READ, read_checked

RESULTS_FILE = "results.json"

Score = Annotated[float, Field(ge=-1, le=1)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Text = Annotated[str, Field(max_length=2000)]


@checked(config=READ, frozen=True)
class Spread:
    """A number over seeds."""

    median: Score
    min: Score
    max: Score


@checked(config=READ, frozen=True)
class TaskScores:
    """One task over its seeds. `labels` name the classes of the confusion matrices."""

    score: Spread
    metrics: dict[Text, Spread]
    baseline: Score | None
    seeds: Count
    failed: Count
    diagnostics: dict[Text, dict[Text, Spread]] = Field(default_factory=dict)
    labels: list[Text] = Field(default_factory=list)


@checked(config=READ, frozen=True)
class SeedRun:
    """One (task, seed) of the sweep; an entry of `history` holds epoch, loss and the metrics."""

    task: Text
    seed: Count
    score: Score
    failed: bool
    settings: dict[Text, Any] = Field(default_factory=dict)
    history: list[dict[Text, Annotated[float, Field(ge=-1e300, le=1e300)]]] = Field(
        default_factory=list)
    confusion: list[list[Count]] = Field(default_factory=list)


@checked(config=READ, frozen=True)
class Sweep:
    """Every task and run of a sweep; the mean is of the task medians."""

    tasks: dict[Text, TaskScores]
    model: str = ""
    mean: Score | None = None
    mean_of: Count = 0
    suite: Text = "SuperGLUE"
    suite_tasks: Count = 8  # what the leaderboard's mean is of
    runs: list[SeedRun] = Field(default_factory=list)

    def runs_of(self, task: str) -> list[SeedRun]:
        return sorted((run for run in self.runs if run.task == task), key=lambda run: run.seed)


def read_sweep(path: Path) -> Sweep:
    """Return the sweep in a results.json; UserError names what breaks a rule."""
    return read_checked(path, Sweep)[0]
