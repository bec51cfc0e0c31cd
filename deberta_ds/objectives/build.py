"""RunConfig -> its objective, the model, and which parts of it are trained. These are named:

    embeddings    token embeddings (generator's table and delta), positions, the input's norm
    encoder       relative (the relative table and its norm), convolution and layers
    layers        every layer; layers.3: one; layers.0-5: six
    head          the rest
A network's name is a part too, alone or in front of one: generator, discriminator.layers.0-5. A
table that two networks share belongs to neither.
"""

import re
from collections.abc import Collection, Iterable
from importlib import import_module
from typing import cast

from torch import nn

from deberta_ds.base.errors import UserError
from deberta_ds.base.user_code import is_own, load, short_name
from deberta_ds.config.options import nearest
from deberta_ds.config.run_config import RunConfig
from deberta_ds.model.backbone import on_meta, places
from deberta_ds.model.encoder import Encoder
from deberta_ds.objectives.base import MINIMAL_PAIRS, Metric, Objective

_RANGE = re.compile(r"((?:\w+\.)?layers\.)(\d{1,3})-(\d{1,3})")


def objective_of(run: RunConfig) -> Objective:
    """Return the module that owns what a run learns."""
    return objective_named(run.objective.kind)


def objective_named(kind: str) -> Objective:
    """Return an objective by its kind; UserError for one of one's own that lacks something."""
    if not is_own(kind):
        return cast(Objective, import_module(f"deberta_ds.objectives.{kind}"))
    found = load("objective.kind", kind)
    needed = [*Objective.__annotations__, *(name for name in vars(Objective) if name[0] != "_")]
    if missing := [name for name in needed if not hasattr(found, name)]:
        raise UserError(f"objective.kind: {kind} lacks {', '.join(missing)}; write them as "
                        "deberta_ds/objectives/base.py says, or take another objective's")
    return found


def own_metrics(values: Iterable[str]) -> tuple[Metric, ...]:
    """Return how the scores of evaluate.metrics, each FILE.py:NAME, are shown."""
    return tuple(Metric(short_name(value), short_name(value).replace("_", " ").capitalize(),
                        f"By {value}.", network="own", in_tile=True) for value in values)


def metrics_of(run: RunConfig) -> tuple[Metric, ...]:
    """Return all scores that evaluations of a run may have."""
    return *objective_of(run).METRICS, MINIMAL_PAIRS, *own_metrics(run.evaluate.metrics)


def build_model(run: RunConfig, valid_vocab: int | None = None) -> nn.Module:
    """Return the uninitialized model of a run.

    `valid_vocab` is the tokenizer's size: rows of the table above it are outside every softmax.
    """
    model = objective_of(run).build(run, valid_vocab)
    for module in model.modules():
        if isinstance(module, Encoder):
            module.checkpointing = run.train.activation_checkpointing
            module.checkpointing_interval = run.train.activation_checkpointing_interval
    return model


def parameter_sizes(run: RunConfig) -> dict[str, int]:
    """Return {parameter: number of its elements} of a run's model."""
    return {name: p.numel() for name, p in on_meta(build_model, run).named_parameters()}


def held_parameters(run: RunConfig, names: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the parameters that never move, and those that wait for step train.freeze_steps."""
    if not (run.train.freeze or run.init.embeddings_only):
        return set(), set()
    parts = parts_of(names)
    named = {name for label in run.train.freeze for name in parameters_in(parts, label)}
    fixed = {"words.weight"} if run.init.embeddings_only else set()
    return (fixed, named - fixed) if run.train.freeze_steps else (fixed | named, set())


def parts_of(names: Iterable[str]) -> dict[str, set[str]]:
    """Return {part: its parameters} of a model, every part that can be named but ranges."""
    found: dict[str, set[str]] = {}
    for name, place in places(names).items():
        labels = [place.part, *["encoder"] * (place.part in ("relative", "convolution", "layers")),
                  *[f"layers.{place.layer}"] * (place.layer >= 0)]
        if place.network:
            labels += [place.network, *(f"{place.network}.{label}" for label in labels)]
        for label in labels:
            found.setdefault(label, set()).add(name)
    return found


def parameters_in(parts: dict[str, set[str]], label: str) -> set[str]:
    """Return the parameters of a part or a range of layers; none if it is not all there."""
    layers = _RANGE.fullmatch(label)
    labels = [label] if not layers else [
        f"{layers[1]}{number}" for number in range(int(layers[2]), int(layers[3]) + 1)]
    is_whole = all(one in parts for one in labels)
    return {name for one in labels for name in parts[one]} if is_whole else set()


def objective_problems(run: RunConfig, on_nvme: bool) -> list[str]:
    """Return what is wrong with a run's objective, its scores, and what it freezes; `on_nvme`: of
    a state that is offloaded there.
    """
    found = _freeze_problems(run, on_nvme) if run.train.freeze or run.init.embeddings_only else []
    scores = [metric.key for metric in metrics_of(run)]
    found += [f"evaluate.metrics: {name} is the name of another score; call the function otherwise"
              for name in {name for name in scores if scores.count(name) > 1}]
    return [*found, *objective_of(run).problems(run)]


def _freeze_problems(run: RunConfig, on_nvme: bool) -> list[str]:
    train, names = run.train, parameter_sizes(run)
    parts, held = parts_of(names), held_parameters(run, names)
    known = [part for part in parts if "layers." not in part]
    ranges = [f"{part}.0-{sum(one.startswith(f'{part}.') for one in parts) - 1}"
              for part in known if part.endswith("layers")]
    found = [f"train.freeze: no {label!r} in this model{nearest(label, known)}; there are "
             f"{', '.join(known)}, and single layers or some of {', '.join(ranges)}"
             for label in train.freeze if not parameters_in(parts, label)]
    if len(set.union(*held)) == len(names):
        found.append("train.freeze names every parameter; leave out a part to be trained")
    if train.freeze_steps >= train.steps:
        found.append(f"train.freeze_steps = {train.freeze_steps}: not below train.steps = "
                     f"{train.steps}; leave it out to freeze all along")
    if held[0] and on_nvme:
        found.append("train.freeze, init.embeddings_only: what is frozen is not saved from NVMe;"
                     ' write "device": "cpu" and no nvme_path in the DeepSpeed JSON')
    return found
