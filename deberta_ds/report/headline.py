"""The top of the page: the run's state in a sentence, its progress, and the headline numbers.

Each returns HTML. A tile that shows a measured number carries it unrounded in `data-value`.
"""

from html import escape
from statistics import median

from deberta_ds.log import format_count, format_duration
from deberta_ds.report.charts import value_text
from deberta_ds.report.rundata import Run

_STATES = {"end": "Finished", "stop": "Stopped"}


def header(run: Run) -> str:
    """Return the title with the run's state, what was learned in a sentence, and the progress."""
    state = _STATES.get(run.events[-1]["event"] if run.events else "", "In progress")
    total = max(run.total_steps, 1)
    marks = "".join(f'<u style="left:{100 * at / total:.2f}%"></u>' for at in run.resumed_at)
    saves = sum(event["event"] == "save" for event in run.events)
    history = f"{saves:,} checkpoint{'s' * (saves != 1)} saved"
    if run.resumed_at:
        steps = ", ".join(f"{step:,}" for step in run.resumed_at)
        history += f' &middot; <i class="key"></i>resumed at step {steps}'
    duration = format_duration(run.training_seconds())
    return (
        '<p class="eyebrow">DeBERTa pretraining report</p>'
        f'<div class="title"><h1>{escape(run.name)}</h1>'
        f'<span class="pill{"" if state == "Finished" else " wait"}">{state}</span></div>'
        f'<p class="lead">{_verdict(run)}</p><div class="bar"><div class="track">'
        f'<i class="done" style="width:{100 * run.last_step / total:.2f}%"></i>{marks}</div>'
        f"<p><span>Step {run.last_step:,} of {run.total_steps:,} &middot; {duration} of training"
        f"</span><span>{history}</span></p></div>"
    )


def _verdict(run: Run) -> str:
    if not run.evals:
        return "Not evaluated yet: the curves below show training rows only."
    text = ""
    accuracy, unigram = run.last("eval", "generator_accuracy"), run.last("eval", "unigram_accuracy")
    if accuracy is not None and unigram is not None:
        text = (
            f"On held-out text the {'generator' if run.has_discriminator else 'model'} names "
            f"<b>{value_text(accuracy, 'share')}</b> of the masked tokens; always guessing the "
            f"most frequent one would name {value_text(unigram, 'share')}."
        )
    gain, area = run.last("eval", "discriminator_gain"), run.last("eval", "roc_auc")
    if gain is not None:
        verb = "beats" if gain > 0 else "does not yet beat"
        nats = f"<b>{value_text(gain, 'gain')}</b> nats"
        text += f" The discriminator {verb} its class prior ({nats})"
        if area is not None:
            text += f"; its ROC&#8209;AUC is <b>{value_text(area, 'number')}</b>"
        text += "."
    return text


def tiles(run: Run) -> str:
    """Return the headline numbers: the model, its size, the work done, and what it learned."""
    learned = _discriminator_tiles if run.has_discriminator else _language_model_tiles
    accuracy, unigram = run.last("eval", "generator_accuracy"), run.last("eval", "unigram_accuracy")
    tokens, rows = run.last("train", "tokens_seen"), run.last("train", "rows_seen")
    parts = [
        _model_tile(run),
        _parameters_tile(run),
        _tile("tokens_seen", "Tokens seen", tokens, "count",
              "" if rows is None else f"{rows:,.0f} packed rows"),
        _speed_tile(run),
        *learned(run),
        _tile("generator_accuracy",
              "Generator accuracy" if run.has_discriminator else "Masked accuracy", accuracy,
              "share", f"unigram baseline {value_text(unigram, 'share')}"),
    ]  # fmt: skip
    return f'<section class="card tiles">{"".join(parts)}</section>'


def _discriminator_tiles(run: Run) -> list[str]:
    gain, accuracy = (run.last("eval", f"discriminator_{key}") for key in ("gain", "accuracy"))
    prior = run.last("eval", "prior_accuracy")
    chance = value_text(None if prior is None else 1 - prior, "number")
    return [
        _tile("discriminator_gain", "Discriminator gain", gain, "gain",
              f"nats; accuracy {value_text(accuracy, 'share')}, prior {value_text(prior, 'share')}",
              "" if gain is None else "up" if gain > 0 else "down"),
        _tile("roc_auc", "ROC-AUC", run.last("eval", "roc_auc"), "number",
              "of replaced tokens, chance 0.500"),
        _tile("average_precision", "Average precision", run.last("eval", "average_precision"),
              "number", f"of replaced tokens, chance {chance}"),
    ]  # fmt: skip


def _language_model_tiles(run: Run) -> list[str]:
    return [
        _tile("seconds", "Training time", run.training_seconds(), "duration",
              f"{run.last_step:,} steps"),
        _tile("generator_loss", "Held-out loss", run.last("eval", "generator_loss"), "number",
              "nats a masked token"),
        _tile("generator_perplexity", "Perplexity", run.last("eval", "generator_perplexity"),
              "tenths", "of the masked tokens"),
    ]  # fmt: skip


def _model_tile(run: Run) -> str:
    model, objective = run.config.get("model", {}), run.config.get("objective", {})
    words = (("num_layers", "layers"), ("hidden_size", "hidden"), ("num_heads", "heads"))
    shape = " &middot; ".join(f"{model[key]:,} {word}" for key, word in words if key in model)
    kind = objective.get("kind", "").upper() or run.name
    if kind == "RTD" and "embedding_sharing" in objective:
        kind += f" + {objective['embedding_sharing'].upper()}"
    return (
        f'<div class="tile" data-key="model"><h3>Model</h3><b class="name">{escape(kind)}</b>'
        f"<p>{shape}</p></div>"
    )


def _parameters_tile(run: Run) -> str:
    """`parameters` of config.json is a count, or counts by network with or without their total."""
    parameters, rows = run.machine.get("parameters"), run.config.get("model", {}).get("vocab_size")
    note = "" if rows is None else f"vocabulary of {rows:,}"
    if isinstance(parameters, dict):
        networks = {name: count for name, count in parameters.items() if name != "total"}
        note = " &middot; ".join(f"{escape(k)} {format_count(v)}" for k, v in networks.items())
        parameters = parameters.get("total", sum(networks.values()))
    return _tile("parameters", "Parameters", parameters, "count", note)


def _speed_tile(run: Run) -> str:
    speeds = [value for _, value in run.points("train", "tokens_per_second")]
    mfu, flops = run.points("train", "mfu"), run.points("train", "flops_per_second")
    note = "tokens/s, median"
    if mfu:
        note += f" &middot; {100 * median(v for _, v in mfu):.1f}% of peak FLOP/s"
    elif flops:
        note += f" &middot; {format_count(median(v for _, v in flops) / 1e9)} GFLOP/s"
    return _tile("tokens_per_second", "Throughput", median(speeds) if speeds else None, "count",
                 note)  # fmt: skip


def _tile(key: str, title: str, value: float | None, unit: str, note: str, tone: str = "") -> str:
    data = "" if value is None else f' data-value="{value!r}"'
    return (
        f'<div class="tile" data-key="{key}"{data}><h3>{title}</h3>'
        f'<b class="{tone}">{value_text(value, unit)}</b><p>{note}</p></div>'
    )
