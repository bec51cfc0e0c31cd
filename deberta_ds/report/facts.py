"""The top of a run's page: its state, what was learned in a sentence, and the numbers to know."""

import re
from dataclasses import dataclass

from deberta_ds.base.numbers import counted, format_count, format_duration, format_value
from deberta_ds.base.own_code import short_name
from deberta_ds.objectives.base import Metric
from deberta_ds.report.rundata import Run, baseline_name

_TOLD = {"save": ("checkpoint saved", "checkpoints saved"),
         "skip": ("update skipped", "updates skipped"), "rollback": ("rollback", "rollbacks"),
         "overflow": ("fp16 overflow", "fp16 overflows")}
_NUMBER = re.compile(r"(?<![\w-])([+−-]?\d[\d,]*(?:\.\d+)?\s?%?)")


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page; `value` is the measured one, unrounded."""

    key: str
    title: str
    text: str
    note: str
    value: float | None = None
    tone: str = ""  # up, down or none
    is_name: bool = False


@dataclass(frozen=True)
class Header:
    """Where a run stands. `tone`: good, wait, quiet or bad; `lead` alternates text and numbers."""

    name: str
    state: str
    tone: str
    lead: list[str]
    failure: str  # what ended it
    done: float  # percent
    marks: list[float]  # percent
    progress: str
    history: str
    resumed: str


def header(run: Run) -> Header:
    """Return the title, its state, what was learned in a sentence, and the progress."""
    state, tone = _state(run)
    total = run.total_steps
    return Header(
        name=run.name, state=state, tone=tone, lead=_NUMBER.split(_sentence(run)),
        failure=run.events[-1].get("detail", "") if state == "Failed" else "",
        done=round(100 * run.last_step / total, 2),
        marks=[round(min(100.0, 100 * at / total), 2) for at in run.resumed_at],
        progress=f"Step {run.last_step:,} of {total:,} · "
                 f"{format_duration(run.training_seconds())} of training",
        history=_history(run), resumed=_resumed(run))


def _state(run: Run) -> tuple[str, str]:
    """Return what the run is doing, and how good that is: green only if something was learned."""
    last = run.events[-1]["event"] if run.events else ""
    if last == "stop":
        return "Stopped", "wait"
    if last == "fail":
        return "Failed", "bad"
    if last != "end":
        return ("In progress", "wait") if run.is_running else ("Interrupted", "bad")
    compared = [ahead for metric in run.metrics
                if (ahead := ahead_of_baseline(metric, run.scores)) is not None]
    if not compared:
        return "Finished, not evaluated" if not run.evals else "Finished", "quiet"
    if not any(compared):
        return "Finished, but nothing was learned", "bad"
    if not all(compared):
        return "Finished, partly at its baselines", "wait"
    return "Finished", "good"


def ahead_of_baseline(metric: Metric, scores: dict[str, float]) -> bool | None:
    """Return whether a score is better than the baseline; None: not known, or noise."""
    score, baseline = scores.get(metric.key), metric.baseline_of(scores)
    if score is None or baseline is None:
        return None
    if metric.noise and abs(score - baseline) <= metric.noise:
        return None
    return metric.is_better(score, baseline)


def _sentence(run: Run) -> str:
    if not run.evals:
        return "Not evaluated yet: the curves below show training steps only."
    # A hyphen at which no line breaks, as in ROC-AUC.
    return re.sub(r"(?<=[A-Z])-(?=[A-Z])", "\u2011", run.objective.headline(run.scores))


def _history(run: Run) -> str:
    """Return "4 checkpoints saved, 1 update skipped": what happened how often."""
    counts = {kind: sum(event["event"] == kind for event in run.events) for kind in _TOLD}
    return ", ".join(f"{count:,} {_TOLD[kind][count != 1]}" for kind, count in counts.items()
                     if count or kind == "save")


def _resumed(run: Run) -> str:
    """Return "resumed at step 30 (twice), 60": each place once."""
    steps = [event["step"] for event in run.events if event["event"] == "resume"]
    times = {step: steps.count(step) for step in run.resumed_at}
    often = {1: "", 2: " (twice)"}
    places = [f"{step:,}{often.get(count, f' ({count} times)')}" for step, count in times.items()]
    if len(places) > 4:
        return f"resumed {len(steps)} times, last at step {run.resumed_at[-1]:,}"
    return f"resumed at step {', '.join(places)}" if places else ""


def tiles(run: Run, price: float | None = None) -> list[Tile]:
    """Return the model, the work done, what was learned, and what it cost."""
    learned = [_learned(metric, run) for metric in run.metrics if metric.in_tile]
    size = run.saved.parameters
    parameters = Tile("parameters", "Parameters", format_value(size, "count"),
                      f"vocabulary of {run.saved.run.model.vocab_size:,}", size)
    return [_model(run), parameters, _tokens(run), _speed(run), *learned, *_costs(run, price)]


def _learned(metric: Metric, run: Run) -> Tile:
    value = run.scores.get(metric.key)
    baseline, ahead = metric.baseline_of(run.scores), ahead_of_baseline(metric, run.scores)
    note = "held out" if baseline is None else \
        f"{baseline_name(metric)} {format_value(baseline, metric.unit)}"
    tone = "" if ahead is None else "up" if ahead else "down"
    return Tile(metric.key, metric.title, format_value(value, metric.unit), note, value, tone)


def _model(run: Run) -> Tile:
    shape, objective = run.saved.run.model, run.saved.run.objective
    note = (f"{shape.num_layers:,} layers · {shape.hidden_size:,} hidden · "
            f"{shape.num_heads:,} heads")
    names = [short_name(objective.kind).upper()]
    if len({m.network for m in run.objective.METRICS}) > 1:
        names.append(objective.embedding_sharing.upper())
    return Tile("model", "Model", " + ".join(names), note, is_name=True)


def _tokens(run: Run) -> Tile:
    tokens, rows, epochs = (run.last(key) for key in ("tokens_seen", "sequences_seen", "epochs"))
    notes = [f"{rows:,.0f} packed sequences"] if rows is not None else []
    if epochs is not None:
        notes.append(f"{epochs:.2f} epochs")
    return Tile("tokens_seen", "Tokens seen", format_value(tokens, "count"), " · ".join(notes),
                tokens)


def _speed(run: Run) -> Tile:
    speed, share, flops = (run.middle(key)
                           for key in ("tokens_per_second", "mfu", "flops_per_second"))
    note = "tokens/s, median"
    if share is not None:
        note += f" · {share:.1%} of peak FLOP/s"
    elif flops is not None:
        note += f" · {format_count(flops / 1e9)} GFLOP/s"
    return Tile("tokens_per_second", "Throughput", format_value(speed, "count"), note, speed)


def cost(run: Run, price: float) -> tuple[float, float]:
    """Return (hours of all ranks that were paid for, starts and repeated steps too; their cost)."""
    lost = run.time_use.get("starts and repeated steps", 0.0) * run.world_sizes()[-1]
    hours = (run.rank_seconds() + lost) / 3600
    return hours, hours * price


def _costs(run: Run, price: float | None) -> list[Tile]:
    """Return time, cost, machine and source; memory and goodput where they were measured."""
    seconds, sizes = run.training_seconds(), run.world_sizes()
    of = "GPU" if run.saved.device == "cuda" else "rank"
    ranks = (f"{sizes[0]:,} to " if len(sizes) > 1 else "") + counted(sizes[-1], of)
    hours = run.rank_seconds() / 3600
    note = f"{ranks} · {hours:,.{2 if hours < 10 else 0}f} {of}-hours"
    found = [Tile("seconds", "Training time", format_duration(seconds), note, seconds)]
    if price is not None:
        paid, whole = cost(run, price)
        found.append(Tile("cost", "Cost", f"{whole:,.2f}", f"{paid:,.2f} {of}-hours at {price:g}, "
                          "starts and repeated steps included", whole))
    if run.saved.hardware:
        found.append(Tile("hardware", "Hardware", run.saved.hardware, ranks, is_name=True))
    if commit := run.saved.commit:
        notes = [f"branch {run.saved.branch}"] if run.saved.branch else []
        notes += ["with uncommitted changes"] if commit.endswith("+") else []
        found.append(Tile("commit", "Source", commit[:7], ", ".join(notes), is_name=True))
    others = dict(run.saved.kernels)  # {part of the model: the kernel it took, and why}
    if attention := others.pop("attention", None):
        names = ", ".join(f"{part} {one.get('kernel', '')}" for part, one in others.items())
        found.append(Tile("kernels", "Kernels", f"attention {attention.get('kernel', '')}",
                          " · ".join(filter(None, (attention.get("why"), names))), is_name=True))
    if peaks := [value for _, value in run.points("train", "peak_memory_bytes")]:
        found.append(Tile("peak_memory_bytes", "Peak memory", format_value(max(peaks), "bytes"),
                          "of the first rank", max(peaks)))
    if whole := sum(run.time_use.values()):
        share = run.time_use["steps"] / whole
        found.append(Tile("goodput", "Goodput", format_value(share, "share"),
                          "of its jobs' time went into steps that count", share))
    return found
