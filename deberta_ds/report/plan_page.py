"""The planner's page: memory of each ZeRO stage and way of recomputing, drawn to one scale."""

from dataclasses import dataclass

from deberta_ds.planner.gpus import Gpu
from deberta_ds.planner.plan import RESERVED_BYTES, Choice, recommended
from deberta_ds.report.pages import render
from deberta_ds.report.tables import Cell, Table

PARTS = (("weights", "main"), ("optimizer", "main-soft"),
         ("forward, backward and update", "second-soft"), ("reserve", "base"))
_WIDEST = 2.5  # times a GPU's memory: a bar that is longer ends there


@dataclass(frozen=True)
class Bar:
    """One choice: the widths of its PARTS in percent of the scale."""

    name: str
    widths: list[float]
    note: str
    fits: bool
    is_best: bool


def plan_page(title: str, facts: list[str], choices: list[Choice], name: str, gpu: Gpu,
              ranks: int) -> str:
    """Return one self-contained HTML document."""
    best, limit = recommended(choices), gpu.memory
    scale = min(max(limit, *(sum(_segments(choice)) for choice in choices)), _WIDEST * limit)
    return render(
        "plan.html", title=title, facts=facts, gpu=name.upper(), parts=PARTS,
        best=best and f"ZeRO-{best.stage}, recompute {best.recompute}",
        cost=best and f"{best.days:.1f} days, {best.days * 24 * ranks:,.0f} GPU-hours",
        bars=[_bar(choice, scale, choice is best) for choice in choices],
        limit=round(100 * limit / scale, 2), limit_text=f"{limit / 1e9:.0f} GB",
        table=_table(choices, ranks, best))


def _segments(choice: Choice) -> list[float]:
    memory = choice.memory
    work = max(memory.work, memory.update)
    return [memory.weights + memory.buffers, memory.optimizer, work, RESERVED_BYTES]


def _bar(choice: Choice, scale: float, is_best: bool) -> Bar:
    left, widths = 0.0, []
    for size in _segments(choice):
        widths.append(round(min(100 * size / scale, 100 - left), 2))
        left += widths[-1]
    note = f"{sum(_segments(choice)) / 1e9:.1f} GB" + ("" if choice.fits else ", too much")
    return Bar(f"ZeRO-{choice.stage}, {choice.recompute}", widths, note, choice.fits, is_best)


def _table(choices: list[Choice], ranks: int, best: Choice | None) -> Table:
    heads = ("Compute / step", "Communication / step", "Step", "Tokens/s", "Days", "GPU-hours")
    rows = []
    for choice in choices:
        kind = "best" if choice is best else "" if choice.fits else "over"
        seconds = (choice.compute_seconds, choice.communication_seconds, choice.step_seconds)
        texts = (*(f"{value:.3f} s" for value in seconds),
                 f"{choice.tokens_per_second:,.0f}", f"{choice.days:.2f}",
                 f"{choice.days * 24 * ranks:,.0f}")
        rows.append([Cell(f"ZeRO-{choice.stage}", kind=f"stage {kind}"),
                     Cell(choice.recompute, kind=kind),
                     *(Cell(text, kind=f"n {kind}") for text in texts)])
    head = [Cell("Stage", kind=""), Cell("Recompute", kind=""), *map(Cell, heads)]
    note = ("What hides behind computation: under ZeRO-3 all communication, but a step lasts at "
            "least as long as Python takes to gather the weights; under ZeRO-1 and 2 the gradients "
            "but the last bucket, if overlap_comm is true; the new weights never. The rest adds to "
            "the step.")
    return Table("Time", note, head, rows)
