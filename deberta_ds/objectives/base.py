"""What an objective is: everything that differs between masked LM and replaced-token detection.

An objective is one module with one `Objective`; `objectives.of(run)` finds it by its kind. Nobody
else asks which kind a run is: the planner asks for FLOPs, the loop for means, evaluation for
scores, console and page for what to show, model files for the networks inside a state dict.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A number of metrics.jsonl as people see it: a chart and a table column of the page."""

    key: str  # in the records of metrics.jsonl
    title: str
    note: str  # one sentence under the title of its chart
    unit: str = "number"  # number, share, gain (signed), tenths
    network: str = "model"  # whose number it is: a group of columns and a colour
    # What needs no learning: a label, and its value in an evaluation's record (KeyError: unknown).
    baseline: tuple[str, Callable[[dict], float]] | None = None
    is_loss: bool = False  # logged at training steps too, drawn among the losses
    on_console: str = ""  # its column title at training steps; empty: none
    in_tile: bool = False  # among the numbers at the top of the page
